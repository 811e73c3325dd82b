"""INT8 by ONNX Runtime's quantizer, with what it does not know: bodies of If and Loop, recurrent layers, ties."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
    save_tensors_data,
)
from onnxruntime.quantization.calibrate import TensorsData

from compress.onnx_scope import captured, drop_unused, name_nodes, sort
from compress.stages.fold_onnx import stripped
from compress.stages.tied_onnx import apart, share
from compress.stages.tied_tables import tables, tie
from compress.stages.weights_onnx import RECURRENT, both_worth, quantize_weights, rounded

__all__ = ["Ranges", "attention", "dynamic", "finish", "plain", "static_for_cpu"]

Ranges = Mapping[str, tuple[float, float]]

DYNAMIC = ("MatMul", "Gemm", "Gather", "Conv")
# In a graph with attention, static INT8 is for layers with weights alone: a mask of -10,000 that is added to the scores
# would leave them one step of 8 bits.
WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
LSTM_INPUTS = 8  # before the scales and zero-points of its 8-bit form


def plain(source: Path) -> ModelProto:
    """A float32 file as the quantizers take it: each node named, each layer with weights of its own."""
    model = onnx.load(source)
    name_nodes(model)
    apart(model)
    return model


def finish(model: ModelProto, target: Path, original: ModelProto, *, integers: bool = True) -> None:
    """Write a quantized model: what two layers share once, nodes in order, documentation dropped.

    Args:
        model: quantized; is changed.
        target: is written.
        original: what it was quantized from.
        integers: whether 8-bit weights may be another's transpose or table (see `share`).
    """
    if integers:
        tie(model, original)
    share(model, integers=integers)
    sort(model.graph)
    onnx.save(stripped(model), target)


def static_for_cpu(model: ModelProto, ranges: Ranges, exclude: Collection[str], *, reduce_range: bool) -> ModelProto:
    """Q/DQ nodes around each operator: unsigned activations, signed weights per channel.

    Args:
        model: see `plain`; its shapes inferred. It is left as it is.
        ranges: (lowest, highest) of each activation.
        exclude: names of nodes that stay in float.
        reduce_range: 7-bit weights.
    """
    model = _copy(model)
    quantize_weights(model, exclude, RECURRENT)
    kinds, weightless = attention(model)
    left = [*exclude, *weightless, *_kept_activations(model), *(node.name for node in tables(model))]

    def run(source: Path, target: Path) -> None:
        cache = target.with_name("ranges.json")
        values = {name: (np.float32(low), np.float32(high)) for name, (low, high) in ranges.items()}
        save_tensors_data(TensorsData(CalibrationMethod.MinMax, values), cache)
        quantize_static(
            str(source),
            str(target),
            calibration_cache_path=cache,
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            reduce_range=reduce_range,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
            op_types_to_quantize=kinds,
            nodes_to_exclude=left,
        )

    return _through(model, run)


def dynamic(model: ModelProto, exclude: Collection[str], *, reduce_range: bool) -> ModelProto:
    """Weights in 8 bits, activations at run time; a GRU's weights alone, for which ONNX Runtime has no such kernel.

    Args:
        model: see `plain`. It is left as it is.
        exclude: names of nodes that stay in float.
        reduce_range: 7-bit weights.
    """
    original, model = model, _copy(model)
    _dynamic_lstm(model, exclude)
    quantize_weights(model, exclude, RECURRENT)
    # A table that a layer shares is stored as that layer has it.
    left = [*exclude, *(node.name for node in tables(original))]

    def run(source: Path, target: Path) -> None:
        quantize_dynamic(
            str(source), str(target), per_channel=True, weight_type=QuantType.QInt8, op_types_to_quantize=DYNAMIC,
            reduce_range=reduce_range, nodes_to_exclude=left,
        )  # fmt: skip

    return _through(model, run)


def attention(model: ModelProto) -> tuple[Sequence[str] | None, list[str]]:
    """For a graph with a Softmax inside: what kinds of nodes to quantize, and the products of two activations in it."""
    graph = model.graph
    outputs = {output.name for output in graph.output}
    if not any(node.op_type == "Softmax" and node.output[0] not in outputs for node in graph.node):
        return None, []
    weights = {tensor.name for tensor in graph.initializer}
    return WEIGHTED, [node.name for node in graph.node if node.op_type == "MatMul" and node.input[1] not in weights]


def _kept_activations(model: ModelProto) -> list[str]:
    """Relu and Clip that the quantizer must not draw into the range of what they take.

    It would give their input the range of their output though somebody else reads that input; and a Clip's bounds
    would be lost where 0 is not between them, as an 8-bit range always holds 0.
    """
    graph = model.graph
    values = {t.name: numpy_helper.to_array(t) for t in graph.initializer if int(np.prod(t.dims)) == 1}
    shown = {value.name for value in graph.output} | {name for node in graph.node for name in captured(node)}

    def bounded(node: NodeProto) -> bool:
        bounds = [values.get(name) if name else np.float32(0) for name in [*node.input[1:], "", ""][:2]]
        return all(bound is not None for bound in bounds) and bool(bounds[0] <= 0 <= bounds[1])  # type: ignore[operator]

    return [
        node.name
        for node in graph.node
        if (node.op_type in ("Clip", "Relu") and node.input[0] in shown)
        or (node.op_type == "Clip" and not bounded(node))
    ]


def _dynamic_lstm(model: ModelProto, exclude: Collection[str]) -> None:
    """ONNX Runtime's DynamicQuantizeLSTM for each LSTM whose weights are in the file, in place."""
    graph = model.graph
    weights = {t.name: t for t in graph.initializer}
    names: dict[str, list[str]] = {}
    found = False
    for node in graph.node:
        matrices = list(node.input[1:3])
        layout = next((a.i for a in node.attribute if a.name == "layout"), 0)
        if node.op_type != "LSTM" or node.name in exclude or layout or not both_worth(node, weights):
            continue
        for name in matrices:
            if name not in names:
                names[name] = _per_gate(graph, weights[name])
        given = [*node.input, *[""] * (LSTM_INPUTS - len(node.input))]
        given[1:3] = [names[name][0] for name in matrices]
        node.input[:] = [*given, *(part for name in matrices for part in names[name][1:])]
        node.op_type, node.domain, found = "DynamicQuantizeLSTM", "com.microsoft", True
        kept = [attribute for attribute in node.attribute if attribute.name != "layout"]
        del node.attribute[:]
        node.attribute.extend(kept)
    if found and all(entry.domain != "com.microsoft" for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    drop_unused(graph)


def _per_gate(graph: onnx.GraphProto, tensor: TensorProto) -> list[str]:
    """Add 8-bit weights [directions, inputs, gates], scales and zero-points [directions, gates]; their names."""
    parts = [rounded(direction, 0) for direction in numpy_helper.to_array(tensor)]
    values = np.stack([whole.T for whole, _ in parts])
    scales = np.stack([scale for _, scale in parts])
    made = {"int8": values, "scale": scales, "zero": np.zeros(scales.shape, np.int8)}
    names = []
    for part, array in made.items():
        names.append(f"{tensor.name}_dynamic_{part}")
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), names[-1]))
    return names


def _through(model: ModelProto, run: Callable[[Path, Path], None]) -> ModelProto:
    """A copy of the model after ONNX Runtime's quantizer, which sees what bodies read as outputs and so keeps it."""
    shown = _copy(model)
    graph = shown.graph
    outputs = {value.name for value in graph.output}
    known = {value.name: value for value in graph.value_info}
    made = {name for node in graph.node for name in node.output}
    inside = {name for node in graph.node for name in captured(node)}
    graph.output.extend(known.get(name, onnx.ValueInfoProto(name=name)) for name in sorted(inside & made - outputs))
    with tempfile.TemporaryDirectory() as folder, _quiet():
        source, target = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        onnx.save(shown, source)
        run(source, target)
        quantized = onnx.load(target)
    kept = [value for value in quantized.graph.output if value.name in outputs]
    del quantized.graph.output[:]
    quantized.graph.output.extend(kept)
    sort(quantized.graph)
    return quantized


def _copy(model: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """ONNX Runtime's quantizer asks for a pre-processing that fold_onnx has done."""
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
