"""Calibration samples in batches, some of them held out, with what is padding in them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from compress.data.dataset import Dataset
from compress.data.padding import batch_sizes, by_shape, padding_mask
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
        signature: of the model.
        batch: samples in each.

    Attributes:
        batches: indices of the samples of each.
        held: of each, whether it is held out: it judges what the others were fitted by. Those come last.
        count: samples.
    """

    def __init__(self, data: Dataset, signature: Signature, batch: int = BATCH) -> None:
        self._data, self._signature, self.specs = data, signature, signature.inputs
        every = np.arange(len(data))
        judging = every % HELD_OUT == HELD_OUT - 1 if len(data) >= FEWEST else np.zeros(len(data), bool)
        self.batches: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        self.held: list[bool] = []
        for held in (False, True):
            index = every[judging == held]
            start = 0
            for size in batch_sizes(len(index), batch, self._tokens):
                self.batches.append(index[start : start + size])
                self.held.append(held)
                start += size
        self.count = len(data)
        self._masks: dict[int, np.ndarray[tuple[int, int], np.dtype[np.bool_]]] = {}

    def by(self, batch: int) -> Samples:
        """The same samples, with so many in a batch."""
        return Samples(self._data, self._signature, batch)

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

    def kept(self, batch: int, given: torch.Tensor | None) -> torch.Tensor | None:
        """Which tokens of a value are no padding, bool by its first two dimensions, samples and tokens in any order.

        None where all count.
        """
        if given is None or given.ndim != 3 or self._mask is None:
            return None
        if batch not in self._masks:
            arrays, _ = self._data.take(self.batches[batch])
            self._masks[batch] = np.asarray(arrays[self._mask], bool)
        told = by_shape(self._masks[batch], tuple(given.shape))
        return None if told is None else torch.as_tensor(told)

    @cached_property
    def _mask(self) -> str | None:
        return padding_mask(self._data)

    @property
    def _tokens(self) -> int:
        return 0 if self._mask is None else int(self._data.inputs[self._mask].shape[1])
