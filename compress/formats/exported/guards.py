"""What torch.export decided by sizes, as a program says it: comparisons, read without evaluating them as Python."""

from __future__ import annotations

import ast
import copy
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from compress.vetting.texts import parse_json

__all__ = ["LOOKED_AT", "Guard", "Place", "fails", "guards_in", "looked_at", "read_guards"]

Place = tuple[str, int]
"""An input and its axis."""
Sizes = Mapping[Place, "int | np.ndarray[Any, Any]"]
Value = Any
"""A number, a truth value, or an array of either, one for each size that is looked at."""

NEAR, FAR, FARTHEST = 5000, 1 << 14, 1 << 31
WINDOW = 64
"""As many sizes in a row, of which most networks take one, whatever they go down by."""

LOOKED_AT = np.array([*range(1, NEAR + 1), *range(5056, FAR + 1, 64)])
"""Sizes that guards are evaluated at: all that are usual, and multiples of what networks go down by."""

_OCTAVES = [1 << bits for bits in range(14, 31)]
_BEYOND = np.concatenate(
    [np.arange(WINDOW) + octave // 8 * eighth for octave in _OCTAVES for eighth in range(8, 16)], dtype=np.int64
)
"""Windows of sizes far beyond, for what is known of these by no number of a guard's own."""

_PARTS = np.array([NEAR + 1, *(octave + WINDOW for octave in _OCTAVES)])
"""Where sizes are parted: a guard that gets too large at some is known at those before."""

MOST_NUMBERS, MOST_FACTORS = 256, 64
MOST_HELD = 1 << 24  # numbers that the parts of a guard come to, all together

MOST, LONGEST, DEEPEST = 2048, 100_000, 80  # of guards; letters of one; nodes above a leaf
MOST_LETTERS = 1 << 21  # of all
MOST_NODES = 20_000
"""That are unlike each other, of all guards: each is evaluated once for a guard."""
TOLD = 1000  # letters of a guard whose text is put right; of others the beginning is
LARGEST = 1 << 62
_BINARY: Mapping[type[ast.operator], Callable[[Value, Value], Value]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Div: operator.truediv,
}  # fmt: skip
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_FOLDS: Mapping[str, Callable[[Value, Value], Value]] = {
    "max": np.maximum, "min": np.minimum, "Max": np.maximum, "Min": np.minimum,
}  # fmt: skip
# As torch prints them; what is rounded here may be a whole number of a float's type.
_FUNCTIONS: Mapping[str, Callable[[Value], Value]] = {
    "abs": np.abs, "math.floor": np.floor, "math.ceil": np.ceil, "math.trunc": np.trunc, "math.sqrt": np.sqrt,
    "torch._sym_sqrt": np.sqrt, "torch.sym_float": np.float64, "round": np.round, "math.log2": np.log2,
    "math.log": np.log, "torch._sym_log2": np.log2,
}  # fmt: skip
_DEFINED: Mapping[str, Callable[[Value], Value]] = {
    **dict.fromkeys(("math.sqrt", "torch._sym_sqrt"), lambda value: value >= 0),
    **dict.fromkeys(("math.log2", "math.log", "torch._sym_log2"), lambda value: value > 0),
}
_UNREADABLE = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, OverflowError)


@dataclass(frozen=True)
class Guard:
    """A comparison of sizes.

    Attributes:
        text: as the program says it.
        tree: of it.
        places: whose sizes it compares.
    """

    text: str
    tree: ast.expr
    places: frozenset[Place]

    def named(self, places: Mapping[Place, str]) -> str:
        """Its text with names for the sizes."""
        if len(self.text) > TOLD:
            return _SIZE.sub(lambda found: _name(found[0], places), self.text)

        class Named(ast.NodeTransformer):
            def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
                place = _place(node)
                return ast.Name(places[place]) if place is not None and place in places else node

        return ast.unparse(Named().visit(copy.deepcopy(self.tree)))

    def fails(self, sizes: Sizes) -> np.ndarray[Any, Any]:
        """Where it does not hold: bool, of the shape of the sizes; where it is undefined, it says nothing, and holds.

        Raises:
            ValueError: it gets too large there.
        """
        undefined = np.zeros((), bool)

        def seen(zero: Value) -> None:
            nonlocal undefined
            undefined = undefined | zero

        with np.errstate(all="ignore"):
            return np.asarray(~np.asarray(_value(self.tree, sizes, 0, seen, _Parts()), bool) & ~undefined)

    def failing(self, places: Collection[Place], sizes: Sizes, among: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """At which sizes of some places, all alike, it does not hold: bool, one for each.

        Args:
            places: whose sizes vary.
            sizes: of the others.
            among: the sizes that are looked at, from small on.
        """
        found = np.zeros(len(among), bool)
        at = 0
        for part in np.split(among, np.searchsorted(among, _PARTS)):
            try:
                found[at : at + len(part)] = self.fails(dict(sizes) | dict.fromkeys(places, part)) if len(part) else ()
            except _UNREADABLE:
                break
            at += len(part)
        return found

    @cached_property
    def numbers(self) -> set[int]:
        """Its own, and the products of any two, once as well for what is rounded down: `T // 160 <= 1000`.

        Where there are very many, of the smallest.
        """
        found = {
            abs(int(node.value))
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and abs(node.value) < FARTHEST
        }
        some = sorted(found)[:MOST_FACTORS]
        return found | {each * (other + more) for each in some for other in some for more in (0, 1)}


def looked_at(guards: Sequence[Guard], ends: Collection[int]) -> np.ndarray[Any, Any]:
    """Sizes that guards are evaluated at, from small on: those of `LOOKED_AT`, and beyond.

    Args:
        guards: beside whose own numbers they are dense.
        ends: of ranges, beside which they are, too.
    """
    numbers = sorted({each for guard in guards for each in guard.numbers if NEAR < each < FARTHEST})
    windows = [np.arange(-WINDOW, WINDOW + 2) + number for number in (*ends, *numbers[:MOST_NUMBERS])]
    found = np.unique(np.concatenate([LOOKED_AT, _BEYOND, *windows]))
    return np.asarray(found[found > 0])


def guards_in(text: bytes) -> list[str]:
    """The guards of a program's JSON; those that are no texts are left out."""
    found = parse_json(text)
    told = found.get("guards_code") if isinstance(found, dict) else None
    return [each for each in told if isinstance(each, str)] if isinstance(told, list) else []


def read_guards(guards: Sequence[str], places: Collection[Place]) -> tuple[list[Guard], list[str]]:
    """The guards that compare sizes of these places, and the texts of those that can't be read, or are too many."""
    found, rest = [], list(guards[MOST:])
    some: Sizes = dict.fromkeys(places, 2)
    known: dict[tuple[Any, ...], ast.AST] = {}
    letters = 0
    for text in guards[:MOST]:
        try:
            letters += len(text)
            if len(text) > LONGEST or letters > MOST_LETTERS:
                raise ValueError("it is too long")
            tree = ast.parse(text, mode="eval").body
            _share(tree, known, 0)
            guard = Guard(text, tree, frozenset(filter(None, map(_place, ast.walk(tree)))))
            guard.fails(some)
            found.append(guard)
        except _UNREADABLE:
            rest.append(text)
    return found, rest


def fails(guards: Sequence[Guard], sizes: Mapping[Place, int]) -> str | None:
    """The first guard that does not hold at these sizes."""
    for guard in guards:
        try:
            if guard.fails(sizes).any():
                return guard.text
        except _UNREADABLE:  # too large there
            continue
    return None


def _share(node: ast.AST, known: dict[tuple[Any, ...], ast.AST], depth: int) -> ast.AST:
    """The node that is known and the same, down to its leaves; or this one, which is known from then on.

    Raises:
        ValueError: there are too many that are unlike each other, or it is nested too deeply.
    """
    if depth > 2 * DEEPEST:
        raise ValueError("it is nested too deeply")
    key: list[Any] = [type(node)]
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.AST):
            value = _share(value, known, depth + 1)
            setattr(node, name, value)
        elif isinstance(value, list):
            value[:] = [_share(each, known, depth + 1) if isinstance(each, ast.AST) else each for each in value]
        plain = tuple(map(id, value)) if isinstance(value, list) else value
        key.append(id(value) if isinstance(value, ast.AST) else (type(value), plain))
    found = known.setdefault(tuple(key), node)
    if len(known) > MOST_NODES:
        raise ValueError("there are too many")
    return found


_SIZE = re.compile(r"L(?:\[(?:'\w+'|\d+)\])+\.size\(\)\[\d+\]")


def _name(text: str, places: Mapping[Place, str]) -> str:
    place = _place(ast.parse(text, mode="eval").body)
    return text if place is None else places.get(place, text)


def _place(node: ast.AST) -> Place | None:
    """Of `L['x'].size()[1]`, and of an input in another, `L['args'][0].size()[1]`, which the program calls args_0."""
    match node:
        case ast.Subscript(
            value=ast.Call(func=ast.Attribute(value=ast.Subscript() as base, attr="size"), args=[], keywords=[]),
            slice=ast.Constant(value=int() as axis),
        ):
            parts: list[str] = []
            inner: ast.expr = base
            while isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Constant):
                parts.append(str(inner.slice.value))
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id == "L":
                return "_".join(reversed(parts)), axis
    return None


def _called(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return f"{module}.{name}"
    return ""


def _largest(value: Value) -> float:
    """As Python's own number, which does not overflow."""
    array = np.asarray(value)
    return max(abs(array.max().item()), abs(array.min().item())) if array.size else 0


class _Parts:
    """What the parts of a guard come to.

    Attributes:
        values: by the id of the node.
    """

    def __init__(self) -> None:
        self.values: dict[int, Value] = {}
        self._held = 0

    def keep(self, node: ast.AST, value: Value) -> None:
        """One of them; raises ValueError where all together are too many numbers."""
        self._held += np.size(value)
        if self._held > MOST_HELD:
            raise ValueError("it is too large")
        self.values[id(node)] = value


def _value(
    node: ast.AST, sizes: Sizes, depth: int, undefined: Callable[[Value], None], made: _Parts
) -> Value:  # fmt: skip
    """Of an expression of sizes.

    Args:
        node: the expression.
        sizes: one for each place, or several.
        depth: of the node.
        undefined: is told where it is, as where a divisor is 0.
        made: the parts that have been evaluated.

    Raises:
        ValueError: it is something else, or too large.
    """

    def inner(each: ast.AST) -> Value:
        if id(each) not in made.values:
            made.keep(each, _value(each, sizes, depth + 1, undefined, made))
        return made.values[id(each)]

    found: Value
    if depth > DEEPEST:
        raise ValueError("it is nested too deeply")
    place = _place(node)
    if place is not None and place in sizes:
        return sizes[place]
    match node:
        case ast.Constant(value=int() | float() as found):
            pass
        case ast.BinOp(op=op) if type(op) in _BINARY:
            left, right = inner(node.left), inner(node.right)
            if isinstance(op, ast.Mult) and _largest(left) * _largest(right) > LARGEST:
                raise ValueError("it is too large")
            if isinstance(op, ast.Div | ast.FloorDiv | ast.Mod):
                none = np.asarray(right) == 0
                undefined(none)
                right = np.where(none, 1, right)
            found = _BINARY[type(op)](left, right)
        case ast.UnaryOp(op=ast.USub()):
            found = -np.asarray(inner(node.operand))
        case ast.UnaryOp(op=ast.Not()):
            found = ~np.asarray(inner(node.operand), bool)
        case ast.BoolOp():
            fold = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            found = _folded(fold, [inner(each) for each in node.values])
        case ast.Compare() if all(type(op) in _COMPARISONS for op in node.ops):
            values = [inner(each) for each in (node.left, *node.comparators)]
            pairs = zip(node.ops, values, values[1:], strict=False)
            found = _folded(np.logical_and, [np.asarray(_COMPARISONS[type(op)](a, b)) for op, a, b in pairs])
        case ast.Call(keywords=[]) if node.args and _called(node.func) in _FOLDS:
            found = _folded(_FOLDS[_called(node.func)], [inner(each) for each in node.args])
        case ast.Call(args=[only], keywords=[]) if (name := _called(node.func)) in _FUNCTIONS:
            given = inner(only)
            if name in _DEFINED:
                none = ~np.asarray(_DEFINED[name](given))
                undefined(none)
                given = np.where(none, 1, given)
            found = _FUNCTIONS[name](given)
        case _:
            raise ValueError("it is no comparison of sizes")
    if not _largest(found) <= LARGEST:  # NaN is none
        raise ValueError("it is too large")
    return found


def _folded(fold: Callable[[Value, Value], Value], values: Sequence[Value]) -> Value:
    found = values[0]
    for value in values[1:]:
        found = fold(found, value)
    return found
