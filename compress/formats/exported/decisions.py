"""What torch.export decided by sizes when it wrote down a module, and at which sizes that shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeGuardPythonPrinter

from compress.artifact import Signature
from compress.formats.exported.guards import Guard, Place, read_guards
from compress.model.odd_sizes import Range, nearest, ranges_of

__all__ = ["LONGEST", "Decision", "Decisions", "decisions_of", "guards_told"]

LONGEST = 200  # letters of a guard that is told
WORD = 8  # bytes of an element at most


@dataclass(frozen=True)
class Decision:
    """Something that holds at some sizes of a dimension.

    Attributes:
        text: for which sizes it holds, in the names of the dimensions.
        sizes: at which it does not hold, those that tell most: of each group one that runs is enough.
        alone: whether one that is not among these is not.
        holds: whether it does at a size, all others being the usual ones.
    """

    text: str
    sizes: tuple[tuple[int, ...], ...]
    holds: Callable[[int], bool]
    alone: bool = False


@dataclass(frozen=True)
class Decisions:
    """Of a module.

    Attributes:
        ranges: of dimensions.
        guards: comparisons of sizes.
        places: dimensions, by input and axis as the guards name them.
        unread: guards that can't be read.
        largest: gives bytes of the largest tensor inside, by sizes of dimensions; 0 where that is not known.
    """

    ranges: Mapping[str, Range]
    guards: Sequence[Guard] = ()
    places: Mapping[Place, str] | None = None
    unread: Sequence[str] = ()
    largest: Callable[[Mapping[str, int]], int] = lambda _sizes: 0

    def of(self, dim: str, usual: Mapping[str, int], step: int) -> Iterator[Decision]:
        """What was decided by the size of a dimension.

        Args:
            dim: the dimension.
            usual: sizes of all.
            step: in which the module takes its sizes.
        """
        if dim in self.ranges:
            span = self.ranges[dim]
            groups = zip(span.beyond_by(step, usual[dim]), span.beyond, strict=True)
            yield Decision(f"{dim} {span}", tuple(tuple(dict.fromkeys(each)) for each in groups), span.holds, True)
        named = self.places or {}
        here = [place for place, name in named.items() if name == dim]
        sizes = {place: usual[name] for place, name in named.items()}
        for guard in self.guards:
            if guard.places.isdisjoint(here):
                continue
            failing = [int(size) for size in guard.failing(here, sizes)]
            if not failing or usual[dim] in failing:
                continue
            shown = nearest(failing, usual[dim], step)
            groups_of = [tuple(size for size in shown if (size > usual[dim]) is above) for above in (True, False)]
            yield Decision(guard.named(named)[:LONGEST], tuple(filter(None, groups_of)), _held(failing))


def _held(failing: Collection[int]) -> Callable[[int], bool]:
    there = frozenset(failing)
    return lambda size: size not in there


@contextlib.contextmanager
def guards_told() -> Iterator[list[str]]:
    """The guards of what torch.export makes inside, which torch.onnx drops when it takes operators apart."""
    found: list[str] = []
    export = torch.export.export

    def telling(*args: Any, **options: Any) -> ExportedProgram:
        program = export(*args, **options)
        found[:] = _guards_of(program)
        return program

    torch.export.export = telling
    try:
        yield found
    finally:
        torch.export.export = export


def _guards_of(program: ExportedProgram) -> list[str]:
    """As the program would say them in a file, and those that torch.onnx has it check when it runs instead."""
    found = [str(each) for each in getattr(program, "_guards_code", None) or ()]
    sizes = [
        size
        for node in program.graph.nodes
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
        for size in node.meta["val"].shape
        if isinstance(size, torch.SymInt)
    ]
    with contextlib.suppress(AttributeError, TypeError):  # another torch, whose insides are other ones
        env = sizes[0].node.shape_env if sizes else None
        sources = getattr(env, "var_to_sources", {})
        printer = ShapeGuardPythonPrinter(sources, lambda source: source.name, sources)
        found += [
            printer.doprint(each.expr)
            for some in getattr(env, "deferred_runtime_asserts", {}).values()
            for each in some
            if each.expr.free_symbols <= sources.keys()
        ]
    return list(dict.fromkeys(found))


def decisions_of(program: ExportedProgram | None, guards: Sequence[str], signature: Signature) -> Decisions:
    """What a program of a module of this signature says of its dimensions.

    Args:
        program: that the file was made of; None where there is none.
        guards: of it.
        signature: of the module.
    """
    names = [] if program is None else [
        each.arg.name for each in program.graph_signature.input_specs if each.kind is InputKind.USER_INPUT
    ]  # fmt: skip
    if program is None or len(names) != len(signature.inputs):
        return Decisions({})
    places = {
        (name, axis): dim
        for name, spec in zip(names, signature.inputs, strict=True)
        for axis, dim in enumerate(spec.shape)
        if isinstance(dim, str)
    }
    read, unread = read_guards(guards, places)
    return Decisions(ranges_of(program, places), read, places, unread, _largest_of(program, places))


def _largest_of(program: ExportedProgram, places: Mapping[Place, str]) -> Callable[[Mapping[str, int]], int]:
    """Of a program's tensors, by their symbolic shapes alone, so that the program itself can go."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    symbols: dict[Any, str] = {}
    for (name, axis), dim in places.items():
        size = getattr(values.get(name), "shape", ())[axis : axis + 1]
        if size and not isinstance(size[0], int):
            symbols[size[0].node.expr] = dim
    products: set[Any] = set()
    for value in values.values():
        count: Any = WORD
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            count = count * (size if isinstance(size, int) else size.node.expr)
        if not isinstance(count, int):
            products.add(count)

    def largest(sizes: Mapping[str, int]) -> int:
        here = {symbol: sizes[dim] for symbol, dim in symbols.items()}
        found = [product.subs(here) for product in products]
        return max((int(each) for each in found if each.is_number), default=0)

    return largest
