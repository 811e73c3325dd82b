"""What half precision rounds too much: found by the values of the outputs, named, and left in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compress.model import Arrays
from compress.model.apart import share_of_largest

__all__ = ["LEVELS", "TOLERANCE", "Parity", "error_of", "repaired"]

# Largest difference to float32 as a share of the output's largest value: well above what rounding alone makes of a
# deep network (FP16 rounds by 0.0005, BF16 by 0.004), well below what a wrong value is.
TOLERANCE = {"fp16": 0.02, "bf16": 0.1}
LEVELS = 0.1  # the same for a network in INT8, where a rounding may move a value by a level of 8 bits
REPAIRS = 4
GAIN = 0.8  # repairs that leave more of the error than this have found no culprit, only an accumulation

Kept = dict[str, str]


@dataclass(frozen=True)
class Parity:
    """How a half-precision model compares.

    Attributes:
        error: see `error_of`.
        kept: nodes that stay in float32 for it, with the reason.
    """

    error: float
    kept: Kept


def error_of(expected: Arrays, got: Arrays) -> float:
    """The largest difference of any output, as a share of its scale (see `share_of_largest`); infinite for NaN."""
    return max((share_of_largest(want, got[name]) for name, want in expected.items()), default=0.0)


def repaired(
    nodes: Sequence[str], measure: Callable[[Mapping[str, str]], float], tolerance: float, kind: str
) -> Parity:
    """Keep nodes in float32, one after the other, until the outputs are within the tolerance.

    The network is converted up to a node, and that node is looked for by bisection at which the error passes the
    tolerance: log2 of their number trials for each.

    Args:
        nodes: names of those that can be converted, in the order of the graph.
        measure: gives the error with further nodes, by name with the reason, in float32.
        tolerance: of the error.
        kind: of half precision, for the reason.
    """
    kept: Kept = {}
    before = error = measure(kept)
    while error > tolerance and len(kept) < REPAIRS:
        low, high = 0, len(nodes)  # with so many converted, the error is inside; outside
        while high - low > 1:
            middle = (low + high) // 2
            inside = measure(kept | dict.fromkeys(nodes[middle:], "")) <= tolerance
            low, high = (middle, high) if inside else (low, middle)
        if high == 0 or nodes[high - 1] in kept:
            break
        kept[nodes[high - 1]] = f"{kind} rounds it too much: the outputs are off by {_share(error)}"
        error = measure(kept)  # perhaps no better yet: what it feeds may round as much
    return Parity(error, kept) if error <= max(tolerance, GAIN * before) else Parity(measure({}), {})


def _share(error: float) -> str:
    return f"{error:.1%} of their scale" if np.isfinite(error) else "more than a number can say"
