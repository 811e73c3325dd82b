"""Whether an output of an ONNX file is probabilities already: by the operator that makes it, read from its bytes."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

__all__ = ["gives_probabilities"]

MAKES = {"Softmax", "Sigmoid", "HardSigmoid", "Hardmax"}
PASSES = {
    "Cast", "Clip", "DequantizeLinear", "Flatten", "Identity", "QuantizeLinear", "Reshape", "Squeeze", "Unsqueeze",
}  # fmt: skip
"""Operators that leave the numbers as they are."""
SUMS = {"ReduceSum", "ReduceL1"}
Nodes = dict[str, tuple[str, list[str]]]


def gives_probabilities(path: Path, output: str) -> bool:
    """Whether an output of the network ends in a softmax or a sigmoid, as far as its last operators tell.

    Args:
        path: an ONNX file that was vetted.
        output: its name.

    Returns:
        False, too, where the file can't be read so.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held,
            memoryview(held) as data,
        ):
            nodes = _nodes(data)
    except (OSError, ValueError, IndexError):
        return False
    seen: set[str] = set()
    while output in nodes and output not in seen:
        seen.add(output)
        operator, inputs = nodes[output]
        if operator in MAKES:
            return True
        if operator == "Div" and len(inputs) == 2:  # a softmax that the exporter took apart
            above, below = (nodes.get(name, ("", []))[0] for name in inputs)
            return above == "Exp" and below in SUMS
        if operator not in PASSES or not inputs:
            return False
        output = inputs[0]
    return False


def _nodes(data: memoryview) -> Nodes:
    """Of the graph: by what each makes, its operator and what it takes."""
    found: Nodes = {}
    for start, end in _parts(data, 0, len(data), 7):
        for at, until in _parts(data, start, end, 1):
            inputs, outputs, kinds = (
                [str(data[slice(*part)], "utf-8") for part in _parts(data, at, until, number)] for number in (1, 2, 4)
            )
            found |= dict.fromkeys(outputs, (kinds[0] if kinds else "", inputs))
    return found


def _parts(data: memoryview, at: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    """Where the values of a message's field lie, of those that have a length."""
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 2:
            length, at = _varint(data, at)
            if key >> 3 == wanted:
                yield at, at + length
            at += length
        elif kind == 0:
            _, at = _varint(data, at)
        else:
            at += {1: 8, 5: 4}.get(kind, end)


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
