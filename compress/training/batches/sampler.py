"""The order in which samples are shown.

Hard samples more often: the scores are those of active learning (Settles, Active Learning Literature Survey, 2009,
section 3.1): least confident, margin, entropy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from compress.data.sources import KEPT

__all__ = ["Sampler", "unsure"]

Array = np.ndarray[Any, Any]
EXPLORED = 0.5  # share of an epoch that is drawn without regard to the scores


def unsure(logits: torch.Tensor, kind: str) -> torch.Tensor:
    """How unsure a model is of each sample, 0 to 1.

    Args:
        logits: [n, classes].
        kind: "uncertainty" (1 - the largest probability), "margin" (1 - its distance to the second) or "entropy"
            (as a share of the largest possible).

    Returns:
        float32 [n].
    """
    logs = torch.log_softmax(logits.detach().float(), 1)
    if kind == "entropy":
        return -(logs.exp() * logs).sum(1) / math.log(logits.shape[1])
    first, second = logs.exp().topk(2, 1).values.unbind(1)
    return 1 - first if kind == "uncertainty" else 1 - (first - second)


class Sampler:
    """Gives the batches of each epoch; the same for the same seed, epoch and scores.

    Args:
        count: of samples.
        batch_size: of each step; batches of an epoch differ by at most one sample.
        kind: "uniform" shows each sample once; the others draw with replacement, half of it by how unsure the model
            was of each sample when it saw it last.
        seed: of the order.
        starts: where each shard begins; samples then come from a few shards at a time.
    """

    def __init__(self, count: int, batch_size: int, kind: str, seed: int, starts: Sequence[int] = ()) -> None:
        self._count = count
        self._kind = kind
        self._seed = seed
        self._starts = starts
        self.steps = -(-count // batch_size)
        self.scores = np.ones(count, np.float32)
        self._fresh = torch.full((count,), -1.0)  # how unsure the model was in this epoch; -1: not shown

    def order(self, epoch: int) -> list[Array]:
        """Indices of the samples of each step."""
        rng = np.random.default_rng((self._seed, epoch))
        if self._kind == "uniform":
            index = rng.permutation(self._count)
        else:
            total = float(self.scores.sum(dtype=np.float64))
            hard = self.scores / total if total > 0 else np.full(self._count, 1 / self._count)
            chances = EXPLORED / self._count + (1 - EXPLORED) * hard.astype(np.float64)
            index = rng.choice(self._count, self._count, p=chances / chances.sum())
        if self._starts:
            windows = rng.permutation(len(self._starts)) // KEPT
            shard = np.searchsorted(self._starts, index, side="right") - 1
            index = index[np.argsort(windows[shard], kind="stable")]
        return np.array_split(index, self.steps)

    def saw(self, places: torch.Tensor, logits: torch.Tensor) -> None:
        """What the model gave for some samples: counts from the next epoch on."""
        if self.learns:
            self._fresh[places] = unsure(logits, self._kind).cpu()

    def end_epoch(self, together: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Take up what was seen.

        Args:
            together: gives the largest of what each process has, by element.
        """
        if self.learns:
            seen = together(self._fresh).numpy()
            self.scores = np.where(seen >= 0, seen, self.scores).astype(np.float32)
            self._fresh = torch.full_like(self._fresh, -1.0)

    def state(self, of_each: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """For the kept state.

        Args:
            of_each: gives what each process has, [processes, …].
        """
        if not self.learns:
            return {}
        return {"fresh": of_each(self._fresh), "scores": torch.from_numpy(self.scores.copy())}

    def restore(self, state: Mapping[str, torch.Tensor], rank: int) -> None:
        """From a kept state; where there are more processes than then, the new ones have seen nothing."""
        if self.learns:
            rows = state["fresh"]
            self._fresh = rows[rank].clone() if rank < len(rows) else torch.full_like(rows[0], -1.0)
            self.scores = state["scores"].numpy().copy()

    @property
    def learns(self) -> bool:
        """Whether the order follows from what the model gave."""
        return self._kind != "uniform"
