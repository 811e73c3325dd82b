"""In which precision each layer of an ONNX file runs, read off the finished file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import onnx

from compress.formats.onnx.scope import inner_nodes
from compress.quantize.int4_onnx import LAYER, TABLE
from compress.quantize.weights_onnx import RECURRENT

__all__ = ["FOUR_BIT", "Precisions", "operators", "precisions"]

INTEGER = (
    "ConvInteger",
    "MatMulInteger",
    "QLinearConv",
    "QLinearMatMul",
    "QGemm",
    "DynamicQuantizeLSTM",
    "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat",
)
FOUR_BIT = (LAYER, TABLE)
LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass(frozen=True)
class Precisions:
    """Layers with weights.

    Attributes:
        int8: how many in INT8, `weights_only` among them.
        floats: which in float, with the reason by name.
        weights_only: of those in INT8, recurrent ones whose activations are float.
        int4: how many have 4-bit weights, tables among them.
    """

    int8: int
    floats: dict[str, str]
    weights_only: tuple[str, ...] = ()
    int4: int = 0


def precisions(path: Path, *, weights_only: bool = False, excluded: Collection[str] = ()) -> Precisions:
    """Count the layers of a file.

    Args:
        path: an ONNX file.
        weights_only: a layer counts as INT8 when its weights are, whatever its activations.
        excluded: names that were left in float on purpose.
    """
    graph = onnx.load(path, load_external_data=False).graph
    dequantized = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    weights = {tensor.name for tensor in graph.initializer} | dequantized
    for node in graph.node:  # a weight that is another's transpose (see tied_onnx)
        if node.op_type == "Transpose" and node.input[0] in weights:
            weights.add(node.output[0])
            dequantized |= {node.output[0]} if node.input[0] in dequantized else set()
    four = sum(node.op_type in FOUR_BIT for node in graph.node)
    eight = 0
    floats: dict[str, str] = {}
    recurrent: list[str] = []
    for node in graph.node:
        name = node.name or node.output[0]
        if node.op_type in INTEGER or (weights_only and node.op_type == "Gather" and name.endswith("_rows")):
            eight += 1
        elif node.op_type in LAYERS and node.input[1] in weights:
            wanted = {node.input[1]} if weights_only else {node.input[0], node.input[1]}
            if wanted <= dequantized:
                eight += 1
            else:
                floats[name] = "left in float on purpose" if name in excluded else "the quantizer leaves it alone"
        elif node.op_type == "Gather" and name in excluded and node.input[0] in weights:
            floats[name] = "left in float on purpose"
        elif node.op_type in RECURRENT and set(node.input[1:3]) <= dequantized:
            eight += 1
            recurrent.append(name)
        elif node.op_type in RECURRENT:
            floats[name] = "left in float on purpose" if name in excluded else "recurrent layers stay in float"
    inside = [node for node in inner_nodes(graph) if node.op_type in (*LAYERS, *RECURRENT)]
    floats |= {node.name or node.output[0]: "inside a branch or a loop" for node in inside}
    return Precisions(eight, floats, () if weights_only else tuple(recurrent), four)


def operators(path: Path) -> dict[str, int]:
    """How often each kind of node is there, most often first."""
    graph = onnx.load(path, load_external_data=False).graph
    return dict(Counter(node.op_type for node in graph.node).most_common())
