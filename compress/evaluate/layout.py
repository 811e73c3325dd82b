"""Whether labels lie as an output does: as many values are no fit, where their axes are in another order."""

from __future__ import annotations

import itertools
import math

__all__ = ["lies_alike", "lies_otherwise"]

MOST_AXES = 5  # whose orders are tried


def lies_alike(shape: tuple[int | str, ...], of: tuple[int, ...]) -> bool:
    """Whether two shapes of a sample are the same but for sizes of 1, or one of them is a single axis.

    Args:
        shape: of an output, without the samples; a size that varies fits any.
        of: of labels, without the samples.
    """
    mine, theirs = [size for size in shape if size != 1], [size for size in of if size != 1]
    if _same(shape, of) or _same(tuple(mine), tuple(theirs)):
        return True
    return min(len(mine), len(theirs)) < 2 and _count(shape) == math.prod(of)


def lies_otherwise(shape: tuple[int | str, ...], of: tuple[int, ...]) -> bool:
    """Whether labels that do not lie as an output does are as many, or would with their axes in another order.

    Args:
        shape, of: see `lies_alike`.
    """
    if lies_alike(shape, of):
        return False
    if _count(shape) == math.prod(of):
        return True
    few = len(shape) == len(of) <= MOST_AXES and sum(isinstance(size, int) and size != 1 for size in shape) > 0
    return few and any(_same(shape, order) for order in itertools.permutations(of))


def _same(shape: tuple[int | str, ...], of: tuple[int, ...]) -> bool:
    return len(shape) == len(of) and all(isinstance(a, str) or a == b for a, b in zip(shape, of, strict=True))


def _count(shape: tuple[int | str, ...]) -> int:
    """Values of a sample; -1 where a size varies."""
    sizes = [size for size in shape if isinstance(size, int)]
    return math.prod(sizes) if len(sizes) == len(shape) else -1
