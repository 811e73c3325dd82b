"""What TensorRT would make of an ONNX file, told without it: each layer's precision, what it refuses, what is slow.

A strongly typed network takes its precisions from the graph alone, so that they can be read off it. Which operators and
types TensorRT's ONNX parser takes is the table of onnx-tensorrt (docs/operators.md, of TensorRT 10.15); what is fused
follows NVIDIA's guide to explicit quantization.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from compress.console.wording import counted
from compress.formats.onnx.read import read_onnx
from compress.quantize.graph import attribute
from compress.quantize.place_qdq import WEIGHTED
from compress.tensorrt.view import HALVES, Layer, View, name_of

__all__ = ["Finding", "Layer", "Lint", "in_order_of_weight", "lint_tensorrt", "odd_channels", "view_of"]

UNSUPPORTED = (
    "AffineGrid", "Bernoulli", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "CenterCropPad",
    "Col2Im", "Compress", "ConcatFromSequence", "ConvInteger", "DFT", "Det", "DynamicQuantizeLinear", "ImageDecoder",
    "MatMulInteger", "MaxRoiPool", "MaxUnpool", "MelWeightMatrix", "Multinomial", "NegativeLogLikelihoodLoss",
    "Optional", "OptionalGetElement", "OptionalHasElement", "QLinearConv", "QLinearMatMul", "RegexFullMatch",
    "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength",
    "SequenceMap", "SoftmaxCrossEntropyLoss", "SplitToSequence", "StringConcat", "StringNormalizer", "StringSplit",
    "TfIdfVectorizer", "Unique",
)  # fmt: skip
QUANTIZED = ("ConvInteger", "MatMulInteger", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul")
LAST_OPSET = 20  # TensorRT 10.0's; 10.15 takes 24
REFUSED = ("STRING", "INT16", "UINT16", "UINT32", "UINT64")
# What describes shapes or moves between types is no layer to speak of.
SILENT = ("QuantizeLinear", "DequantizeLinear", "Cast", "Constant", "Shape", "Size", "ConstantOfShape", "Range")
ALIGNED = {"INT8": 32, "FP16": 8, "BF16": 8}  # elements of a channel dimension that tensor cores like
DYNAMIC = {"NonZero": "how much it gives depends on the values", "NonMaxSuppression": "how much it gives depends on "
           "the values", "Loop": "a loop is run step by step", "Scan": "a loop is run step by step",
           "If": "both branches are kept, and nothing is fused across it"}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """Something to mend.

    Attributes:
        severity: "error" is what the target refuses; "slow" is what costs time; "note" is what to know.
        layer: the node's name, or "" for the whole file.
        what, mend: in words.
    """

    severity: Literal["error", "slow", "note"]
    layer: str
    what: str
    mend: str


@dataclass(frozen=True)
class Lint:
    """Layers in the order of the graph, findings, errors first, and what they are for."""

    layers: tuple[Layer, ...]
    findings: tuple[Finding, ...]
    target: Literal["tensorrt", "cpu"] = "tensorrt"

    @property
    def refused(self) -> bool:
        """Whether the target would not take it."""
        return any(finding.severity == "error" for finding in self.findings)

    @property
    def counts(self) -> dict[str, int]:
        """How many layers compute in each precision, most often first."""
        return dict(Counter(layer.precision for layer in self.layers).most_common())

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "refused": self.refused,
            "precisions": self.counts,
            "layers": [asdict(layer) for layer in self.layers],
            "findings": [asdict(finding) for finding in self.findings],
        }


def lint_tensorrt(path: Path) -> Lint:
    """Read an ONNX file and say what TensorRT would make of it; nothing is run.

    Args:
        path: of the file.

    Raises:
        StageError: it is no ONNX file, is damaged, or reaches beyond itself.

    Examples:
        >>> found = lint_tensorrt(Path("artifact/model.onnx"))
        >>> found.refused
        False
    """
    model = read_onnx(path)
    view = _view(model)
    layers = tuple(view.layer(node) for node in view.nodes if node.op_type not in SILENT)
    found = [*_whole(model, view), *(item for node in view.nodes for item in _node(node, view))]
    found += [item for layer in layers for item in _speed(layer, view, {layer.precision for layer in layers})]
    found += _alignment(layers, view)
    return Lint(layers, in_order_of_weight(found))


def in_order_of_weight(found: Sequence[Finding]) -> tuple[Finding, ...]:
    """Errors first, notes last."""
    order = {"error": 0, "slow": 1, "note": 2}
    return tuple(sorted(found, key=lambda item: order[item.severity]))


def view_of(path: Path) -> View:
    """The graph of an ONNX file, with the types that can be told of its tensors."""
    return _view(read_onnx(path))


def _view(model: onnx.ModelProto) -> View:
    try:
        inferred = onnx.shape_inference.infer_shapes(model)
    except Exception:  # onnx's C++ raises several kinds without a common base; the rest can still be told
        inferred = model
    return View(model, inferred)


def _whole(model: onnx.ModelProto, view: View) -> Iterator[Finding]:
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if opset > LAST_OPSET:
        yield Finding(
            "note", "", f"it is written in opset {opset}, TensorRT 10.0 takes up to {LAST_OPSET}",
            "export it again with compress, or build it with a newer TensorRT (10.15 takes 24)",
        )  # fmt: skip
    for value in model.graph.input:
        free = [dim.dim_param or "?" for dim in value.type.tensor_type.shape.dim[1:] if not dim.HasField("dim_value")]
        if free:
            yield Finding(
                "note", "", f"{value.name} varies in {', '.join(free)} besides the batch",
                f"give its range to the engine: --dims {free[0]}=1:64:128",
            )  # fmt: skip
        if value.name not in view.weights and view.kind(value.name) == "FP64":
            yield Finding("error", "", f"the input {value.name} is FP64", "export the model with float32 inputs")


def _node(node: NodeProto, view: View) -> Iterator[Finding]:
    """What TensorRT refuses of a node."""
    name = name_of(node)
    if node.domain not in ("", "ai.onnx"):
        yield Finding(
            "error", name, f"{node.domain}.{node.op_type} is not ONNX's own", "export without it, or write a plugin"
        )
    elif node.op_type in QUANTIZED:
        yield Finding(
            "error", name, f"{node.op_type} is not supported: TensorRT reads INT8 from Q/DQ nodes alone",
            "quantize with --int8 static --target tensorrt",
        )  # fmt: skip
    elif node.op_type in UNSUPPORTED:
        yield Finding("error", name, f"{node.op_type} is not supported", "write it with other operators, or a plugin")
    elif node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        yield from _qdq(node, view)
    elif reason := _restricted(node):
        yield Finding("error", name, f"{node.op_type}: {reason}", "change it in the model, and export again")
    if node.op_type in DYNAMIC:
        yield Finding("slow", name, f"{node.op_type}: {DYNAMIC[node.op_type]}", "keep it outside the engine if you can")
    refused = {view.kind(out) for out in node.output} & set(REFUSED)
    if refused:
        yield Finding("error", name, f"it gives {', '.join(sorted(refused))}", "use float32, int32, int64 or bool")
    if "FP64" in {view.kind(out) for out in node.output}:
        yield Finding("note", name, "it gives FP64, which TensorRT computes in FP32", "use float32")


def _restricted(node: NodeProto) -> str:
    """A limit of TensorRT's that the node is beyond, or nothing."""
    outputs = [name for name in node.output if name]
    text = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    rules = {
        "MaxPool": (len(outputs) > 1, "its Indices are not supported"),
        "LayerNormalization": (len(outputs) > 1, "only its first output is supported"),
        "LSTM": (bool(text.get("layout") or text.get("input_forget")), "layout and input_forget must be 0"),
        "Resize": (text.get("mode") == b"cubic" or bool(text.get("antialias")), "cubic and antialias are not there"),
        "ScatterND": (text.get("reduction", b"none") != b"none", "reduction is not supported"),
        "TopK": (text.get("sorted", 1) != 1, "sorted must be 1"),
    }
    broken, why = rules.get(node.op_type, (False, ""))
    if node.op_type in ("AveragePool", "LpPool", "MaxPool") and set(attribute(node, "dilations", [1])) != {1}:
        broken, why = True, "dilations must be 1"
    return why if broken else ""


def _qdq(node: NodeProto, view: View) -> Iterator[Finding]:
    name = name_of(node)
    eight = node.output[0] if node.op_type == "QuantizeLinear" else node.input[0]
    if view.kind(eight) == "INT32":
        yield Finding(
            "error", name, "a bias is quantized to INT32", "quantize with --target tensorrt: biases stay float"
        )
        return
    if view.kind(eight) == "UINT8":
        yield Finding(
            "error", name, "activations are unsigned", "quantize with --target tensorrt: signed, zero-point 0"
        )
    elif len(node.input) > 2 and node.input[2] in view.weights:
        zero = numpy_helper.to_array(view.weights[node.input[2]])
        if np.any(zero):
            yield Finding("error", name, "its zero-point is not 0", "quantize with --target tensorrt")
    if node.op_type == "QuantizeLinear":
        if any(taker.op_type != "DequantizeLinear" for taker in view.takers.get(node.output[0], [])):
            yield Finding("error", name, "what it gives is not restored", "each Q needs a DQ before the next layer")
        yield from _split(node, view)


def _split(node: NodeProto, view: View) -> Iterator[Finding]:
    """A Q/DQ pair between a layer and what would be fused into it."""
    maker = view.makers.get(node.input[0])
    if maker is None or maker.op_type not in WEIGHTED or not view.in_int8(maker):
        return
    restored = [out for taker in view.takers.get(node.output[0], []) for out in taker.output]
    takers = [taker for name in restored for taker in view.takers.get(name, [])]
    after = {taker.op_type for taker in takers if taker.op_type != "Add" or not view.behind(taker)}
    apart = sorted(after & {"Relu", "Add", "Clip", "LeakyRelu", "Sigmoid", "HardSwish"})
    if apart:
        yield Finding(
            "slow", name_of(maker), f"Q/DQ nodes part it from the {apart[0]} that TensorRT would fuse into it",
            "quantize with --target tensorrt, which leaves outputs of layers alone",
        )  # fmt: skip


def _speed(layer: Layer, view: View, precisions: set[str]) -> Iterator[Finding]:
    node = view.by_name[layer.name]
    if node.op_type in WEIGHTED and layer.precision == "FP32" and precisions & {"INT8", *HALVES}:
        yield Finding(
            "slow", layer.name, f"{layer.kind} in FP32 ({layer.why})",
            "TF32 at best: see the report for why it stayed there",
        )  # fmt: skip
    elif node.op_type in WEIGHTED and layer.precision in HALVES and "INT8" in precisions:
        mend = "TensorRT fuses attention in half precision" if "two activations" in layer.why else "left so on purpose?"
        yield Finding("note", layer.name, f"{layer.kind} in {layer.precision}: {layer.why}", mend)
    if layer.precision == "INT8" and layer.kind in WEIGHTED and layer.gives != "INT8" and _add_after(node, view):
        yield Finding(
            "slow", layer.name, f"it gives {layer.gives}, as the other side of the addition behind it is not INT8",
            "quantize the shortcut, too: --target tensorrt does",
        )  # fmt: skip


def _add_after(node: NodeProto, view: View) -> bool:
    takers = view.takers.get(node.output[0], [])
    return len(takers) == 1 and takers[0].op_type == "Add" and not any(map(view.weights.get, takers[0].input))


def _alignment(layers: Sequence[Layer], view: View) -> Iterator[Finding]:
    """Convolutions whose channels don't fill the tensor cores."""
    for precision, unit in ALIGNED.items():
        convolutions = [layer for layer in layers if layer.kind in ("Conv", "ConvTranspose")]
        odd = [layer.name for layer in convolutions if layer.precision == precision and odd_channels(layer, view, unit)]
        if odd:
            yield Finding(
                "note", "", f"channels of {counted(len(odd), 'convolutions')} in {precision} are no multiple of {unit} "
                f"and are padded to it: {', '.join(odd[:3])}{', …' if len(odd) > 3 else ''}",
                f"where they were pruned: --round-to {unit}",
            )  # fmt: skip


def odd_channels(layer: Layer, view: View, unit: int) -> bool:
    """Whether a convolution's channels are no multiple of a unit; those of an image, and of groups, don't count."""
    node = view.by_name[layer.name]
    restored = view.makers.get(node.input[1])
    tensor = view.weights.get(restored.input[0] if restored is not None else node.input[1])
    if tensor is None or attribute(node, "group", 1) != 1:
        return False
    return any(count % unit and count > 4 for count in tensor.dims[:2])  # an image's own channels can't be helped
