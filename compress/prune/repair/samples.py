"""Calibration samples in batches, some of them held out, and what is proven to be padding in them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from compress.data.dataset import Dataset
from compress.data.padding import Padding, Tokens, padding_of
from compress.model import Arrays, call
from compress.model.inputs import run_on
from compress.prune.repair.walk import Values, Walk
from compress.signature import Signature

__all__ = ["Samples"]

BATCH = 32
HELD_OUT = 8  # every so many samples, one judges
FEWEST = 16  # samples, of which some can be spared to judge


class Samples:
    """Batches of a dataset.

    Args:
        data: typical inputs.
        module: with all its channels, in eval mode: what is padding is what its answers are independent of.
        signature: of it.
        batch: samples in each.
        padding: where it is known already.

    Attributes:
        batches: indices of the samples of each.
        held: of each, whether it is held out: it judges what the others were fitted by. Those come last.
        count: samples.
        module: what was given.
    """

    def __init__(
        self,
        data: Dataset,
        module: nn.Module,
        signature: Signature,
        batch: int = BATCH,
        padding: Padding | None = None,
    ) -> None:
        self._data, self.module, self._signature, self.specs = data, module, signature, signature.inputs
        every = np.arange(len(data))
        judging = every % HELD_OUT == HELD_OUT - 1 if len(data) >= FEWEST else np.zeros(len(data), bool)
        self.batches: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        self.held: list[bool] = []
        for held in (False, True):
            index = every[judging == held]
            for start in range(0, len(index), batch):
                self.batches.append(index[start : start + batch])
                self.held.append(held)
        self.count = len(data)
        self._masks: dict[tuple[int, str], np.ndarray[Any, Any]] = {}
        self._padding = proven(module, signature, data) if padding is None else padding

    def by(self, batch: int) -> Samples:
        """The same samples, with so many in a batch."""
        return Samples(self._data, self.module, self._signature, batch, self._padding)

    @property
    def judges(self) -> str:
        """What judges, in words."""
        return "samples held out" if any(self.held) else "the samples themselves"

    @property
    def judging(self) -> list[int]:
        """Batches that are held out; all of them, where there are too few."""
        return [at for at, held in enumerate(self.held) if held] or list(range(len(self.batches)))

    def tensors(self, batch: int) -> list[torch.Tensor]:
        """The inputs of a batch, in the order of the forward."""
        arrays, _ = self._data.take(self.batches[batch])
        return [torch.as_tensor(arrays[spec.name]) for spec in self.specs]

    def begin(self, batch: int, walks: Sequence[Walk]) -> list[Values]:
        """The inputs of a batch, as each of some walks begins with."""
        tensors = self.tensors(batch)
        return [walk.begin([tensor.clone() for tensor in tensors]) for walk in walks]

    def kept(self, batch: int, layer: str, given: torch.Tensor) -> torch.Tensor | None:
        """Which rows of what a linear layer reads are no padding, bool by its first dimension or its first two.

        None where all count.
        """
        return self._kept(batch, self._padding.tensors.get(layer), given)

    def kept_of(self, batch: int, output: str, given: torch.Tensor) -> torch.Tensor | None:
        """The same of an output."""
        return self._kept(batch, self._padding.outputs.get(output), given)

    def _kept(self, batch: int, tokens: Tokens | None, given: torch.Tensor) -> torch.Tensor | None:
        if tokens is None:
            return None
        if (batch, tokens.mask) not in self._masks:
            self._masks[batch, tokens.mask] = self._data.take(self.batches[batch])[0][tokens.mask]
        kept = tokens.kept({tokens.mask: self._masks[batch, tokens.mask]})
        told = torch.as_tensor(np.ascontiguousarray(kept))
        if tuple(given.shape[:2]) == kept.shape:
            return told
        return told.flatten() if len(given) == kept.size else None  # a batch that the model has cut


def proven(module: nn.Module, signature: Signature, data: Dataset) -> Padding:
    """What is padding of what linear layers read that the forward calls once, and of outputs, by their names."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}

    @torch.no_grad()
    def run(inputs: Arrays) -> tuple[Arrays, Arrays]:
        given: dict[str, list[torch.Tensor]] = {name: [] for name in layers}

        def seen(name: str, _layer: nn.Module, read: tuple[Any, ...]) -> None:
            given[name] += read[:1]

        hooks = [layer.register_forward_pre_hook(partial(seen, name)) for name, layer in layers.items()]
        try:
            outputs = run_on(inputs, partial(call, module, signature.inputs, inputs))
        finally:
            for hook in hooks:
                hook.remove()
        once = {name: read[0].numpy() for name, read in given.items() if len(read) == 1}
        return once, {name: value.numpy() for name, value in outputs.items()}

    return padding_of(run, data)
