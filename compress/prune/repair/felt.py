"""How much the outputs of a network feel what a layer gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from compress.model import call
from compress.model.inputs import run_on
from compress.prune.repair.columns import channel_axis
from compress.prune.repair.samples import Samples

__all__ = ["felt"]

BATCHES = 16  # that tell it well enough


def felt(
    module: nn.Module, names: Collection[str], samples: Samples, progress: Callable[[int, int, str], None]
) -> dict[str, torch.Tensor] | None:
    """By layer, float64 [channels]: the mean square of the outputs' derivatives by each channel that it gives.

    Of sums of all outputs with random signs, which on the mean is the sum over outputs (Hutchinson, A Stochastic
    Estimator of the Trace of the Influence Matrix, 1989, section 2); each output by its size. None where there is
    none.

    Args:
        module: in eval mode, its parameters requiring gradients, which are dropped afterwards.
        names: of linear layers and convolutions.
        samples: to tell by; those that are held out are not looked at.
        progress: is told of batches.
    """
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = defaultdict(int)

    def back(name: str, axis: int, grad: torch.Tensor) -> None:
        squares = grad.detach().double().square().movedim(axis, -1).flatten(0, -2)
        sums[name] = sums.get(name, torch.zeros(())) + squares.sum(0)
        counts[name] += len(squares)

    def seen(name: str, layer: nn.Module, _given: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(back, name, channel_axis(layer)))  # type: ignore[no-untyped-call]

    handles = [module.get_submodule(name).register_forward_hook(partial(seen, name)) for name in names]
    random = torch.Generator().manual_seed(0)
    every = [batch for batch, held in enumerate(samples.held) if not held][:BATCHES]
    try:
        for number, batch in enumerate(every):
            given = dict(zip((spec.name for spec in samples.specs), samples.tensors(batch), strict=True))
            with torch.enable_grad():
                outputs = run_on(given, partial(call, module, samples.specs, given))
                parts = []
                for output in outputs.values():
                    if output.is_floating_point() and output.requires_grad:
                        signs = torch.randint(0, 2, output.shape, generator=random).to(output.dtype) * 2 - 1
                        size = output.detach().square().mean().sqrt().clamp(min=1e-30)
                        parts.append((output / size * signs).sum())
                if not parts:
                    return None
                torch.stack(parts).sum().backward()  # type: ignore[no-untyped-call]
            module.zero_grad(set_to_none=True)
            progress(number + 1, len(every), "what the outputs feel")
    finally:
        for handle in handles:
            handle.remove()
    found = {name: each / counts[name] for name, each in sums.items()}
    told = set(found) == set(names) and all(bool(each.isfinite().all()) for each in found.values())
    return found if told else None
