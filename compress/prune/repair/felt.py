"""How much the outputs of a network feel what a layer gives."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from compress.model import call
from compress.model.inputs import run_on
from compress.prune.repair.columns import channel_axis
from compress.prune.repair.rows import ROWS
from compress.prune.repair.samples import BATCH, Samples

__all__ = ["felt"]

MOST, FEWEST = 512, 64  # samples that tell it well enough, and that it takes however many positions each has
HELD = 1 << 30  # bytes of what a derivative needs that a batch may hold; one sample is looked at whatever it holds


def felt(
    module: nn.Module, names: Collection[str], samples: Samples, progress: Callable[[int, int, str], None]
) -> dict[str, torch.Tensor] | None:
    """By layer, float64 [channels]: the squares of the outputs' derivatives by each channel, summed over a sample.

    A channel with an error of e² at each of its positions changes the outputs by e² times this, the errors of
    positions being independent; what is padding moves no output that counts. Of sums of all outputs with random
    signs, which on the mean is the sum over outputs (Hutchinson, A Stochastic Estimator of the Trace of the Influence
    Matrix, 1989, section 2); each output by its size. None where there is none.

    Args:
        module: in eval mode, its parameters requiring gradients, which are dropped afterwards.
        names: of linear layers and convolutions.
        samples: to tell by; those that are held out are not looked at.
        progress: is told of samples.
    """
    sums: dict[str, torch.Tensor] = {}
    rows: dict[str, int] = defaultdict(int)

    def back(name: str, axis: int, grad: torch.Tensor) -> None:
        squares = grad.detach().double().square().movedim(axis, -1).flatten(0, -2)
        sums[name] = sums.get(name, torch.zeros(())) + squares.sum(0)
        rows[name] += len(squares)

    def seen(name: str, layer: nn.Module, _given: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(back, name, channel_axis(layer)))  # type: ignore[no-untyped-call]

    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        sizes = _sizes(module, samples)
    samples = samples.by(_fitting(partial(_felt_once, module, samples.by(1), 0, sizes, random)))
    handles = [module.get_submodule(name).register_forward_hook(partial(seen, name)) for name in names]
    done = 0
    try:
        for batch, index in enumerate(samples.batches):
            enough = done >= MOST or (done >= FEWEST and min(map(rows.__getitem__, names)) >= ROWS)
            if samples.held[batch] or enough:
                break
            if not _felt_once(module, samples, batch, sizes, random):
                return None
            done += len(index)
            progress(done, min(MOST, samples.count), "what the outputs feel")
    finally:
        for handle in handles:
            handle.remove()
    found = {name: each / done for name, each in sums.items()}
    told = set(found) == set(names) and all(bool(each.isfinite().all()) for each in found.values())
    return found if told else None


def _outputs(module: nn.Module, samples: Samples, batch: int) -> dict[str, torch.Tensor]:
    """Those of floating point, without what is padding, of a batch."""
    given = dict(zip((spec.name for spec in samples.specs), samples.tensors(batch), strict=True))
    outputs = run_on(given, partial(call, module, samples.specs, given))
    kept = {
        name: samples.kept_of(batch, name, output) for name, output in outputs.items() if output.is_floating_point()
    }
    return {name: outputs[name] if mask is None else outputs[name][mask] for name, mask in kept.items()}


def _sizes(module: nn.Module, samples: Samples) -> dict[str, torch.Tensor]:
    """The root mean square of each output, over some samples."""
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = defaultdict(int)
    for batch in range(math.ceil(FEWEST / len(samples.batches[0]))):
        if batch < len(samples.batches):
            for name, output in _outputs(module, samples, batch).items():
                sums[name] = sums.get(name, torch.zeros(())) + output.double().square().sum()
                counts[name] += output.numel()
    return {name: (one / max(1, counts[name])).sqrt().clamp(min=1e-30) for name, one in sums.items()}


def _felt_once(
    module: nn.Module, samples: Samples, batch: int, sizes: Mapping[str, torch.Tensor], random: torch.Generator
) -> bool:
    """Run a batch there and back; False where no output has a derivative."""
    parts = []
    with torch.enable_grad():
        for name, output in _outputs(module, samples, batch).items():
            if output.requires_grad:
                signs = torch.randint(0, 2, output.shape, generator=random).to(output.dtype) * 2 - 1
                parts.append((output * signs / sizes[name].to(output.dtype)).sum())
        if parts:
            torch.stack(parts).sum().backward()  # type: ignore[no-untyped-call]
    module.zero_grad(set_to_none=True)
    return bool(parts)


def _fitting(one: Callable[[], object]) -> int:
    """How many samples a batch may have, by what one of them holds for its derivatives."""
    held: dict[int, int] = {}

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not (tensor.is_leaf and tensor.requires_grad):  # weights are there anyway
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
        one()
    return max(1, min(math.floor(HELD / max(1, sum(held.values()))), BATCH))
