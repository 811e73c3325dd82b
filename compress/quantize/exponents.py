"""How far to even out an activation: the exponent at which its layers' 8-bit products come nearest to the float ones.

The search is that of Lin et al., AWQ: Activation-aware Weight Quantization, MLSys 2024, section 3.2: a few exponents,
each tried on calibration data, layer by layer; here activations are rounded, too, as static INT8 rounds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from compress.quantize.graph import Array

__all__ = ["ALPHAS", "ROWS", "Seen", "alive", "error", "scale_of"]

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
ROWS = 512  # of an activation, that exponents are tried on


@dataclass
class Seen:
    """What calibration has shown of an activation.

    Attributes:
        lowest, highest: by channel [channels].
        rows: some of its values [rows, channels], float32.
    """

    lowest: Array
    highest: Array
    rows: list[Array] = field(default_factory=list)

    @classmethod
    def of(cls, channels: int) -> Seen:
        """Of nothing yet."""
        return cls(np.full(channels, np.inf, np.float32), np.full(channels, -np.inf, np.float32))

    @property
    def kept(self) -> int:
        """How many rows."""
        return sum(map(len, self.rows))

    def add(self, values: Array, keep: int) -> None:
        """More of them [rows, channels], of which there is one at least; so many, evenly apart, are kept."""
        self.lowest = np.minimum(self.lowest, values.min(0))
        self.highest = np.maximum(self.highest, values.max(0))
        if keep > 0:
            self.rows.append(values[np.unique(np.linspace(0, len(values) - 1, keep).astype(np.int64))])

    @property
    def largest(self) -> Array:
        """Largest absolute values [channels]."""
        return np.maximum(np.abs(self.lowest), np.abs(self.highest))


def alive(activation: Array, weight: Array) -> Array:
    """Which channels can be evened out, bool [channels], by their largest absolute values: none that is 0 throughout.

    One that is no number is left to calibration, which will tell of the overflow.
    """
    living: Array = (activation > 0) & (weight > 0) & np.isfinite(activation)
    return living


def scale_of(activation: Array, weight: Array, alpha: float) -> Array:
    """max|X|^a / max|W|^(1-a) of each channel, its geometric mean 1 (Xiao et al., SmoothQuant, 2023, equation 4).

    Args:
        activation, weight: largest absolute values [channels]; where one is 0 or no number, the scale is 1.
        alpha: how much of the difficulty moves from activations to weights, from 0 to 1.
    """
    activation, weight = activation.astype(np.float64), weight.astype(np.float64)
    living = alive(activation, weight)
    if not living.any():
        return np.ones(len(activation), np.float32)
    raw = np.where(living, activation, 1.0) ** alpha / np.where(living, weight, 1.0) ** (1 - alpha)
    raw = raw / np.exp(np.log(raw[living]).mean())
    return np.where(living, np.clip(raw, 1e-3, 1e3), 1.0).astype(np.float32)


def error(seen: Seen, weights: Sequence[Array], scale: Array, levels: int) -> float:
    """The squared error of the layers' 8-bit products, as a share of the products' own variance; their mean.

    Args:
        seen: the activation that they take.
        weights: of each layer [outputs, channels].
        scale: what each channel [channels] is divided by, and its weights multiplied by.
        levels: of a weight, to each side of 0.
    """
    rows = np.concatenate(seen.rows)
    lowest, highest = float((seen.lowest / scale).min()), float((seen.highest / scale).max())
    lowest, highest = min(lowest, 0.0), max(highest, 0.0)
    step = (highest - lowest) / 255 or 1.0
    zero = np.round(-lowest / step)
    rounded = (np.clip(np.round(rows / (scale * step)) + zero, 0, 255) - zero) * np.float32(step)
    shares = []
    for weight in weights:
        wanted = rows @ weight.T
        spread = np.square(wanted - wanted.mean(0)).sum()
        scaled = weight * scale
        steps = np.abs(scaled).max(1, keepdims=True) / levels
        steps[steps == 0] = 1.0
        got = rounded @ (np.round(scaled / steps) * steps).T
        shares.append(float(np.square(got - wanted).sum() / max(spread, np.finfo(np.float32).tiny)))
    return float(np.mean(shares))
