"""What torch.export decided by sizes when it wrote down a module, and at which sizes that shows."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeGuardPythonPrinter

from compress.artifact import Signature
from compress.formats.exported.guards import Guard, Place, looked_at, read_guards
from compress.formats.exported.inside import Inside, inside_of
from compress.model.odd_sizes import Range, nearest, ranges_of

__all__ = ["Decision", "Decisions", "decisions_of", "guards_told"]

LONGEST = 200  # letters of a guard that is told
_FLAT = re.compile(r"L\['flat_args'\]\[(\d+)\]")  # an input, in guards that are put off until it runs


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
        inside: the tensors.
    """

    ranges: Mapping[str, Range]
    guards: Sequence[Guard] = ()
    places: Mapping[Place, str] | None = None
    unread: Sequence[str] = ()
    inside: Inside = field(default_factory=Inside)

    def of(self, dim: str, usual: Mapping[str, int], step: int) -> Iterator[Decision]:
        """What was decided by the size of a dimension.

        Args:
            dim: the dimension.
            usual: sizes of all.
            step: in which the module takes its sizes.
        """
        failing = self.failing(dim, usual)
        if dim in self.ranges:
            span = self.ranges[dim]
            groups = []
            for walk in span.beyond(step, usual[dim]):
                likely = min(walk, key=failing.count)  # the first of these
                groups.append(tuple(dict.fromkeys((walk[0], likely, *walk))))
            yield Decision(f"{dim} {span}", tuple(groups), span.holds, True)
        for guard, sizes in failing.guards:
            if usual[dim] in sizes:
                continue
            shown = failing.shown(sizes, usual[dim], step)
            groups_of = [tuple(size for size in shown if (size > usual[dim]) is above) for above in (True, False)]
            yield Decision(self.told(guard), tuple(filter(None, groups_of)), _held(sizes))

    def failing(self, dim: str, usual: Mapping[str, int]) -> Failing:
        """At which sizes of a dimension, all others being the usual ones, guards fail."""
        named = self.places or {}
        here = [place for place, name in named.items() if name == dim]
        span = self.ranges.get(dim)
        among = looked_at(self.guards, [group[-1] for group in span.beyond()] if span is not None else [])
        found, counts = [], np.zeros(len(among), int)
        for guard in self.guards:
            if guard.places.isdisjoint(here):
                continue
            fails = guard.failing(here, self.sized(usual), among)
            counts += fails
            if fails.any():
                found.append((guard, frozenset(among[fails].tolist())))
        return Failing(found, among, counts)

    def sized(self, sizes: Mapping[str, int]) -> dict[Place, int]:
        """Sizes of dimensions as sizes of places."""
        return {place: sizes[name] for place, name in (self.places or {}).items()}

    def told(self, guard: Guard) -> str:
        """A guard in the names of the dimensions."""
        return guard.named(self.places or {})[:LONGEST]


@dataclass(frozen=True)
class Failing:
    """Sizes of a dimension at which guards do not hold.

    Attributes:
        guards: with the sizes at which they do not.
        sizes: that were looked at, from small on.
        counts: how many guards fail there.
    """

    guards: Sequence[tuple[Guard, frozenset[int]]]
    sizes: np.ndarray[Any, Any]
    counts: np.ndarray[Any, Any]

    def count(self, size: int) -> int:
        """How many guards fail at a size, or at the next that was looked at; they may say which the module takes."""
        return int(self.counts[min(int(np.searchsorted(self.sizes, size)), len(self.sizes) - 1)])

    def shown(self, failing: frozenset[int], usual: int, step: int) -> tuple[int, ...]:
        """Of some of the sizes those to try, on both sides of the usual one: where most other guards hold, and near."""
        sizes = np.fromiter(failing, np.int64)
        counts = self.counts[np.searchsorted(self.sizes, sizes)]
        sides = [side for side in (sizes > usual, sizes < usual) if side.any()]
        likely = [size for side in sides for size in sizes[side & (counts == counts[side].min())].tolist()]
        return tuple(dict.fromkeys((*nearest(likely, usual, step), *nearest(failing, usual, step))))


def _held(failing: frozenset[int]) -> Callable[[int], bool]:
    return lambda size: size not in failing


@contextlib.contextmanager
def guards_told(seen: Callable[[ExportedProgram], None] = lambda _program: None) -> Iterator[list[str]]:
    """The guards of what torch.export makes inside, which torch.onnx drops when it takes operators apart.

    Args:
        seen: is given each program, whose operators are not taken apart yet.
    """
    found: list[str] = []
    export = torch.export.export

    def telling(*args: Any, **options: Any) -> ExportedProgram:
        program = export(*args, **options)
        found[:] = _guards_of(program)
        seen(program)
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
    names = _given(program)

    def named(each: re.Match[str]) -> str:
        at = int(each[1])
        return f"L['{names[at]}']" if at < len(names) else each[0]

    return list(dict.fromkeys(_FLAT.sub(named, text) for text in found))


def _given(program: ExportedProgram) -> list[str]:
    """Names of the inputs, in order."""
    return [each.arg.name for each in program.graph_signature.input_specs if each.kind is InputKind.USER_INPUT]


def decisions_of(program: ExportedProgram | None, guards: Sequence[str], signature: Signature) -> Decisions:
    """What a program of a module of this signature says of its dimensions.

    Args:
        program: that the file was made of; None where there is none.
        guards: of it.
        signature: of the module.
    """
    names = [] if program is None else _given(program)
    if program is None or len(names) != len(signature.inputs):
        return Decisions({})
    places = {
        (name, axis): dim
        for name, spec in zip(names, signature.inputs, strict=True)
        for axis, dim in enumerate(spec.shape)
        if isinstance(dim, str)
    }
    read, unread = read_guards(guards, places)
    return Decisions(ranges_of(program, places), read, places, unread, inside_of(program, places))
