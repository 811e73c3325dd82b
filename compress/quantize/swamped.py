"""Sums in which one term is so large that 8 bits leave nothing of the other: a mask of -1e4 that is added to data.

By the ranges that calibration has seen, whatever the mask's number is.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import GraphProto

from compress.quantize.half.index_arithmetic import KINDS, LOGICAL
from compress.quantize.unrounded import WEIGHTED
from compress.quantize.weights_onnx import RECURRENT

__all__ = ["swamped"]

LEVELS = 255  # steps of 8 bits: a term that is smaller than one of them is gone
SUMS = ("Add", "Sub", "Sum")
BARE = (*KINDS, *LOGICAL, "Constant", "ConstantOfShape", "Shape", "Trilu")


def swamped(graph: GraphProto, ranges: Mapping[str, tuple[float, float]]) -> set[str]:
    """Names of the sums, and of what takes them on, up to a layer, or to what brings the range back to the data's.

    The large term is made of inputs and constants alone, without a layer: a branch that a network has trained to be
    small beside its residual is none.

    Args:
        graph: float; its nodes in order.
        ranges: (lowest, highest) of each activation.
    """
    made = {name for node in graph.node for name in node.output}
    bare = {value.name for value in graph.input}
    swamping: dict[str, float] = {}  # what holds both, with the width of the small term
    found: set[str] = set()

    def width(name: str) -> float:
        low, high = ranges.get(name, (0.0, 0.0))
        return high - low

    for node in graph.node:
        terms = [name for name in node.input if name in made or name in ranges]
        if node.op_type in BARE and bare.issuperset(terms):
            bare.update(node.output)
            continue
        carried = [swamping[name] for name in terms if name in swamping]
        if node.op_type in SUMS:
            small = max((width(name) for name in terms if name not in bare), default=0.0)
            large = max((width(name) for name in terms if name in bare), default=0.0)
            if large >= LEVELS * small > 0:
                carried.append(small)
        if not carried or node.op_type in (*WEIGHTED, *RECURRENT):
            continue
        found.add(node.name)
        small = max(carried)
        swamping.update((name, small) for name in node.output if width(name) >= LEVELS * small)
    return found
