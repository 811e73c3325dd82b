"""Where an exported program runs, and may answer otherwise than the module that it was made of."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn
from torch.export import ExportedProgram

from compress.formats.exported.decisions import LONGEST, Decisions, decisions_of
from compress.formats.exported.guards import LOOKED_AT, Guard, Place, fails
from compress.model import TorchModel
from compress.model.infer import runs_at
from compress.model.odd_sizes import nearest

__all__ = ["decided_by_sizes"]

BATCH = 2
STEPS = (1, 8, 64)  # a program may take multiples alone
ROOM = 1 << 28  # bytes of the largest tensor inside, where it is run
LEAST = 2

Runs = Callable[[Mapping[str, int]], bool]


def decided_by_sizes(model: TorchModel, program: ExportedProgram, guards: Sequence[str]) -> Iterator[str]:
    """Warnings of dimensions by whose size torch.export decided something: the branch that was not taken is gone.

    Args:
        model: of the program, without its guards; what it does not run at, outside its ranges too, is not told.
        program: with the ranges of its sizes.
        guards: of the program. A range alone, without one, may be what its author declared, whatever the size decides.
    """
    decisions = decisions_of(program, guards, model.signature)
    usual = model.signature.at(BATCH)
    unchecked = _unchecked(model.module, runs_at(model.module, model.signature.inputs))

    def runs(sizes: Mapping[str, int]) -> bool:
        return decisions.largest(sizes) > ROOM or unchecked(sizes)

    yield from _outside(decisions, usual, runs)
    for dim in usual:
        told = next(filter(None, (_told(dim, each, decisions, usual, runs) for each in decisions.guards)), None)
        if told:
            yield told
    if decisions.unread:
        yield (
            "torch.export decided something by sizes that can't be read here, so that nothing tells at which sizes the "
            f"program holds: {decisions.unread[0][:200]}"
        )


def _told(dim: str, guard: Guard, decisions: Decisions, usual: Mapping[str, int], runs: Runs) -> str | None:
    """A warning where a guard fails at a size of a dimension that the program takes."""
    named = decisions.places or {}
    here = [place for place, name in named.items() if name == dim]
    sizes = {place: usual[name] for place, name in named.items()}
    if guard.places.isdisjoint(here) or fails([guard], sizes):
        return None
    failing = [int(size) for size in guard.failing(here, sizes)]
    tried = [size for step in STEPS for size in nearest(failing, usual[dim], step)]
    other = next((size for size in dict.fromkeys(tried) if runs({**usual, dim: size})), None)
    if other is None or (other < usual[dim] and _of_little(guard) and not _less(dim, failing, usual, runs)):
        return None
    span = decisions.ranges.get(dim)
    held = f"{dim} {span}" if span is not None and not span.holds(other) else guard.named(named)[:LONGEST]
    return (
        f"torch.export decided something by the size of {dim}: the program holds for {held}. What is exported from it "
        f"runs at {dim} = {other}, too, but may answer otherwise there than the module that it was made of; keep to "
        "sizes for which it holds, or export that module anew, without such a branch"
    )


def _outside(decisions: Decisions, usual: Mapping[str, int], runs: Runs) -> Iterator[str]:
    """A warning where guards fail at the usual sizes themselves."""
    named = decisions.places or {}
    sizes = {place: usual[name] for place, name in named.items()}

    def of_size(guard: Guard) -> bool:
        """Whether it is more than a question of torch's own."""
        if not _of_little(guard):
            return True
        for dim in {named[place] for place in guard.places if place in named}:
            failing = [int(size) for size in guard.failing([*_sized(named, dim, 0)], sizes)]
            if _less(dim, failing, usual, runs):
                return True
        return False

    failed = [guard for guard in decisions.guards if fails([guard], sizes) and of_size(guard)]
    if not failed:
        return
    dims = list(dict.fromkeys(named[place] for place in named if place in failed[0].places))
    at = ", ".join(f"{dim} = {usual[dim]}" for dim in dims)
    held = [
        f"--size {dim}={size}"
        for dim in dims
        for size in nearest(
            (int(each) for each in LOOKED_AT if not fails(failed, sizes | _sized(named, dim, int(each)))), usual[dim]
        )[:1]
    ]
    yield (
        f"torch.export decided something by the size of {' and '.join(dims)}: the program holds for "
        f"{failed[0].named(named)[:LONGEST]}, and not at {at}, at which it is measured and proven here; give sizes for "
        f"which it holds{f' ({held[0]})' if held else ''}, or export its module anew, without such a branch"
    )


def _sized(named: Mapping[Place, str], dim: str, size: int) -> dict[Place, int]:
    return {place: size for place, name in named.items() if name == dim}


def _of_little(guard: Guard) -> bool:
    """Whether a guard may be torch's own question, whether something is empty or has one row alone."""
    match guard.tree:
        case ast.BoolOp(values=values):
            compared = [each for each in values if isinstance(each, ast.Compare)]
            return len(compared) == len(values) and all(map(_with_little, compared))
        case ast.Compare() as only:
            return _with_little(only)
    return False


def _with_little(node: ast.Compare) -> bool:
    sides = [ast.unparse(side).strip("()") for side in (node.left, *node.comparators)]
    return any(side.lstrip("-").isdigit() and abs(int(side)) <= LEAST for side in sides)


def _less(dim: str, failing: Sequence[int], usual: Mapping[str, int], runs: Runs) -> bool:
    """Whether the program runs at a smaller size than all at which a guard fails: it is not of little, then."""
    return any(runs({**usual, dim: size}) for size in dict.fromkeys((min(failing) - 1, 1)) if 0 < size < min(failing))


def _unchecked(module: nn.Module, runs: Runs) -> Runs:
    """Whether a program's module runs without the hook that refuses sizes outside its ranges, which no file has."""

    def taken(sizes: Mapping[str, int]) -> bool:
        hooks = dict(module._forward_pre_hooks)
        module._forward_pre_hooks.clear()
        try:
            return runs(sizes)
        finally:
            module._forward_pre_hooks.update(hooks)

    return taken
