"""Where an exported program runs, and may answer otherwise than the module that it was made of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn
from torch.export import ExportedProgram

from compress.formats.exported.guards import fails
from compress.model import TorchModel
from compress.model.infer import runs_at
from compress.model.odd_sizes import odd_sizes, ranges_of

__all__ = ["decided_by_sizes"]

BATCH, OTHER_BATCHES = 2, (3, 5)
MOST = 1 << 14  # a size that is tried


def decided_by_sizes(model: TorchModel, program: ExportedProgram, guards: Sequence[str]) -> Iterator[str]:
    """Warnings of dimensions by whose size torch.export decided something: the branch that was not taken is gone.

    Args:
        model: of the program, without its guards; what it does not run at, outside its ranges too, is not told.
        program: with the ranges of its sizes.
        guards: of the program. A range alone, without one, may be what its author declared, whatever the size decides.
    """
    names = {
        (spec.name, axis): dim
        for spec in model.signature.inputs
        for axis, dim in enumerate(spec.shape)
        if isinstance(dim, str)
    }
    ranges, runs = ranges_of(program, names), runs_at(model.module, model.signature.inputs)
    usual = model.signature.at(BATCH)
    for dim, size in usual.items():
        beyond = ranges[dim].beyond if dim in ranges else ()
        for other in (*beyond, *(OTHER_BATCHES if dim in model.signature.batches else odd_sizes(size))):
            at = usual | {dim: other}
            guard = fails(guards, {place: at[name] for place, name in names.items()})
            if guard is None or not 0 < other <= MOST:
                continue
            with _unchecked(model.module):
                taken = runs(at)
            if taken:
                held = f"{dim} {ranges[dim]}" if other in beyond else guard[:200]
                yield (
                    f"torch.export decided something by the size of {dim}: the program holds for {held}. What is "
                    f"exported from it runs at {dim} = {other}, too, but may answer otherwise there than the module "
                    "that it was made of; keep to sizes for which it holds, or export that module anew, without such "
                    "a branch"
                )
                break


@contextlib.contextmanager
def _unchecked(module: nn.Module) -> Iterator[None]:
    """A program's module without the hook that refuses sizes outside its ranges, which no exported file has."""
    hooks = dict(module._forward_pre_hooks)
    module._forward_pre_hooks.clear()
    try:
        yield
    finally:
        module._forward_pre_hooks.update(hooks)
