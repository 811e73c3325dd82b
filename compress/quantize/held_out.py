"""What 4-bit weights lose on rows that had no part in choosing them, and what 8-bit activations lose there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compress.quantize.blocks import SIZE, Array, Blocks, Steps, fitted, rounded
from compress.quantize.gptq import chosen
from compress.quantize.grams import Reading, slices

__all__ = ["Judged", "in_8_bits", "judged"]

# Of a table that a layer multiplies by, too: what its own entries lose counts as much as what the layer's products do.
SHARED = 1.0
CHUNK = 256  # rows whose products are there at the same time


@dataclass(frozen=True)
class Judged:
    """A matrix in 4 bits, and what its products lose on rows that were held out: squared errors, summed.

    Of these rows with padding or without, whichever GPTQ does worse on.

    Attributes:
        blocks: by GPTQ, or rounded to nearest where that loses no more.
        lost: by these.
        lost_rounded: by rounding to nearest.
        lost_in_8_bits: by 8-bit activations, beside.
    """

    blocks: Blocks
    lost: float
    lost_rounded: float
    lost_in_8_bits: float

    @property
    def in_8_bits(self) -> bool:
        """Whether activations in 8 bits cost no more than the weights do."""
        return self.lost_in_8_bits <= self.lost


def judged(weights: Array, reading: Reading, *, symmetric: bool, table: bool) -> Judged:
    """GPTQ by what the layer reads, where it is better than rounding on what was held out, with padding and without.

    Args:
        weights: float32 [rows, columns].
        reading: of the layer's input.
        symmetric: whether all zero-points are the middle.
        table: whether its rows are looked up, too.
    """
    mean = np.mean([gram.diagonal().mean() for gram in reading.grams])
    parts = []
    for part, gram in zip(slices(weights.shape[1]), reading.grams, strict=True):
        read = gram + SHARED * mean * np.eye(len(gram)) if table else gram
        parts.append(chosen(np.ascontiguousarray(weights[:, part]), read, symmetric=symmetric))
    made, nearest = _joined(parts), rounded(weights, fitted(weights, symmetric=symmetric))
    counted = [_lost(rows, weights, made, nearest, table=table) for rows in (reading.held, reading.every)]
    if any(lost >= by_rounding for lost, by_rounding in counted):
        made, counted = nearest, [(by_rounding, by_rounding) for _, by_rounding in counted]
    worse = int(counted[1][0] * counted[0][1] > counted[0][0] * counted[1][1])
    rows = (reading.held, reading.every)[worse]
    return Judged(made, *counted[worse], _products(in_8_bits(rows) - rows, made.restored()))


def _lost(rows: Array, weights: Array, made: Blocks, nearest: Blocks, *, table: bool) -> tuple[float, float]:
    """By GPTQ and by rounding, on some rows."""
    entries = SHARED * float(np.square(rows, dtype=np.float64).sum()) / rows.shape[1] if table else 0.0
    errors = (weights - made.restored(), weights - nearest.restored())
    lost, by_rounding = (
        _products(rows, each) + entries * float(np.square(each, dtype=np.float64).sum()) for each in errors
    )
    return lost, by_rounding


def in_8_bits(rows: Array) -> Array:
    """What ONNX Runtime's operator makes of float32 rows with accuracy_level 4: 8 bits, a scale for each block."""
    count, columns = rows.shape
    blocks = np.pad(rows, ((0, 0), (0, -columns % SIZE))).reshape(count, -1, SIZE)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    codes = np.rint(blocks / np.where(scale > 0, scale, 1))
    made: Array = (codes * scale).reshape(count, -1)[:, :columns]
    return made


def _products(rows: Array, weights: Array) -> float:
    """Squares, summed, of rows [n, columns] times weights [outputs, columns]."""
    turned = weights.T.astype(np.float64)  # whose squares are numbers, of any float32
    return float(sum(np.square(rows[at : at + CHUNK] @ turned).sum() for at in range(0, len(rows), CHUNK)))


def _joined(parts: Sequence[Blocks]) -> Blocks:
    """Blocks of consecutive columns, side by side; all but the last are of whole blocks."""
    scale, zero = (np.concatenate([getattr(each.steps, part) for each in parts], 1) for part in ("scale", "zero"))
    return Blocks(np.concatenate([each.codes for each in parts], 1), Steps(scale, zero))
