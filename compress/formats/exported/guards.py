"""What torch.export decided by sizes, as a program says it: comparisons, read without evaluating them as Python."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from compress.vetting.texts import parse_json

__all__ = ["Sizes", "fails", "guards_in"]

Sizes = Mapping[tuple[str, int], int]
"""By input and axis."""

MOST, LONGEST, DEEPEST = 256, 1000, 40  # of guards; letters of one; nodes above a leaf
LARGEST = 1 << 62
_BINARY: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[..., int]] = {"max": max, "min": min, "Max": max, "Min": min}


def guards_in(text: bytes) -> list[str]:
    """The guards of a program's JSON; those that are no short texts are left out."""
    found = parse_json(text)
    told = found.get("guards_code") if isinstance(found, dict) else None
    return [each for each in told[:MOST] if isinstance(each, str)] if isinstance(told, list) else []


def fails(guards: Sequence[str], sizes: Sizes) -> str | None:
    """The first guard that does not hold at these sizes; what can't be read is taken to hold."""
    for guard in guards:
        try:
            if len(guard) <= LONGEST and not _value(ast.parse(guard, mode="eval").body, sizes, 0):
                return guard
        except (SyntaxError, ValueError, TypeError, ZeroDivisionError, RecursionError, MemoryError):
            continue
    return None


def _value(node: ast.AST, sizes: Sizes, depth: int) -> int | bool:
    """Of an expression of sizes.

    Raises:
        ValueError: it is something else, or too large.
    """

    def inner(each: ast.AST) -> int | bool:
        return _value(each, sizes, depth + 1)

    found: int | bool
    if depth > DEEPEST:
        raise ValueError("it is nested too deeply")
    match node:
        case ast.Constant(value=int() as found):
            pass
        case ast.BinOp(op=op) if type(op) in _BINARY:
            found = _BINARY[type(op)](inner(node.left), inner(node.right))
        case ast.UnaryOp(op=ast.USub()):
            found = -inner(node.operand)
        case ast.UnaryOp(op=ast.Not()):
            found = not inner(node.operand)
        case ast.BoolOp():
            found = (all if isinstance(node.op, ast.And) else any)([bool(inner(each)) for each in node.values])
        case ast.Compare() if all(type(op) in _COMPARISONS for op in node.ops):
            values = [inner(each) for each in (node.left, *node.comparators)]
            found = all(_COMPARISONS[type(op)](a, b) for op, a, b in zip(node.ops, values, values[1:], strict=False))
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS and node.args:
            found = _FUNCTIONS[name](*map(inner, node.args))
        case ast.Subscript(
            value=ast.Call(
                func=ast.Attribute(
                    value=ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=str() as name)), attr="size"
                ),
                args=[],
            ),
            slice=ast.Constant(value=int() as axis),
        ) if (name, axis) in sizes:
            found = sizes[name, axis]
        case _:
            raise ValueError("it is no comparison of sizes")
    if abs(found) > LARGEST:
        raise ValueError("it is too large")
    return found
