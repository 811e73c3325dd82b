"""The order in which samples are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from compress.data.sources import KEPT

__all__ = ["Sampler"]

Array = np.ndarray[Any, Any]


class Sampler:
    """Gives the batches of each epoch, each sample once; the same for the same seed and epoch.

    Args:
        count: of samples.
        batch_size: of each step; batches of an epoch differ by at most one sample.
        seed: of the order.
        starts: where each shard begins; samples then come from a few shards at a time.
    """

    def __init__(self, count: int, batch_size: int, seed: int, starts: Sequence[int] = ()) -> None:
        self._count = count
        self._seed = seed
        self._starts = starts
        self.steps = -(-count // batch_size)

    def order(self, epoch: int) -> list[Array]:
        """Indices of the samples of each step."""
        rng = np.random.default_rng((self._seed, epoch))
        index = rng.permutation(self._count)
        if self._starts:
            windows = rng.permutation(len(self._starts)) // KEPT
            shard = np.searchsorted(self._starts, index, side="right") - 1
            index = index[np.argsort(windows[shard], kind="stable")]
        return np.array_split(index, self.steps)
