"""Expressions of symbolic sizes in an exported program, which torch gives to sympy, which evaluates them as Python.

What passes is written again from the syntax tree that was checked, so that nobody parses the file's own text.
"""

from __future__ import annotations

import ast
import functools
import math
import re

__all__ = ["clean_expression"]

MAX_LENGTH, MAX_DEPTH = 20_000, 60
# sympy multiplies out, and finds common divisors, before anything can stop it.
MAX_TERMS, MAX_BITS, MAX_ARGUMENTS = 64, 4096, 16
LARGEST = 2**63 - 1
LARGEST_EXPONENT = 8
# torch.utils._sympy.symbol.prefix_str of sizes, backed and not; and of floats.
_SYMBOL = re.compile(r"(?:s|u|ps|zf|zuf)\d{1,9}")
_NUMBERS = {"Integer", "Float", "Rational"}
_ASSUMPTIONS = {"positive", "nonnegative", "negative", "nonpositive", "nonzero", "integer", "real", "evaluate"}
_CONSTANTS = {"oo", "int_oo", "true", "false", "True", "False"}
_POWERS = {"Pow", "PowByNatural", "FloatPow"}
_FUNCTIONS = {
    # What srepr writes of sympy's own
    "Add", "Mul", "Mod", "Max", "Min", "Abs", "And", "Or", "Not", "floor", "ceiling", "Symbol",
    "Equality", "Unequality", "StrictLessThan", "StrictGreaterThan", "LessThan", "GreaterThan",
    "Eq", "Ne", "Lt", "Le", "Gt", "Ge",
    # torch.utils._sympy.functions; without shifts, which can fill the memory
    "FloorDiv", "ModularIndexing", "Where", "PythonMod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv",
    "FloatTrueDiv", "IntTrueDiv", "IsNonOverlappingAndDenseIndicator", "TruncToFloat", "TruncToInt", "RoundToInt",
    "RoundDecimal", "ToFloat", "Identity",
    *_NUMBERS, *_POWERS,
}  # fmt: skip
_OPERATIONS = (
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub, ast.UAdd, ast.Invert, ast.BitAnd,
    ast.BitOr, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip


@functools.lru_cache(4096)
def clean_expression(text: str) -> str:
    """The expression, written again.

    Raises:
        ValueError: it is more than sums, products, comparisons and roundings of symbols and numbers.
    """
    try:
        if len(text) > MAX_LENGTH:
            raise ValueError("it is too long")
        tree = ast.parse(text, mode="eval").body
        _check(tree, MAX_DEPTH)
        _measure(tree)
        return ast.unparse(tree)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as err:
        shown = text if len(text) < 100 else f"{text[:100]}…"
        raise ValueError(f"holds the expression {shown!r}") from err


def _check(node: ast.expr, depth: int) -> None:
    if depth == 0:
        raise ValueError("it is nested too deeply")
    if isinstance(node, ast.Constant):
        _number(node.value)
    elif isinstance(node, ast.Name):
        if node.id not in _CONSTANTS and not _SYMBOL.fullmatch(node.id):
            raise ValueError(node.id)
    elif isinstance(node, ast.Call):
        _call(node, depth)
    elif isinstance(node, ast.BinOp):
        _operation(node.op)
        if isinstance(node.op, ast.Pow):
            _exponent(node.right)
        _check(node.left, depth - 1)
        _check(node.right, depth - 1)
    elif isinstance(node, ast.UnaryOp):
        _operation(node.op)
        _check(node.operand, depth - 1)
    elif isinstance(node, ast.Compare):
        for operation in node.ops:
            _operation(operation)
        for side in (node.left, *node.comparators):
            _check(side, depth - 1)
    else:
        raise ValueError(type(node).__name__)


def _call(node: ast.Call, depth: int) -> None:
    if not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS:
        raise ValueError("it calls a function of its choice")
    for keyword in node.keywords:
        known = keyword.arg in _ASSUMPTIONS or (node.func.id == "Float" and keyword.arg == "precision")
        if not known or not isinstance(keyword.value, ast.Constant) or type(keyword.value.value) not in (bool, int):
            raise ValueError("it names an argument that is no assumption")
        _number(keyword.value.value)
    texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    if node.func.id == "Symbol":
        if len(node.args) != 1 or len(texts) != 1 or not _SYMBOL.fullmatch(texts[0]):
            raise ValueError("it names a symbol that torch does not")
        return
    if node.func.id == "Float" and texts:
        if len(node.args) != 1 or not re.fullmatch(r"-?\d{1,40}(\.\d{1,40})?(e[+-]?\d{1,3})?", texts[0]):
            raise ValueError("it holds a number that is none")
        return
    if node.func.id in _POWERS:
        if len(node.args) != 2:
            raise ValueError("it is no power")
        _exponent(node.args[1])
    for arg in node.args:
        _check(arg, depth - 1)


def _exponent(node: ast.expr) -> float:
    """Its value: a power can be larger than the memory, where its exponent is no small number."""
    while isinstance(node, ast.UnaryOp) or (isinstance(node, ast.Call) and len(node.args) == 1):
        node = node.operand if isinstance(node, ast.UnaryOp) else node.args[0]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Rational" and node.args:
        node = node.args[0]  # its numerator, which is no smaller
    if not isinstance(node, ast.Constant) or not isinstance(node.value, int | float) or node.value > LARGEST_EXPONENT:
        raise ValueError("its exponent is no small number")
    return float(node.value)


def _operation(node: ast.AST) -> None:
    if not isinstance(node, _OPERATIONS):
        raise ValueError(type(node).__name__)


def _number(value: object) -> None:
    if type(value) not in (bool, int, float) or (isinstance(value, int) and abs(value) > LARGEST):
        raise ValueError("it holds what is no number, or a large one")


def _measure(node: ast.expr) -> tuple[int, int]:
    """How many terms an expression has, multiplied out, and how many bits its numbers, evaluated."""
    if isinstance(node, ast.Constant):
        return 1, node.value.bit_length() if isinstance(node.value, int) else 64
    if isinstance(node, ast.BinOp):
        found = _together(type(node.op), [_measure(node.left), _measure(node.right)], node.right)
    elif isinstance(node, ast.UnaryOp):
        found = _measure(node.operand)
    elif isinstance(node, ast.Compare):
        found = 1, max(_measure(side)[1] for side in (node.left, *node.comparators))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id != "Symbol":
        name = node.func.id
        if len(node.args) > MAX_ARGUMENTS:
            raise ValueError("a function of it has too many arguments")
        kind = ast.Pow if name in _POWERS else {"Add": ast.Add, "Mul": ast.Mult}.get(name, ast.FloorDiv)
        found = _together(kind, [_measure(arg) for arg in node.args], node.args[-1] if node.args else node)
    else:
        found = 1, 1
    if found[0] > MAX_TERMS or found[1] > MAX_BITS:
        raise ValueError("it gets too long, multiplied out")
    return found


def _together(kind: type, parts: list[tuple[int, int]], last: ast.expr) -> tuple[int, int]:
    terms, bits = [part[0] for part in parts], [part[1] for part in parts]
    if kind is ast.Pow:
        power = math.ceil(abs(_exponent(last)))
        return terms[0] ** max(power, 1), bits[0] * max(power, 1)
    if kind is ast.Mult:
        return math.prod(terms), sum(bits)
    if kind in (ast.Add, ast.Sub):
        return sum(terms), max(bits, default=1) + 1
    return 1, max(bits, default=1)  # what a function of several gives is one term
