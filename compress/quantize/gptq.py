"""GPTQ: each weight is rounded knowing what the columns before it lost, by what the layer really reads.

Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers, ICLR 2023, section 3.
Columns go in the order of how much they are read; a block's scale is fixed before ("static groups"), since what is
stored has blocks of consecutive columns. Behind it, scales are fitted once more to the codes, by the same Gram matrix.
"""

from __future__ import annotations

import numpy as np

from compress.quantize.blocks import LEVELS, SIZE, Array, Blocks, Steps, fitted, rounded

__all__ = ["chosen", "lost"]

# Of the mean of the diagonal. The paper has 1%, for 128 texts of 2,048 tokens each; of 128 sentences that follows their
# words so closely that texts unlike them lose (docs/decisions/0102-four-bit-weights.md).
DAMPING = 0.1
TOGETHER = 128  # columns between two updates of all that follow
CHUNK = 1 << 22  # numbers of a batch of small systems


def lost(weights: Array, blocks: Blocks, gram: Array) -> Array:
    """The squared error of each row's products, summed over the data that the Gram matrix [columns, columns] is of."""
    error = (weights - blocks.restored()).astype(np.float64)
    found: Array = np.maximum(((error @ gram) * error).sum(1), 0.0)
    return found


def chosen(weights: Array, gram: Array, *, symmetric: bool = False) -> Blocks:
    """4-bit weights that lose least on the data, row by row the best of rounding and GPTQ: never worse than rounding.

    Args:
        weights: float32 [rows, columns].
        gram: float64 [columns, columns], of what the layer reads.
        symmetric: whether all zero-points are the middle.
    """
    best = rounded(weights, fitted(weights, symmetric=symmetric))
    if not np.isfinite(gram).all() or not gram.any():
        return best
    least = lost(weights, best, gram)
    damped = gram + DAMPING * gram.diagonal().mean() * np.eye(len(gram))
    order = np.argsort(-gram.diagonal(), kind="stable")
    upper = np.linalg.cholesky(np.linalg.inv(damped[np.ix_(order, order)])).T
    first = _compensated(weights, fitted(weights, gram.diagonal(), symmetric=symmetric), order, upper)
    for made in (first, _refitted(weights, first, damped)):
        error = lost(weights, made, gram)
        better = error < least
        best, least = _taken(best, made, better), np.where(better, error, least)
    return best


def _taken(first: Blocks, second: Blocks, rows: Array) -> Blocks:
    """The first one, with some rows of the second."""
    at = rows[:, None]
    steps = Steps(
        np.where(at, second.steps.scale, first.steps.scale), np.where(at, second.steps.zero, first.steps.zero)
    )
    return Blocks(np.where(at, second.codes, first.codes), steps)


def _compensated(weights: Array, steps: Steps, order: Array, upper: Array) -> Blocks:
    """Rounded column by column; what a column loses is made up for by those that follow."""
    left = np.ascontiguousarray(weights.T[order])  # [columns, rows]
    by = upper.astype(np.float32)
    codes = np.empty(left.shape, np.uint8)
    scales, zeros = np.ascontiguousarray(steps.scale.T), np.ascontiguousarray(steps.zero.T).astype(np.float32)
    for start in range(0, len(left), TOGETHER):
        end = min(start + TOGETHER, len(left))
        errors = np.empty((end - start, left.shape[1]), np.float32)
        for at in range(start, end):
            block = order[at] // SIZE
            scale, zero = scales[block], zeros[block]
            code = np.clip(np.rint(left[at] / scale) + zero, 0, LEVELS)
            codes[order[at]] = code
            errors[at - start] = (left[at] - (code - zero) * scale) / by[at, at]
            left[at + 1 : end] -= by[at, at + 1 : end, None] * errors[at - start]
        left[end:] -= by[start:end, end:].T @ errors
    return Blocks(np.ascontiguousarray(codes.T), steps)


def _refitted(weights: Array, blocks: Blocks, gram: Array) -> Blocks:
    """The same codes with the scales that lose least by the Gram matrix; a row's stay where they can't be told."""
    rows, count = blocks.steps.scale.shape
    columns = weights.shape[1]
    lacking = count * SIZE - columns
    wide = np.pad(gram, ((0, lacking), (0, lacking)))
    scale = blocks.steps.scale.copy()
    step = max(1, CHUNK // max(count * count, count * SIZE))
    for at in range(0, rows, step):
        some = slice(at, at + step)
        zero = np.repeat(blocks.steps.zero[some], SIZE, 1)[:, :columns].astype(np.float64)
        codes = np.pad(blocks.codes[some] - zero, ((0, 0), (0, lacking)))
        w = np.pad(weights[some].astype(np.float64), ((0, 0), (0, lacking)))
        read = w @ wide
        matrix = np.empty((len(codes), count, count))
        for block in range(count):
            own = slice(block * SIZE, (block + 1) * SIZE)
            matrix[:, block] = ((codes[:, own] @ wide[own]) * codes).reshape(len(codes), count, SIZE).sum(-1)
        told = (read * codes).reshape(len(codes), count, SIZE).sum(-1)
        size = np.einsum("rbb->rb", matrix).mean(1)
        matrix += (1e-6 * size + 1e-30)[:, None, None] * np.eye(count)
        told += (1e-6 * size + 1e-30)[:, None] * scale[some]
        try:
            found = np.linalg.solve(matrix, told[..., None])[..., 0].astype(np.float32)
        except np.linalg.LinAlgError:
            continue
        there = (np.isfinite(found) & (found > 0)).all(axis=1, keepdims=True)
        scale[some] = np.where(there, found, scale[some])
    return Blocks(blocks.codes, Steps(scale, blocks.steps.zero))
