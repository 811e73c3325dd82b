"""The state that a training goes on from: the newest of any process's disk that is whole and of this training."""

from __future__ import annotations

import time
from typing import Any

import torch

from compress.training.updates.kept_state import KeptState
from compress.training.updates.vet_state import is_state

__all__ = ["Newest"]

OTHER = "it is not one that this training has written"


class Newest:
    """States in the order of their age, one after the other: another machine may be the first process now.

    All processes ask for the next one together.

    Args:
        kept: this process's own.
        fabric: of all.
        device: that fabric computes on.
        samples: of the training data.

    Attributes:
        left_out: for each that was of no use, what it was and why.
        any: whether a process found a file at all.
    """

    def __init__(self, kept: KeptState, fabric: Any, device: torch.device, samples: int) -> None:
        self._kept, self._fabric, self._samples = kept, fabric, samples
        mine = torch.tensor([kept.written()], dtype=torch.float64, device=device)
        times: list[float] = fabric.all_gather(mine).flatten().tolist()
        self._times = times
        self._left = sorted((rank for rank, written in enumerate(times) if written > 0), key=lambda rank: -times[rank])
        self._at = 0
        self.left_out: list[str] = []
        self.any = bool(self._left)

    def next(self) -> dict[str, Any] | None:
        """The newest of those that are left which has the parts of a state; None where there is none."""
        while self._left:
            self._at = self._left.pop(0)
            mine: tuple[dict[str, Any] | None, str] = None, ""
            if self._fabric.global_rank == self._at:
                mine = self._kept.read()
                if mine[0] is not None and not is_state(mine[0], self._samples):
                    mine = None, OTHER
            found, why = self._fabric.broadcast(mine, self._at)
            if found is not None:
                return dict(found)
            self.leave_out(why)
        return None

    def leave_out(self, why: str = OTHER) -> None:
        """The last one that was given, or looked at, is of no use.

        Args:
            why: it is.
        """
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self._times[self._at]))
        words = f"what process {self._at + 1} found kept of this training at {written} UTC was left out: {why}"
        if not any(said.endswith(words.partition(" found ")[2]) for said in self.left_out):  # several see one disk
            self.left_out.append(words)

    def warnings(self, *, used: bool) -> list[str]:
        """What there is to tell of those that were left out.

        Args:
            used: whether the training goes on from another one.
        """
        if used:
            return [f"{words}; the training goes on from an older state" for words in self.left_out]
        anew = "what an interrupted run had kept of this training can't be used: it began anew"
        return [anew, *self.left_out] if self.any else []
