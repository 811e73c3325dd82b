"""Whether an output of an ONNX file is probabilities already: by the operator that makes it, read from its bytes."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compress.vetting.wire import fields

__all__ = ["GRAPH", "INPUT", "NODE", "OPERATOR", "OUTPUT", "gives_probabilities", "mapped", "parts"]

MAKES = {"Softmax", "Sigmoid", "HardSigmoid", "Hardmax"}
PASSES = {
    "Cast", "Clip", "DequantizeLinear", "Flatten", "Identity", "QuantizeLinear", "Reshape", "Squeeze", "Unsqueeze",
}  # fmt: skip
"""Operators that leave the numbers as they are."""
SUMS = {"ReduceSum", "ReduceL1"}
GRAPH = 7  # of ModelProto
NODE = 1  # of GraphProto
INPUT, OUTPUT, OPERATOR = 1, 2, 4  # of NodeProto
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
        with mapped(path) as data:
            nodes = _nodes(data)
    except (OSError, ValueError):
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


@contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """A file's bytes, read as they are looked at; what is cut out of them is let go of within it.

    Raises:
        OSError, ValueError: it can't be read, or is empty.
    """
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held,
        memoryview(held) as data,
    ):
        yield data


def _nodes(data: memoryview) -> Nodes:
    """Of the graph: by what each makes, its operator and what it takes."""
    found: Nodes = {}
    for graph, end in parts(data, 0, len(data), GRAPH):
        for node, until in parts(data, graph, end, NODE):
            inputs, outputs, kinds = (
                [str(data[slice(*part)], "utf-8") for part in parts(data, node, until, number)]
                for number in (INPUT, OUTPUT, OPERATOR)
            )
            found |= dict.fromkeys(outputs, (kinds[0] if kinds else "", inputs))
    return found


def parts(data: memoryview, at: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    """Where the values of a message's field lie, of those that have a length."""
    return (
        (inside, stop) for number, _, inside, stop in fields(data, at, end) if number == wanted and inside is not None
    )
