"""4-bit numbers in blocks of a row, each block with a scale and a zero-point of its own: fitted, packed, restored.

Of a weight w, a code from 0 to 15 is kept; it stands for (code - zero) · scale. Two codes are a byte, the first in its
lower half, as ONNX Runtime's MatMulNBits and GatherBlockQuantized read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["LEVELS", "MIDDLE", "SIZE", "Blocks", "Steps", "fitted", "packed", "rounded"]

Array = np.ndarray[Any, Any]
SIZE = 32  # weights in a block
LEVELS, MIDDLE = 15, 8  # the largest code, and the one that stands for 0 where no zero-point is kept
# Shares of a block's range that are tried: outside of it weights are clipped, inside they are told apart more finely.
SHARES = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7, 0.6, 0.5)
LEAST, LARGEST = np.finfo(np.float32).tiny, np.finfo(np.float32).max / 16  # of a scale: what it restores is finite
CHUNK = 1 << 22  # weights that are fitted at a time


@dataclass(frozen=True)
class Steps:
    """How far apart a block's levels are, and which of them is 0: float32 and uint8 [rows, blocks]."""

    scale: Array
    zero: Array


@dataclass(frozen=True)
class Blocks:
    """A matrix in 4 bits.

    Attributes:
        codes: uint8 [rows, columns], from 0 to 15.
        steps: of each block.
    """

    codes: Array
    steps: Steps

    def restored(self) -> Array:
        """The float32 weights [rows, columns] that it stands for."""
        columns = self.codes.shape[1]
        scale, zero = (np.repeat(part, SIZE, 1)[:, :columns] for part in (self.steps.scale, self.steps.zero))
        weights: Array = (self.codes.astype(np.float32) - zero) * scale
        return weights


def fitted(weights: Array, importance: Array | None = None, *, symmetric: bool = False) -> Steps:
    """Scales and zero-points with the least squared error of rounding to nearest.

    Args:
        weights: float32 [rows, columns].
        importance: of each column, what its squared errors weigh; all the same by default.
        symmetric: whether all zero-points are the middle.
    """
    rows = len(weights)
    step = max(1, CHUNK // max(1, weights.shape[1]))
    found = [_fitted(weights[at : at + step], importance, symmetric=symmetric) for at in range(0, rows, step)]
    return Steps(np.concatenate([each.scale for each in found]), np.concatenate([each.zero for each in found]))


def _fitted(weights: Array, importance: Array | None, *, symmetric: bool) -> Steps:
    w = _in_blocks(weights)
    # By the power of two above a block's largest weight, so that no square of any float32 is beyond float32.
    peak = np.ldexp(np.float32(1), np.clip(np.frexp(np.abs(w).max(-1))[1], -120, 127)).astype(np.float32)
    w = w / peak[..., None]
    told = np.ones(weights.shape[1], np.float32) if importance is None else importance.astype(np.float32)
    felt = np.maximum(_in_blocks(told[None]), np.float32(1e-6) * max(float(told.max(initial=0.0)), 1e-30))
    low, high = np.minimum(w.min(-1), 0), np.maximum(w.max(-1), 0)
    if symmetric:
        high = np.maximum(-low, high * np.float32(MIDDLE / (LEVELS - MIDDLE)))
        low = -high
    least = np.full(low.shape, np.inf, np.float32)
    scale, zero = np.ones(low.shape, np.float32), np.full(low.shape, MIDDLE, np.uint8)
    for share in SHARES:
        wide = (high - low) * np.float32(share) / (LEVELS + symmetric)
        wide = np.where(wide > 0, wide, np.float32(1))
        below = np.clip(np.rint(-low * np.float32(share) / wide), 0, LEVELS)
        middle = np.full_like(below, MIDDLE) if symmetric else below
        codes = np.clip(np.rint(w / wide[..., None]) + middle[..., None], 0, LEVELS) - middle[..., None]
        codes = codes.astype(np.float32)
        weighed = felt * codes
        along, across = (weighed * w).sum(-1), (weighed * codes).sum(-1)
        best = np.where((along > 0) & (across > 0), along / np.where(across > 0, across, 1), wide)  # for these codes
        error = (felt * np.square(w - best[..., None] * codes)).sum(-1)
        better = error < least
        least = np.where(better, error, least)
        scale, zero = np.where(better, best, scale), np.where(better, middle, zero).astype(np.uint8)
    scale = np.where(w.any(-1), np.minimum(scale * peak.astype(np.float64), LARGEST), 1)
    return Steps(np.maximum(scale, LEAST).astype(np.float32), zero)


def rounded(weights: Array, steps: Steps) -> Blocks:
    """Each weight's nearest level."""
    columns = weights.shape[1]
    scale, zero = (np.repeat(part, SIZE, 1)[:, :columns] for part in (steps.scale, steps.zero))
    codes = np.clip(np.rint(weights / scale) + zero, 0, LEVELS).astype(np.uint8)
    return Blocks(codes, steps)


def packed(blocks: Blocks) -> tuple[Array, Array, Array]:
    """As the operators take them.

    Returns:
        Codes uint8 [rows, blocks, 16], what a last block lacks filled with its zero-point; scales float32
        [rows, blocks]; zero-points uint8 [rows, half as many bytes as blocks, rounded up].
    """
    rows, count = blocks.steps.zero.shape
    lacking = count * SIZE - blocks.codes.shape[1]
    tail = np.repeat(blocks.steps.zero[:, -1:], lacking, 1)
    codes = np.concatenate([blocks.codes, tail], 1).reshape(rows, count, SIZE // 2, 2)
    zeros = np.pad(blocks.steps.zero, ((0, 0), (0, count % 2))).reshape(rows, -1, 2)
    return _joined(codes), blocks.steps.scale, _joined(zeros)


def _joined(pairs: Array) -> Array:
    return np.ascontiguousarray(pairs[..., 0] | (pairs[..., 1] << 4))


def _in_blocks(weights: Array) -> Array:
    """[rows, blocks, SIZE], the last one filled up with zeros."""
    rows, columns = weights.shape
    whole = np.pad(weights, ((0, 0), (0, -columns % SIZE)))
    return whole.reshape(rows, -1, SIZE)
