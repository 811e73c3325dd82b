"""Which samples to look at where not all are: in the order of the data, and from all over it."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["spread_over"]


def spread_over(samples: int, count: int) -> np.ndarray[Any, Any]:
    """Places of at most `count` of so many samples, in order, with the first and the last among them."""
    return np.unique(np.linspace(0, samples - 1, min(samples, count)).astype(np.int64))
