"""HdrHistogram with three significant digits, as arrays: recorded, merged and read many values at a time.

Values are nanoseconds. A value lands in a bucket no wider than a thousandth of it, so that histograms of several
processes or seconds add up exactly: bucket by bucket, with nothing lost that one histogram would have kept.
Source of layout and encoding: Gil Tene's HdrHistogram, encoding V2.
"""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

__all__ = ["Histogram", "Ints"]

Ints = np.ndarray[Any, np.dtype[np.int64]]

DIGITS = 3
SUB_BUCKETS = 2048  # the power of two from 2 * 10**DIGITS on: each value of the first bucket stands alone
HALF = SUB_BUCKETS // 2
HALF_BITS = HALF.bit_length() - 1
HIGHEST = 2**42  # 73 minutes
_INNER, _OUTER = 0x1C849303 | 0x10, 0x1C849304 | 0x10
_HEADER = struct.Struct(">iiiiqqd")


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of the buckets that hold any.

    Attributes:
        indices: of these buckets, ascending, int64.
        counts: as many, each over 0, int64.
    """

    indices: Ints
    counts: Ints

    @classmethod
    def empty(cls) -> Self:
        none = np.zeros(0, np.int64)
        return cls(none, none)

    @classmethod
    def of(cls, values: Ints) -> Self:
        """Count values, in nanoseconds; those under 0 count as 0, those over `HIGHEST` as that."""
        indices, counts = np.unique(_index(np.clip(values, 0, HIGHEST)), return_counts=True)
        return cls(indices, counts.astype(np.int64))

    @classmethod
    def merged(cls, parts: Iterable[Histogram]) -> Self:
        """The sum, exact."""
        parts = list(parts)
        if not parts:
            return cls.empty()
        indices = np.concatenate([part.indices for part in parts])
        return cls(*_summed(indices, np.concatenate([part.counts for part in parts])))

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def highest(self) -> Ints:
        """The largest value of each bucket, in nanoseconds."""
        low, width = _bounds(self.indices)
        return low + width - 1

    def value_at(self, percent: float) -> int:
        """The value that `percent` (0 to 100) of all are at or below, in nanoseconds; 0 without any."""
        if not len(self.counts):
            return 0
        rank = max(int(np.ceil(percent / 100 * self.total - 1e-9)), 1)
        at = int(np.searchsorted(np.cumsum(self.counts), rank))
        return int(self.highest[min(at, len(self.counts) - 1)])

    def above(self, value: int) -> int:
        """How many are greater than `value`, as far as the buckets tell."""
        return int(self.counts[self.indices > int(_index(np.array([value], np.int64))[0])].sum())

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Histogram)
            and np.array_equal(self.indices, other.indices)
            and np.array_equal(self.counts, other.counts)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays have none

    def corrected(self, interval: int) -> Histogram:
        """With the requests that a client which sends every `interval` ns would have sent while it waited.

        HdrHistogram's own correction for coordinated omission: a value v adds v - interval, v - 2 interval, … down to
        the interval. An estimate, for closed loops; an open loop needs none.
        """
        if interval <= 0 or not len(self.counts):
            return self
        low, width = _bounds(self.indices)
        middle = low + width // 2
        missing, times = middle - interval, self.counts
        parts = [self]
        while (left := missing >= interval).any():
            missing, times = missing[left], times[left]
            parts.append(Histogram(*_summed(_index(np.clip(missing, 0, HIGHEST)), times)))
            missing = missing - interval
        return Histogram.merged(parts)

    def encode(self) -> str:
        """As text: encoding V2, deflated, base64; what HdrHistogram's own tools and logs hold."""
        counts = bytearray()
        last = -1
        for index, count in zip(self.indices.tolist(), self.counts.tolist(), strict=True):
            if (gap := index - last - 1) > 0:
                _put(counts, -gap)
            _put(counts, count)
            last = index
        inner = _HEADER.pack(_INNER, len(counts), 0, DIGITS, 1, HIGHEST, 1.0) + bytes(counts)
        packed = zlib.compress(inner)
        return base64.b64encode(struct.pack(">ii", _OUTER, len(packed)) + packed).decode()

    @classmethod
    def decode(cls, text: str) -> Self:
        """What `encode` wrote.

        Raises:
            ValueError: it is something else, or a histogram of another layout.
        """
        try:
            raw = base64.b64decode(text, validate=True)
            cookie, length = struct.unpack_from(">ii", raw)
            if cookie != _OUTER or length != len(raw) - 8:
                raise ValueError("not a histogram in encoding V2")
            inner = zlib.decompress(raw[8:])
            cookie, length, _, digits, lowest, _, _ = _HEADER.unpack_from(inner)
        except (binascii.Error, struct.error, zlib.error) as err:
            raise ValueError(f"not a histogram: {err}") from err
        if (cookie, digits, lowest) != (_INNER, DIGITS, 1) or length != len(inner) - _HEADER.size:
            raise ValueError("a histogram of another layout")
        indices: list[int] = []
        counts: list[int] = []
        at = 0
        for value in _numbers(inner[_HEADER.size :]):
            if value > 0:
                indices.append(at)
                counts.append(value)
            at += max(-value, 0) or 1
        return cls(np.array(indices, np.int64), np.array(counts, np.int64))


def _summed(indices: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Each index once, ascending, with the sum of its counts."""
    once, inverse = np.unique(indices, return_inverse=True)
    sums = np.zeros(len(once), np.int64)
    np.add.at(sums, inverse, counts)
    return once, sums


def _index(values: Ints) -> Ints:
    """The bucket of each value from 0 to 2**53."""
    shift = np.maximum(np.frexp(values.astype(np.float64))[1].astype(np.int64) - HALF_BITS - 1, 0)
    found: Ints = (shift << HALF_BITS) + (values >> shift)
    return found


def _bounds(indices: Ints) -> tuple[Ints, Ints]:
    """The least value of each bucket, and how many it holds."""
    shift = np.maximum((indices >> HALF_BITS) - 1, 0)
    return (indices - (shift << HALF_BITS)) << shift, np.int64(1) << shift


def _put(out: bytearray, value: int) -> None:
    """Zigzag, then seven bits a byte, the least first; a ninth byte takes eight."""
    rest = ((value << 1) ^ (value >> 63)) & (2**64 - 1)
    for _ in range(8):
        if rest < 0x80:
            out.append(rest)
            return
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)


def _numbers(data: bytes) -> Iterable[int]:
    value = shift = 0
    for byte in data:
        value |= (byte if shift == 56 else byte & 0x7F) << shift
        shift += 7
        if byte < 0x80 or shift == 63:
            yield (value >> 1) ^ -(value & 1)
            value = shift = 0
    if shift:
        raise ValueError("a histogram that was cut off")
