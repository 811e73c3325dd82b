"""Which guards may be torch's own questions, whose answer changes nothing of what a module computes."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

from compress.formats.exported.guards import Guard

__all__ = ["asks_of_little"]

_COMPARED: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_TURNED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE,
}  # fmt: skip


def asks_of_little(guard: Guard) -> bool:
    """Whether a guard asks no more than whether something is empty or has one row alone.

    `T > 1` and `2 <= T` do; `T > 2`, where two rows are otherwise than three, is its author's.
    """
    match guard.tree:
        case ast.BoolOp(values=values):
            compared = [each for each in values if isinstance(each, ast.Compare)]
            return len(compared) == len(values) and all(map(_of_one_row, compared))
        case ast.Compare() as only:
            return _of_one_row(only)
    return False


def _of_one_row(node: ast.Compare) -> bool:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            left, right = _rows(left), _rows(right)
            if _several_alike(op, right) or _several_alike(_TURNED.get(type(op), type(op))(), left):
                return True
            return isinstance(op, ast.Eq | ast.NotEq) and (_times(left, right) or _times(right, left))
    return False


def _rows(node: ast.expr) -> ast.expr:
    """Without `max(1, …)`, which torch writes of how far rows lie apart, and which is so many for all but none."""
    match node:
        case ast.Call(func=ast.Name(id="max"), args=[ast.Constant(value=1), inner]):
            return inner
    return node


def _several_alike(op: ast.cmpop, node: ast.expr) -> bool:
    """Whether two, three and more compare with a number alike."""
    text = ast.unparse(node).strip("()")
    holds = _COMPARED.get(type(op))
    if holds is None or not text.removeprefix("-").isdigit():
        return False
    number = int(text)
    return len({holds(max(2, size), number) for size in (2, number - 1, number, number + 1)}) == 1


def _times(product: ast.expr, factor: ast.expr) -> bool:
    """Whether one side is so many times the other, or a part of it: as many where each has one row, or one is taken."""
    wanted = ast.unparse(factor)
    if isinstance(product, ast.BinOp) and isinstance(product.op, ast.FloorDiv):
        return ast.unparse(product.left) == wanted

    def factors(node: ast.expr) -> list[str]:
        match node:
            case ast.BinOp(op=ast.Mult()):
                return [*factors(node.left), *factors(node.right)]
        return [ast.unparse(node)]

    found = factors(product)
    return len(found) > 1 and wanted in found
