"""What ONNX Runtime makes of an ONNX file on a CPU, read off the graph: what it can't run, what is slow there.

What is slow is what was measured here: convolutions of dynamic INT8 (ConvInteger has no kernel that uses the vector
units as float convolutions do), half precision, for which x86 CPUs have no kernels, and odd channel counts
(docs/decisions/0003-round-channels.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from onnx import NodeProto

from compress.console.wording import counted
from compress.quantize.graph import attribute
from compress.quantize.int4_onnx import IN_8_BITS, LAYER
from compress.quantize.place_qdq import WEIGHTED
from compress.tensorrt.lint import DYNAMIC, SILENT, Finding, Lint, in_order_of_weight, odd_channels, view_of
from compress.tensorrt.view import HALVES, Layer, View, name_of

__all__ = ["lint_cpu"]

FOUR_BIT = {
    "MatMulNBits": "ONNX Runtime 1.17, in Triton 24.03",
    "GatherBlockQuantized": "ONNX Runtime 1.23, in Triton 25.09",
}  # the first that runs them, as they are written here
INTEGER = ("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul")
KNOWN = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")  # domains whose operators ONNX Runtime has
BLOCK = 8  # channels that a vector unit takes at a time, at the least


def lint_cpu(path: Path) -> Lint:
    """Read an ONNX file and say what ONNX Runtime would make of it on a CPU; nothing is run.

    Args:
        path: of the file.

    Raises:
        StageError: it is no ONNX file, is damaged, or reaches beyond itself.
    """
    view = view_of(path)
    layers = tuple(_layer(node, view) for node in view.nodes if node.op_type not in SILENT)
    found = [item for layer in layers for item in _layer_findings(layer, view, {la.precision for la in layers})]
    return Lint(layers, in_order_of_weight([*found, *_whole(layers, view)]), "cpu")


def _layer(node: NodeProto, view: View) -> Layer:
    gives = view.kind(node.output[0]) if node.output else "?"
    if node.op_type in INTEGER or (node.op_type in WEIGHTED and view.in_int8(node)):
        return Layer(name_of(node), node.op_type, "INT8", gives, "8-bit inputs and weights")
    if node.op_type in FOUR_BIT:
        bits, level = (attribute(node, name, given) for name, given in (("bits", 4), ("accuracy_level", 0)))
        inside = "in 8 bits" if level == IN_8_BITS else "in float"
        more = f", what they multiply {inside}" if node.op_type == LAYER else ""
        return Layer(name_of(node), node.op_type, f"INT{bits}", gives, f"{bits}-bit weights{more}")
    return Layer(name_of(node), node.op_type, gives, gives, "")


def _layer_findings(layer: Layer, view: View, precisions: set[str]) -> Iterator[Finding]:
    node = view.by_name[layer.name]
    domain = node.domain
    weighted = layer.kind in WEIGHTED and any(name in view.weights or view.restored(name) for name in node.input)
    if domain not in KNOWN:
        yield Finding(
            "error", layer.name, f"{domain}.{layer.kind} is not ONNX Runtime's own", "export the model without it"
        )
    if layer.kind == "ConvInteger":
        yield Finding(
            "slow", layer.name, "a convolution of dynamic INT8, slower than the float one", "take --int8 static"
        )
    elif weighted and layer.precision in HALVES:
        yield Finding(
            "slow", layer.name, f"{layer.kind} in {layer.precision}, for which x86 CPUs have no kernel",
            "leave --precision out for a CPU",
        )  # fmt: skip
    elif weighted and layer.precision == "FP32" and "INT8" in precisions:
        yield Finding("note", layer.name, f"{layer.kind} is in FP32, others in INT8", "see the report for why")
    elif weighted and layer.precision == "FP64":
        yield Finding("slow", layer.name, f"{layer.kind} in FP64", "export the model in float32")
    if layer.kind in DYNAMIC:
        yield Finding("note", layer.name, f"{layer.kind}: {DYNAMIC[layer.kind]}", "nothing, if the model needs it")


def _whole(layers: Sequence[Layer], view: View) -> Iterator[Finding]:
    odd = [layer.name for layer in layers if layer.kind == "Conv" and odd_channels(layer, view, BLOCK)]
    if odd:
        yield Finding(
            "note", "", f"channels of {counted(len(odd), 'convolutions')} are no multiple of {BLOCK}: the rest is done "
            f"the slow way: {', '.join(odd[:3])}{', …' if len(odd) > 3 else ''}",
            f"where they were pruned: --round-to {BLOCK}",
        )  # fmt: skip
    few = [layer for layer in layers if layer.kind in FOUR_BIT]
    if few:
        kind = max((layer.kind for layer in few), key=lambda kind: (kind == "GatherBlockQuantized", kind))
        yield Finding(
            "note", "", f"{counted(len(few), 'layers')} with weights of few bits, which are for size: {kind} needs "
            f"{FOUR_BIT[kind]}", "take --int8 where time counts; update what is older",
        )  # fmt: skip
    if any(node.op_type == "DynamicQuantizeLinear" for node in view.nodes):
        yield Finding(
            "note", "", "ranges of activations are taken over a whole batch: an answer depends on what else is in it",
            "take --int8 static where a server joins requests",
        )  # fmt: skip
