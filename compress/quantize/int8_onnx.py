"""INT8 by ONNX Runtime's quantizer, with what it does not know: bodies of If and Loop, recurrent layers, ties."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
    save_tensors_data,
)
from onnxruntime.quantization.calibrate import TensorsData

from compress.console.quiet import errors_only
from compress.formats.onnx.outline import set_apart
from compress.formats.onnx.scope import captured, drop_unused, fresh, inner_names, name_nodes, names_in, rename, sort
from compress.onnx_export.file import save
from compress.onnx_export.fold import stripped
from compress.onnx_export.tied import apart, share
from compress.quantize.cuts import cuts, tell
from compress.quantize.half.mask_chain import beside, mask_chain
from compress.quantize.quantizer_limits import kept_activations, no_matrices, odd, one_scale
from compress.quantize.shield import shield
from compress.quantize.stand_ins import StandIns
from compress.quantize.tied_tables import Ties, tables, tie
from compress.quantize.unrounded import ANSWERS, ROUNDED, in_float, take_unrounded
from compress.quantize.weights_onnx import RECURRENT, both_worth, quantize_weights, rounded
from compress.runtime.memory import give_back

__all__ = ["Ranges", "attention", "dynamic", "finish", "plain", "static_for_cpu"]

Ranges = Mapping[str, tuple[float, float]]

DYNAMIC = ("MatMul", "Gemm", "Gather", "Conv")
# In a graph with attention, static INT8 is for layers with weights alone: a mask of -10,000 that is added to the scores
# would leave them one step of 8 bits. What a product gives stays in float there: it is added up, normalized or
# activated next, none of it in INT8.
FLOAT_RESULTS = ("MatMul", "Gemm")
WHOLE = {"quant_type": QuantType.QInt8}  # of a weight with one scale
WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
OPSET = 17  # of ONNX's own operators, where a file names none: of ai.onnx.ml's alone
LSTM_INPUTS = 8  # before the scales and zero-points of its 8-bit form


def plain(source: Path) -> ModelProto:
    """A float32 file as the quantizers take it: each node named, each layer with weights of its own."""
    model = onnx.load(source)
    _one_opset(model)
    name_nodes(model)
    apart(model)
    _own_turned(model.graph)
    _plain_biases(model.graph)
    return model


def _one_opset(model: ModelProto) -> None:
    """Name each domain once, in place, and ONNX's own, as ONNX Runtime's quantizer wants it; skl2onnx does neither."""
    versions = {"": 0}
    for entry in model.opset_import:
        domain = "" if entry.domain == "ai.onnx" else entry.domain
        versions[domain] = max(entry.version, versions.get(domain, 0))
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(domain, version or OPSET) for domain, version in versions.items())


def _own_turned(graph: onnx.GraphProto) -> None:
    """Give each Gemm with transB a copy of a weight that others read, in place.

    ONNX Runtime's dynamic quantizer turns it under its own name, and they would read it turned. `finish` joins copies.
    """
    weights = {tensor.name: tensor for tensor in graph.initializer}
    readers = Counter(name for node in graph.node for name in (*node.input, *captured(node)))
    readers.update(value.name for value in (*graph.input, *graph.output))
    taken = names_in(graph)
    for node in graph.node:
        if node.op_type != "Gemm" or readers[node.input[1]] < 2 or node.input[1] not in weights:
            continue
        if any(attribute.name == "transB" and attribute.i for attribute in node.attribute):
            own = fresh(f"{node.input[1]}_of_{node.name}", taken)
            taken.add(own)
            copy = graph.initializer.add()
            copy.CopyFrom(weights[node.input[1]])
            copy.name = node.input[1] = own
    drop_unused(graph)


def _plain_biases(graph: onnx.GraphProto) -> None:
    """Write the bias of each Gemm, in place, times its `beta`, which ONNX Runtime's quantizer drops, and as [outputs]
    where it is broadcast to that.
    """
    weights = {t.name: t for t in graph.initializer if t.name not in {value.name for value in graph.input}}
    taken = names_in(graph)
    for node in graph.node:
        if node.op_type != "Gemm" or [*node.input, "", ""][2] not in weights:
            continue
        bias = given = numpy_helper.to_array(weights[node.input[2]])
        beta = next((a for a in node.attribute if a.name == "beta"), None)
        if beta is not None and beta.f != 1.0:
            bias = (bias * beta.f).astype(bias.dtype)
            beta.f = 1.0
        if node.input[1] in weights:
            turned = any(a.name == "transB" and a.i for a in node.attribute)
            outputs = weights[node.input[1]].dims[0 if turned else 1]
            if bias.shape != (outputs,) and bias.size in (1, outputs) and bias.shape[-1:] in ((), (1,), (outputs,)):
                bias = np.ascontiguousarray(np.broadcast_to(bias.ravel(), (outputs,)))
        if bias is not given:
            node.input[2] = fresh(f"{node.input[2]}_plain", taken)
            taken.add(node.input[2])
            graph.initializer.append(numpy_helper.from_array(bias, node.input[2]))
    drop_unused(graph)


def finish(model: ModelProto, target: Path, tied: Ties, *, integers: bool = True) -> None:
    """Write a quantized model: what two layers share once, nodes in order, float layers shielded, no documentation.

    Args:
        model: quantized; is changed.
        target: is written.
        tied: of what it was quantized from.
        integers: whether 8-bit weights may be another's transpose or table (see `share`).
    """
    if integers:
        tie(model, tied)
    share(model, integers=integers)
    sort(model.graph)
    shield(model)
    save(stripped(model), target)


def static_for_cpu(model: ModelProto, ranges: Ranges, exclude: Collection[str], *, reduce_range: bool) -> ModelProto:
    """Q/DQ nodes around each operator: unsigned activations, signed weights per channel.

    Args:
        model: see `plain`; its shapes inferred. It is left as it is.
        ranges: (lowest, highest) of each activation; what carries a mask and has none stays in float.
        exclude: names of nodes that stay in float.
        reduce_range: 7-bit weights.
    """
    given, model = model, _copy(model)
    exclude = [*exclude, *beside(model.graph, mask_chain(model.graph).all - set(ranges))]
    quantize_weights(model, exclude, RECURRENT)
    kinds, weightless = attention(model)
    left = {*exclude, *weightless, *kept_activations(model), *odd(model), *(node.name for node in tables(model))}
    asked = {n.name for n in model.graph.node if n.op_type in (kinds or ROUNDED) and n.op_type not in ANSWERS} - left
    asked -= in_float(model.graph, asked)
    left = {node.name for node in model.graph.node} - asked
    dims = {tensor.name: len(tensor.dims) for tensor in model.graph.initializer}
    whole = {n.input[1] for n in model.graph.node if len(n.input) > 1 and one_scale(n, dims.get(n.input[1], 0))}

    def run(source: Path, target: Path, names: _Names) -> None:
        cache = target.with_name("ranges.json")
        values = {
            names.plain[name]: (np.float32(low), np.float32(high))
            for name, (low, high) in ranges.items()
            if name in names.plain
        }
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
            nodes_to_exclude=sorted(left),
            extra_options={
                "TensorQuantOverrides": {names.plain[name]: [dict(WHOLE)] for name in whole & dims.keys()},
                "OpTypesToExcludeOutputQuantization": [] if kinds is None else list(FLOAT_RESULTS),
            },
        )

    quantized = _through(model, run)
    take_unrounded(given, quantized, asked)
    tell(quantized, cuts(given, quantized))
    return quantized


def dynamic(model: ModelProto, exclude: Collection[str], *, reduce_range: bool) -> ModelProto:
    """Weights in 8 bits, activations at run time; a GRU's weights alone, for which ONNX Runtime has no such kernel.

    Args:
        model: see `plain`. It is left as it is.
        exclude: names of nodes that stay in float.
        reduce_range: 7-bit weights.
    """
    original = model
    if any(node.op_type in RECURRENT for node in model.graph.node):  # a copy is as large as the file
        model = _copy(model)
        _dynamic_lstm(model, exclude)
        quantize_weights(model, exclude, RECURRENT)
    # A table that a layer shares is stored as that layer has it.
    left = [*exclude, *odd(model), *no_matrices(model.graph), *(node.name for node in tables(original))]
    left += [f"{name}_MatMul" for name in left]  # the quantizer cuts a Gemm in two, and asks for the part

    def run(source: Path, target: Path, _: _Names) -> None:
        quantize_dynamic(
            str(source), str(target), per_channel=True, weight_type=QuantType.QInt8, op_types_to_quantize=DYNAMIC,
            reduce_range=reduce_range, nodes_to_exclude=left,
            # What a stand-in does not let it infer is what a float32 layer gives.
            extra_options={"DefaultTensorType": TensorProto.FLOAT},
        )  # fmt: skip

    large = StandIns(model, left)
    return _through(large.shown, run, lambda made, names: large.put_back(made, names, reduce_range=reduce_range))


def attention(model: ModelProto) -> tuple[Sequence[str] | None, list[str]]:
    """For a graph with a Softmax inside: what kinds of nodes to quantize, and the products of two activations in it."""
    graph = model.graph
    outputs = {output.name for output in graph.output}
    if not any(node.op_type == "Softmax" and node.output[0] not in outputs for node in graph.node):
        return None, []
    weights = {tensor.name for tensor in graph.initializer}
    return WEIGHTED, [node.name for node in graph.node if node.op_type == "MatMul" and node.input[1] not in weights]


def _dynamic_lstm(model: ModelProto, exclude: Collection[str]) -> None:
    """ONNX Runtime's DynamicQuantizeLSTM for each LSTM whose weights are in the file, in place."""
    graph = model.graph
    weights = {t.name: t for t in graph.initializer}
    names: dict[str, list[str]] = {}
    taken = names_in(graph)
    found = False
    for node in graph.node:
        matrices = list(node.input[1:3])
        layout = next((a.i for a in node.attribute if a.name == "layout"), 0)
        if node.op_type != "LSTM" or node.name in exclude or layout or not both_worth(node, weights):
            continue
        for name in matrices:
            if name not in names:
                names[name] = _per_gate(graph, weights[name], taken)
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


def _per_gate(graph: onnx.GraphProto, tensor: TensorProto, taken: set[str]) -> list[str]:
    """Add 8-bit weights [directions, inputs, gates], scales and zero-points [directions, gates]; their names."""
    parts = [rounded(direction, 0) for direction in numpy_helper.to_array(tensor)]
    values = np.stack([whole.T for whole, _ in parts])
    scales = np.stack([scale for _, scale in parts])
    made = {"int8": values, "scale": scales, "zero": np.zeros(scales.shape, np.int8)}
    names = []
    for part, array in made.items():
        names.append(fresh(f"{tensor.name}_dynamic_{part}", taken))
        taken.add(names[-1])
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), names[-1]))
    return names


def _through(
    shown: ModelProto,
    run: Callable[[Path, Path, _Names], None],
    mend: Callable[[ModelProto, Mapping[str, str]], None] = lambda *_: None,
) -> ModelProto:
    """A model after ONNX Runtime's quantizer.

    The quantizer looks neither into bodies nor at names: what bodies read is shown to it as outputs, which it keeps,
    and its own names (`x_scale`) are made to fit beside those that are there.

    Args:
        shown: is changed.
        run: calls the quantizer, from one file to another.
        mend: gets what it made, and what each tensor was called for it.
    """
    graph = shown.graph
    outputs = {value.name for value in graph.output}
    weights = {tensor.name for tensor in graph.initializer}
    said = [value for value in graph.value_info if value.name not in weights]  # a Gemm's weight it turns, no more
    del graph.value_info[:]
    graph.value_info.extend(said)
    known = {value.name: value for value in graph.value_info}
    made = {name for node in graph.node for name in node.output}
    inside = {name for node in graph.node for name in captured(node)}
    graph.output.extend(known.get(name, onnx.ValueInfoProto(name=name)) for name in sorted(inside & made - outputs))
    names = _Names(graph)
    rename(graph, names.plain)
    # The quantizer asks for a pre-processing that fold_onnx has done.
    with tempfile.TemporaryDirectory() as folder, errors_only():
        whole, source, target = (Path(folder) / name for name in ("whole.onnx", "float.onnx", "int8.onnx"))
        save(shown, whole)
        del shown, graph, known, said  # the quantizer has copies of its own, and any part of a model holds all of it
        onnx.save(set_apart(whole, Path(folder) / "float.weights"), source)  # it infers shapes without the weights
        whole.unlink()
        give_back()
        run(source, target, names)
        quantized = onnx.load(target)
    mend(quantized, names.plain)
    names.restore(quantized.graph)
    kept = [value for value in quantized.graph.output if value.name in outputs]
    del quantized.graph.output[:]
    quantized.graph.output.extend(kept)
    sort(quantized.graph)
    return quantized


class _Names:
    """Names for the tensors of a graph that none of the quantizer's own can be like, and back."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._taken = names_in(graph)
        self._nodes = {node.name for node in graph.node}
        self.plain = {name: f"T{number}T" for number, name in enumerate(sorted(self._taken - inner_names(graph)))}
        self._back = {new: old for old, new in self.plain.items()}

    def restore(self, graph: onnx.GraphProto) -> None:
        """Rename, in place: tensors to what they were, the quantizer's own to what they are made of, as it does."""
        new = dict(self._back)
        for name in sorted(names_in(graph) - set(new)):
            new[name] = self._own(name, self._taken)
        rename(graph, new)
        for node in graph.node:
            if node.name not in self._nodes:
                node.name = self._own(node.name, self._nodes)

    def _own(self, name: str, taken: set[str]) -> str:
        parts = re.match(r"(T\d+T)(.*)", name)
        if parts is not None and parts[1] in self._back:
            name = fresh(self._back[parts[1]] + parts[2], taken)
            taken.add(name)
        return name


def _copy(model: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy
