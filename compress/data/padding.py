"""Which tokens of samples are padding: the one input that is taken for a mask, and the order of what it is held to."""

from __future__ import annotations

from typing import Any

import numpy as np

from compress.data.dataset import Dataset

__all__ = ["batch_sizes", "by_shape", "padding_mask"]

Array = np.ndarray[Any, Any]
NAME = "attention_mask"
FEW = 256  # samples that say whether it holds ones and zeros


def padding_mask(data: Dataset) -> str | None:
    """The input [samples, tokens] that says by 1 which tokens count; None where there is none.

    Only the name that Hugging Face gives it is one: of torch's padding masks, 1 is what does not count, and of what is
    called by any other name, nothing tells.
    """
    array = data.inputs.get(NAME)
    if array is None or len(array.shape) != 2 or np.dtype(array.dtype).kind not in "iub":
        return None
    few = data.take(np.arange(min(len(data), FEW)))[0][NAME]
    return NAME if np.isin(few, (0, 1)).all() else None


def by_shape(mask: Array, shape: tuple[int, ...]) -> Array | None:
    """The mask [samples, tokens] in the order of a tensor's first two dimensions: that one, or tokens first.

    None where the shape does not tell: as many samples as tokens may lie either way.
    """
    if shape[:2] not in (mask.shape, mask.shape[::-1]) or len(set(mask.shape)) == 1 < mask.shape[0]:
        return None
    return mask if shape[:2] == mask.shape else mask.T


def batch_sizes(count: int, most: int, tokens: int) -> list[int]:
    """Sizes of the batches of so many samples, none of as many samples as tokens, so that `by_shape` can tell.

    Args:
        count: samples.
        most: in a batch.
        tokens: of a sample; 0 where nothing is told apart by them.
    """
    size = most - 1 if most == tokens > 1 else most
    whole, rest = divmod(count, size)
    sizes = [size] * whole + ([rest] if rest else [])
    return [*sizes[:-1], rest - 1, 1] if rest == tokens > 1 else sizes
