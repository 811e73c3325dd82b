"""Histograms of activations that take data in pieces, and the ranges that follow from them.

Memory is that of the bins, however many samples come: where the peers keep every batch (Entropy and Percentile in
ONNX Runtime's own calibration).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

__all__ = ["METHODS", "Histogram", "Method"]

Method = Literal["minmax", "percentile", "entropy", "mse"]
METHODS: tuple[Method, ...] = ("minmax", "percentile", "entropy", "mse")

BINS = 4096
LEVELS = 255  # steps of 8 bits
CLIPPED = 1e-3  # share of the values that an entropy range may leave outside
Array = np.ndarray[Any, Any]


class Histogram:
    """Counts over bins that are symmetric around 0, whose reach is a power of two and doubles when it has to.

    Doubling joins bins in pairs, so that the counts do not depend on how the data was cut into pieces.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(BINS, np.int64)
        self.reach = 0.0
        self.lowest = np.inf
        self.highest = -np.inf

    def add(self, values: Array) -> None:
        """Count an array of any shape; its values are finite."""
        flat = np.asarray(values, np.float32).ravel()
        if not flat.size:
            return
        low, high = float(flat.min()), float(flat.max())
        self.lowest, self.highest = min(self.lowest, low), max(self.highest, high)
        self._grow(max(-low, high))
        if self.reach == 0:  # nothing but zeros so far
            self.counts[BINS // 2] += flat.size
            return
        index = ((flat.astype(np.float64) + self.reach) * (BINS / (2 * self.reach))).astype(np.int64)
        self.counts += np.bincount(np.minimum(index, BINS - 1), minlength=BINS)

    def _grow(self, largest: float) -> None:
        if largest == 0:
            return
        if self.reach == 0:
            self.reach = 2.0 ** math.frexp(largest)[1]
        while self.reach <= largest:  # never equal: a value on the outer edge would have no bin of its own
            pairs = self.counts.reshape(-1, 2).sum(1)
            self.counts[:] = 0
            self.counts[BINS // 4 : 3 * BINS // 4] = pairs
            self.reach *= 2

    def range(self, method: Method) -> tuple[float, float]:
        """The range (lowest, highest) that 8 bits should cover; it holds 0, as quantization needs.

        minmax: all that was seen. percentile: all but 0.01% at each end. entropy: clipped where the divergence of the
        quantized from the whole distribution is least (Migacz, 8-bit Inference with TensorRT, 2017), but no more than
        0.1% of the values. mse: clipped where the expected squared error of rounding and clipping is least (Banner et
        al., Post Training 4-bit Quantization, 2019, section 3, for a measured distribution in place of a Laplacian).
        """
        low, high = min(self.lowest, 0.0), max(self.highest, 0.0)
        if method == "minmax" or not low < high:
            return low, high
        choose = {"percentile": self._percentile, "entropy": self._entropy, "mse": self._mse}[method]
        below, above = choose()
        return max(low, below), min(high, above)

    @property
    def _edges(self) -> Array:
        return np.linspace(-self.reach, self.reach, BINS + 1)

    def _percentile(self, outside: float = 1e-4) -> tuple[float, float]:
        share = np.cumsum(self.counts) / self.counts.sum()
        edges = self._edges
        first = int(np.searchsorted(share, outside, side="right"))
        last = min(int(np.searchsorted(share, 1 - outside)), BINS - 1)
        return min(float(edges[first]), 0.0), max(float(edges[last + 1]), 0.0)

    def _mse(self, steps: int = 96) -> tuple[float, float]:
        edges = self._edges
        centres = (edges[:-1] + edges[1:]) / 2
        low, high = min(self.lowest, 0.0), max(self.highest, 0.0)
        shares = np.linspace(1 / steps, 1, steps)
        lows, highs = low * shares, high * shares
        # What lies outside is clipped to the bound; what lies inside is off by a uniform error of one step.
        clipped_low = np.array([(self.counts * np.square(np.minimum(centres - bound, 0))).sum() for bound in lows])
        clipped_high = np.array([(self.counts * np.square(np.maximum(centres - bound, 0))).sum() for bound in highs])
        rounding = self.counts.sum() * np.square((highs[None, :] - lows[:, None]) / LEVELS) / 12
        error = rounding + clipped_low[:, None] + clipped_high[None, :]
        row, column = np.unravel_index(int(error.argmin()), error.shape)
        return float(lows[row]), float(highs[column])

    def _entropy(self, levels: int = 128) -> tuple[float, float]:
        half = BINS // 2
        magnitude = self.counts[half:] + self.counts[:half][::-1]
        magnitude[0] = magnitude[1]  # zeros, of which a ReLU makes many, are exact whatever the range
        if not magnitude.any():
            return -self.reach, self.reach
        last = int(np.flatnonzero(magnitude)[-1]) + 1
        if last <= levels:
            return -self.reach, self.reach
        # A peak at the cut (the background of images) would take all that is clipped for its own.
        beyond = 1 - np.cumsum(self.counts[half:] + self.counts[:half][::-1]) / self.counts.sum()
        least = max(levels, min(int(np.searchsorted(-beyond, -CLIPPED)) + 1, last))
        cuts = np.unique(np.linspace(least, last, 200).astype(int))
        divergences = [_divergence(magnitude, int(cut), levels) for cut in cuts]
        bound = float(cuts[np.argmin(divergences)]) / half * self.reach
        return -bound, bound


def _divergence(magnitude: Array, cut: int, levels: int) -> float:
    """Kullback-Leibler divergence of the first `cut` bins, quantized, from the whole with its tail clipped."""
    inside = magnitude[:cut].astype(np.float64)
    reference = inside.copy()
    reference[-1] += magnitude[cut:].sum()
    group = np.arange(cut) * levels // cut
    filled = inside > 0
    mass = np.bincount(group, inside, levels)
    width = np.bincount(group, filled, levels)
    quantized = np.where(filled, (mass / np.maximum(width, 1))[group], 0.0)
    p, q = reference / reference.sum(), quantized / max(quantized.sum(), 1.0)
    # A bin that the quantized distribution can't hold counts as a very small share, not as infinity.
    held = p > 0
    return float((p[held] * np.log(p[held] / np.maximum(q[held], 1e-12))).sum())
