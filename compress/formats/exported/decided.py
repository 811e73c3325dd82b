"""Where an exported program runs, and may answer otherwise than the module that it was made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn
from torch.export import ExportedProgram

from compress.formats.exported.asked import asks_of_little
from compress.formats.exported.decisions import Decisions, Failing, decisions_of
from compress.formats.exported.guards import LOOKED_AT, Guard, fails
from compress.formats.exported.inside import WORD
from compress.model import TorchModel
from compress.model.infer import runs_at
from compress.model.odd_sizes import nearest
from compress.model.without_memory import refuses_at

__all__ = ["decided_by_sizes"]

BATCH = 2
STEPS = (1, 8, 64)  # a program may take multiples alone
ROOM = 1 << 28  # bytes of the inputs, and of the largest tensor inside, where it is run

Sizes = Mapping[str, int]
Runs = Callable[[Sizes], bool]


def decided_by_sizes(model: TorchModel, program: ExportedProgram, guards: Sequence[str]) -> Iterator[str]:
    """Warnings of dimensions by whose size torch.export decided something: the branch that was not taken is gone.

    Args:
        model: of the program, without its guards; what it does not run at, outside its ranges too, is not told.
        program: with the ranges of its sizes.
        guards: of the program. A range alone, without one, may be what its author declared, whatever the size decides.
    """
    decisions = decisions_of(program, guards, model.signature)
    usual = model.signature.at(BATCH)
    inputs = model.signature.inputs
    taken, refused = runs_at(model.module, inputs), refuses_at(model.module, inputs, usual)

    def takes(sizes: Sizes) -> bool:
        """By its shapes alone, where it takes too much to be run."""
        large = max(WORD * sum(math.prod(spec.at(sizes)) for spec in inputs), decisions.inside.largest(sizes)) > ROOM
        return not refused(sizes) if large else taken(sizes)

    runs = _unchecked(model.module, takes)
    failing = {dim: decisions.failing(dim, usual) for dim in usual}
    yield from _outside(decisions, failing, usual, runs)
    for dim in usual:
        told = next(
            filter(None, (_told(dim, each, decisions, failing[dim], usual, runs) for each in failing[dim].guards)), None
        )
        if told:
            yield told
    if decisions.unread:
        yield (
            "torch.export decided something by sizes that can't be read here, so that nothing tells at which sizes the "
            f"program holds: {decisions.unread[0][:200]}"
        )


def _told(
    dim: str, at: tuple[Guard, frozenset[int]], decisions: Decisions, failing: Failing, usual: Sizes, runs: Runs
) -> str | None:
    """A warning where a guard fails at a size of a dimension that the program takes."""
    guard, sizes = at
    if usual[dim] in sizes:
        return None
    tried = [size for step in STEPS for size in failing.shown(sizes, usual[dim], step)]
    other = next((size for size in dict.fromkeys(tried) if runs({**usual, dim: size})), None)
    if other is None or (
        other < usual[dim] and asks_of_little(guard) and not _less(dim, sizes, decisions, usual, runs)
    ):
        return None
    span = decisions.ranges.get(dim)
    held = f"{dim} {span}" if span is not None and not span.holds(other) else decisions.told(guard)
    return (
        f"torch.export decided something by the size of {dim}: the program holds for {held}. What is exported from it "
        f"runs at {dim} = {other}, too, but may answer otherwise there than the module that it was made of, if that "
        "has such a branch: torch asks for some by itself, of how a tensor lies in memory. Keep to sizes for which it "
        "holds, or export that module anew, without the branch"
    )


def _outside(decisions: Decisions, failing: Mapping[str, Failing], usual: Sizes, runs: Runs) -> Iterator[str]:
    """A warning where guards fail at the usual sizes themselves."""
    sizes = decisions.sized(usual)

    def dims_of(guard: Guard) -> list[str]:
        return [dim for dim in usual if any(guard is each for each, _ in failing[dim].guards)]

    def of_size(guard: Guard) -> bool:
        """Whether it is more than a question of torch's own."""
        return not asks_of_little(guard) or any(
            _less(dim, found, decisions, usual, runs)
            for dim in usual
            for each, found in failing[dim].guards
            if each is guard
        )

    failed = [guard for guard in decisions.guards if fails([guard], sizes) and of_size(guard)]
    if not failed:
        return
    dims = dims_of(failed[0])
    at = ", ".join(f"{dim} = {usual[dim]}" for dim in dims)
    held = [
        f"--size {dim}={size}"
        for dim in dims
        for size in nearest(
            (each for each in LOOKED_AT.tolist() if not fails(failed, decisions.sized({**usual, dim: each}))),
            usual[dim],
        )[:1]
    ]
    yield (
        f"torch.export decided something by the size of {' and '.join(dims)}: the program holds for "
        f"{decisions.told(failed[0])}, and not at {at}, at which it is measured and proven here; give sizes for "
        f"which it holds{f' ({held[0]})' if held else ''}, or export its module anew, without such a branch"
    )


def _less(dim: str, failing: frozenset[int], decisions: Decisions, usual: Sizes, runs: Runs) -> bool:
    """Whether the program runs at a smaller size than all at which a guard fails: it is not of little, then.

    Where a tensor inside is empty there, what the guard is about may be the rows of that.
    """
    least = min(failing)
    smaller = ({**usual, dim: size} for size in dict.fromkeys((least - 1, 1)) if 0 < size < least)
    return any(runs(sizes) and not decisions.inside.empty(sizes) for sizes in smaller)


def _unchecked(module: nn.Module, runs: Runs) -> Runs:
    """Whether a program's module runs without the hook that refuses sizes outside its ranges, which no file has."""

    def taken(sizes: Sizes) -> bool:
        hooks = dict(module._forward_pre_hooks)
        module._forward_pre_hooks.clear()
        try:
            return runs(sizes)
        finally:
            module._forward_pre_hooks.update(hooks)

    return taken
