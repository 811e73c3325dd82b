"""Samples that stand in two sets of data, found by what they hold: a copy under another name is the same data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.storage.hashing import MADE
from compress.vetting.heard import listener, unheard

__all__ = ["Overlap", "alike", "copies", "overlaps"]

DUPLICATES = 0.01  # of the samples of a set, that may stand in another: data has doubles of its own
LOOKED_AT = 4096
"""Samples of a set that are looked at where each has to be computed; they lie spread over it."""
RUN = 64
"""Samples that are read at once."""


@dataclass(frozen=True)
class Overlap:
    """How much of one set stands in the other.

    Attributes:
        shared: samples of the one whose inputs are those of a sample of the other.
        looked_at: of so many.
        samples: that the one holds in all.
        others: that the other holds.
    """

    shared: int
    looked_at: int
    samples: int
    others: int

    @property
    def counts(self) -> bool:
        """Whether it is more than data has doubles of its own: of the one set, or, as many as that makes, of the other.

        A set of 100 that is taken from 10,000 is all told by the first, 10,000 that hold a set of 90 by the second.
        """
        doubles = min(self.looked_at, self.others * self.looked_at / self.samples) * DUPLICATES
        return self.shared > max(1, doubles) or 0 < self.shared in (self.samples, self.others)

    @property
    def told(self) -> str:
        """How many, as '64 of the 100 samples of'."""
        if self.looked_at < self.samples:
            return f"{self.shared:,} of {self.looked_at:,} samples looked at of"
        return (
            f"{self.shared:,} of the {counted(self.samples, 'samples')} of"
            if self.samples > 1
            else "the only sample of"
        )


def overlaps(data: Dataset, others: Mapping[str, Dataset]) -> dict[str, Overlap]:
    """How much of each other set stands in the data, whatever their names, orders and files.

    Each set goes through memory once, batch by batch, and leaves 8 bytes of hash for each sample. Labels are not
    compared, and numbers are as the model takes them.

    Args:
        data: what the others are looked for in.
        others: sets by name.
    """
    known = _hashes(data, range(0, len(data), RUN))
    return {name: _overlap(known, other) for name, other in others.items()}


def copies(data: Dataset) -> tuple[int, int]:
    """How many samples of a set hold what another of it holds, beyond the first of each, and of how many looked at.

    Of pairs these are the samples: one text may stand in many of them.
    """
    looked = _hashes(data, _starts(data))
    if data.pairs:
        pairs = np.sort(looked.reshape(-1, 2), axis=1)
        return len(pairs) - len(np.unique(pairs, axis=0)), len(pairs)
    return len(looked) - len(np.unique(looked)), len(looked)


def alike(data: Dataset) -> np.ndarray[Any, Any]:
    """A number for each sample [n], int64: the same one where the inputs are the same; every sample is looked at."""
    return np.unique(_hashes(data, range(0, len(data), RUN)), return_inverse=True)[1].reshape(-1).astype(np.int64)


def _overlap(known: np.ndarray[Any, Any], other: Dataset) -> Overlap:
    looked = _hashes(other, _starts(other))
    return Overlap(int(np.isin(looked, known).sum()), len(looked), len(other), len(known))


def _starts(data: Dataset) -> range | list[int]:
    """Where runs of samples begin: all of them, or as many as may be looked at, from the first to the last."""
    if data.fetcher is None or len(data) <= LOOKED_AT:
        return range(0, len(data), RUN)
    return [int(at) for at in np.linspace(0, len(data) - RUN, LOOKED_AT // RUN)]


def _hashes(data: Dataset, starts: range | list[int]) -> np.ndarray[Any, Any]:
    """Of the inputs of each sample [n], uint64."""
    tell = listener() if data.fetcher is not None else unheard
    tell(0, len(starts) * RUN, MADE)
    found = []
    for number, start in enumerate(starts, 1):
        inputs, _ = data.take(slice(start, start + RUN))
        found += list(_each(inputs))
        tell(number * RUN, len(starts) * RUN, MADE)
    return np.frombuffer(b"".join(found), np.uint64)


def _each(inputs: Mapping[str, np.ndarray[Any, Any]]) -> Iterator[bytes]:
    arrays = [inputs[name] for name in sorted(inputs)]
    for at in range(len(arrays[0])):
        digest = hashlib.blake2b(digest_size=8)
        for array in arrays:
            # The bytes of text have the width of its longest, and those of objects are addresses.
            digest.update(array[at].tobytes() if array.dtype.kind in "biufc" else repr(array[at].tolist()).encode())
        yield digest.digest()
