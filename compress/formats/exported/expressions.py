"""Expressions of symbolic sizes in an exported program, which torch gives to sympy, which evaluates them as Python.

What passes is written again from the syntax tree that was checked, so that nobody parses the file's own text.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import re
from fractions import Fraction

__all__ = ["TooLongError", "clean_expression"]

MAX_LENGTH, MAX_DEPTH = 20_000, 60
# sympy multiplies out, and finds common divisors, before anything can stop it.
MAX_TERMS, MAX_BITS, MAX_DEGREE, MAX_ARGUMENTS = 64, 4096, 32, 16
MAX_PRECISION = 213
"""Of a float, in bits: 64 digits; torch writes 53."""
LARGEST = 2**63 - 1
LARGEST_EXPONENT = 8
# torch.utils._sympy.symbol.prefix_str of sizes, backed and not; and of floats.
_SYMBOL = re.compile(r"(?:s|u|ps|zf|zuf)[0-9]{1,9}")
_FLOAT = re.compile(r"-?[0-9]{1,40}(\.[0-9]{1,40})?(e[+-]?[0-9]{1,3})?")
_NUMBERS = {"Integer", "Float", "Rational"}
_ASSUMPTIONS = {"positive", "nonnegative", "negative", "nonpositive", "nonzero", "integer", "real"}
_CONSTANTS = {"oo", "int_oo", "true", "false", "True", "False"}
_POWERS = {"Pow", "PowByNatural", "FloatPow"}
_QUOTIENTS = {
    "FloorDiv", "CleanDiv", "CeilDiv", "IntTrueDiv", "FloatTrueDiv", "Mod", "PythonMod", "ModularIndexing",
}  # fmt: skip
_KINDS = {ast.Mult: "Mul", ast.Div: "FloorDiv", ast.FloorDiv: "FloorDiv", ast.Mod: "Mod"}
_FUNCTIONS = {
    # What srepr writes of sympy's own
    "Add", "Mul", "Max", "Min", "Abs", "And", "Or", "Not", "floor", "ceiling", "Symbol",
    "Equality", "Unequality", "StrictLessThan", "StrictGreaterThan", "LessThan", "GreaterThan",
    "Eq", "Ne", "Lt", "Le", "Gt", "Ge",
    # torch.utils._sympy.functions; without shifts, which can fill the memory
    "Where", "CeilToInt", "FloorToInt", "IsNonOverlappingAndDenseIndicator", "TruncToFloat", "TruncToInt", "RoundToInt",
    "RoundDecimal", "ToFloat", "Identity",
    *_NUMBERS, *_POWERS, *_QUOTIENTS,
}  # fmt: skip
_OPERATIONS = (
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub, ast.UAdd, ast.Invert, ast.BitAnd,
    ast.BitOr, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip


class TooLongError(ValueError):
    """Of an expression that is harmless, but for what sympy may take to evaluate it."""


@functools.lru_cache(4096)
def clean_expression(text: str) -> str:
    """The expression, written again.

    Raises:
        TooLongError: it would get too long, multiplied out.
        ValueError: it is more than sums, products, comparisons and roundings of symbols and numbers.
    """
    try:
        if len(text) > MAX_LENGTH:
            raise ValueError("it is too long")
        tree = ast.parse(text, mode="eval").body
        _measured(tree, MAX_DEPTH)
        return ast.unparse(tree)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as err:
        shown = text if len(text) < 100 else f"{text[:100]}…"
        kind = TooLongError if isinstance(err, TooLongError) else ValueError
        raise kind(f"holds the expression {shown!r}") from err


@dataclasses.dataclass(frozen=True)
class _Size:
    """What an expression gets to at most, as a fraction of two sums that are multiplied out.

    Attributes:
        terms: above, beside a constant.
        bits: of the longest number in it; powers of symbols count as well.
        constant: whether there may be one above.
        below: terms below.
        degree, degree_below: of both.
    """

    terms: int
    bits: int
    constant: bool = False
    below: int = 1
    degree: int = 0
    degree_below: int = 0

    @property
    def above(self) -> int:
        return self.terms + self.constant


def _measured(node: ast.expr, depth: int) -> _Size:
    """The size of what is known to be harmless: there is no node that is not looked at, and none that is not measured.

    Raises:
        TooLongError: it is too large.
        ValueError: it is something else, or nested too deeply.
    """
    if depth == 0:
        raise ValueError("it is nested too deeply")
    found = _size_of(node, depth)
    if max(found.above, found.below) > MAX_TERMS or found.bits > MAX_BITS:
        raise TooLongError("it gets too long, multiplied out")
    if max(found.degree, found.degree_below) > MAX_DEGREE:
        raise ValueError("it holds too high a power")
    return found


def _size_of(node: ast.expr, depth: int) -> _Size:
    if isinstance(node, ast.Constant):
        return _Size(0, _bits(_literal(node)), constant=True)
    if isinstance(node, ast.Name):
        if node.id in _CONSTANTS:
            return _Size(0, 1, constant=True)
        return _symbol(node.id)
    if isinstance(node, ast.Call):
        return _call(node, depth)
    if isinstance(node, ast.BinOp):
        _operation(node.op)
        if isinstance(node.op, ast.Pow):
            return _power(_measured(node.left, depth - 1), _exponent(node.right))
        return _together(
            _KINDS.get(type(node.op), ""), [_measured(side, depth - 1) for side in (node.left, node.right)]
        )
    if isinstance(node, ast.UnaryOp):
        _operation(node.op)
        return _sum([_measured(node.operand, depth - 1)])
    if isinstance(node, ast.Compare):
        for operation in node.ops:
            _operation(operation)
        return _sum([_measured(side, depth - 1) for side in (node.left, *node.comparators)])
    raise ValueError(type(node).__name__)


def _call(node: ast.Call, depth: int) -> _Size:
    if not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS:
        raise ValueError("it calls a function of its choice")
    name = node.func.id
    if len(node.args) > MAX_ARGUMENTS:
        raise ValueError("a function of it has too many arguments")
    named = _named(name, node.keywords)
    if name == "Symbol":
        (text,) = [arg.value if isinstance(arg, ast.Constant) else None for arg in node.args] or [None]
        return _symbol(text)
    if name in _NUMBERS:
        return _Size(0, max(_bits(_number(node)), *named.values(), 1), constant=True)
    if name in _POWERS:
        if len(node.args) != 2:
            raise ValueError("it is no power")
        return _power(_measured(node.args[0], depth - 1), _exponent(node.args[1], fractions=name == "FloatPow"))
    return _together(name, [_measured(arg, depth - 1) for arg in node.args])


def _named(name: str, keywords: list[ast.keyword]) -> dict[str, int]:
    """The arguments by name: of a symbol what it is assumed to be, of a float its bits; of no other function any."""
    found = {}
    for keyword in keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        assumed = name == "Symbol" and keyword.arg in _ASSUMPTIONS and type(value) is bool
        precise = name == "Float" and keyword.arg == "precision" and type(value) is int and 0 < value <= MAX_PRECISION
        if not (assumed or precise) or keyword.arg is None or not isinstance(value, int):
            raise ValueError("it names an argument that torch does not")
        found[keyword.arg] = value
    return found


def _symbol(name: object) -> _Size:
    if not isinstance(name, str) or not _SYMBOL.fullmatch(name):
        raise ValueError("it names a symbol that torch does not")
    return _Size(1, 1, degree=1)


def _literal(node: ast.expr) -> int | float:
    """A number as it stands there, with a sign or without."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -_literal(node.operand)
    value = node.value if isinstance(node, ast.Constant) else None
    if not isinstance(value, int | float) or not abs(value) <= (LARGEST if isinstance(value, int) else 1e308):
        raise ValueError("it holds what is no number, or a large one")
    return value


def _number(node: ast.Call) -> Fraction:
    """What Integer, Rational or Float is given, which are literals.

    Raises:
        ValueError: it is anything else.
    """
    kind = node.func.id if isinstance(node.func, ast.Name) else ""
    first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
    if kind == "Float" and len(node.args) == 1 and isinstance(first, str) and _FLOAT.fullmatch(first):
        return Fraction(first)
    values = [_literal(arg) for arg in node.args]
    if len(values) not in ((1, 2) if kind == "Rational" else (1,)):
        raise ValueError("it holds a number that is none")
    if kind != "Float" and (not all(type(value) is int for value in values) or (values[1:] and values[1] < 1)):
        raise ValueError("it holds a fraction of what is no whole number")
    return Fraction(values[0]) / Fraction(values[1] if values[1:] else 1)


def _bits(value: float | Fraction) -> int:
    """Of a number and of its inverse."""
    exact = Fraction(value)
    return max(exact.numerator.bit_length(), exact.denominator.bit_length())


def _exponent(node: ast.expr, *, fractions: bool = False) -> Fraction:
    """A power can be larger than the memory, where its exponent is no small number that stands there."""
    minus = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    inner = node.operand if minus and isinstance(node, ast.UnaryOp) else node
    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id in _NUMBERS:
        _named(inner.func.id, inner.keywords)
        value = _number(inner)
    else:
        value = Fraction(_literal(inner))
    if abs(value) > LARGEST_EXPONENT or (value.denominator > 1 and not fractions):
        raise ValueError("its exponent is no small number")
    return -value if minus else value


def _operation(node: ast.AST) -> None:
    if not isinstance(node, _OPERATIONS):
        raise ValueError(type(node).__name__)


def _together(kind: str, parts: list[_Size]) -> _Size:
    if kind == "Mul":
        return _product(parts)
    if kind in _QUOTIENTS and len(parts) > 1:
        return functools.reduce(_quotient, parts)
    return _sum(parts)


def _sum(parts: list[_Size]) -> _Size:
    """Of any function as well: it gives one of its arguments, or less than all of them together."""
    below = math.prod(part.below for part in parts)
    constant = any(part.constant for part in parts)
    degree_below = sum(part.degree_below for part in parts)
    return _Size(
        max(1 - constant, sum(part.terms * below // part.below for part in parts)) + (below - 1) * constant,
        sum(part.bits for part in parts) + 1,  # of fractions the denominators are multiplied
        constant,
        below,
        max((part.degree for part in parts), default=0) + degree_below,
        degree_below,
    )


def _product(parts: list[_Size]) -> _Size:
    constant = all(part.constant for part in parts)
    return _Size(
        math.prod(part.above for part in parts) - constant,
        sum(part.bits for part in parts) + 1,
        constant,
        math.prod(part.below for part in parts),
        sum(part.degree for part in parts),
        sum(part.degree_below for part in parts),
    )


def _power(base: _Size, exponent: Fraction) -> _Size:
    found = _product([base] * max(1, math.ceil(abs(exponent))))
    return found if exponent >= 0 else _inverse(found)


def _inverse(size: _Size) -> _Size:
    alone = size.terms == 0  # a number
    return _Size(
        0 if alone else size.below, size.bits, alone, 1 if alone else size.above, size.degree_below, size.degree
    )


def _quotient(left: _Size, right: _Size) -> _Size:
    """Rounded or not: the divisors of quotients of quotients are multiplied."""
    if right.terms == 0 and right.below == 1:  # terms that it divides come out of it, each alone
        return dataclasses.replace(left, terms=max(left.terms, 1), bits=left.bits + right.bits + 1)
    return _sum([_product([left, _inverse(right)]), _Size(right.above, right.bits)])
