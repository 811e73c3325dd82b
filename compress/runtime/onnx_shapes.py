"""Shapes of an ONNX file's tensors for inputs at hand: inferred, and where inference can't tell, seen in one run."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import onnx
import onnxruntime as ort
from onnx import shape_inference

from compress.formats.onnx.functions import written_out
from compress.formats.onnx.outline import outline, read_whole
from compress.formats.onnx.scope import inner_bodies
from compress.model.inputs import Arrays
from compress.model.watched import Watched
from compress.runtime.backends.bfloat16 import emulated
from compress.runtime.backends.onnxrt import is_half

__all__ = ["shapes_for"]

Shapes = dict[str, tuple[int, ...]]

LARGEST_LOOKED_INTO = 1024


def shapes_for(
    path: Path,
    inputs: Arrays,
    names: Collection[str],
    model: onnx.ModelProto | None = None,
    runs: onnx.ModelProto | None = None,
) -> Shapes:
    """The shape of each of some tensors; of those in bodies, where inference tells.

    Args:
        path: an ONNX file.
        inputs: one batch; every size follows from theirs.
        names: of tensors, weights included; one that is not there has no shape.
        model: the file's outline in another form, with tensors of the same names (`counted_graph`).
        runs: what is run to see shapes, in place of the file.
    """
    given, model = model, written_out(outline(path)) if model is None else _copy(model)
    weights = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    inner = [] if given is None else list(inner_bodies(model.graph))
    weights |= {tensor.name: tuple(tensor.dims) for body in inner for tensor in body.initializer}
    within = {name for body in inner for node in body.node for name in node.output}
    there = {name for node in model.graph.node for name in node.output} | weights.keys() | inputs.keys()
    names = [name for name in names if name in there]
    shapes = _inferred(model, inputs) | weights
    if any(name not in shapes or 0 in shapes[name] for name in names):
        shapes |= _seen(path, inputs, [name for name in names if name not in weights], runs)
    return {name: shapes[name] for name in (*names, *within) if name in shapes}


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    return made


def _inferred(model: onnx.ModelProto, inputs: Arrays) -> Shapes:
    """Shapes by tensor; 0 is an unknown dimension. The model is changed."""
    graph = model.graph
    for value in graph.input:
        if value.name in inputs:
            value.type.tensor_type.ClearField("shape")
            value.type.tensor_type.shape.dim.extend(
                onnx.TensorShapeProto.Dimension(dim_value=size) for size in inputs[value.name].shape
            )
    for value in graph.output:  # what it says of other sizes
        value.type.tensor_type.ClearField("shape")
    del graph.value_info[:]
    for body in inner_bodies(graph):
        del body.value_info[:]
        for value in body.output:
            value.type.tensor_type.ClearField("shape")
    # Inference looks into shapes and axes; weights would only be copied, several times.
    large = [tensor for tensor in graph.initializer if math.prod(tensor.dims) > LARGEST_LOOKED_INTO]
    fed = {value.name for value in graph.input}
    graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in large
        if tensor.name not in fed
    )
    kept = [tensor for tensor in graph.initializer if math.prod(tensor.dims) <= LARGEST_LOOKED_INTO]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    found = shape_inference.infer_shapes(model, data_prop=True).graph
    return {
        value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        for each in (*inner_bodies(found), found)
        for value in (*each.value_info, *each.input, *each.output)
        if value.type.tensor_type.HasField("shape")
    }


def _seen(path: Path, inputs: Arrays, names: Collection[str], runs: onnx.ModelProto | None) -> Shapes:
    """Shapes of computed tensors, from one run."""
    model = written_out(read_whole(path)) if runs is None else _copy(runs)
    if is_half(path, onnx.TensorProto.BFLOAT16):
        model = emulated(model)
    del model.graph.output[:]  # what nothing asked for is not run
    computed = [name for name in names if name not in inputs]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in computed)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    running = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = {name: tuple(values.shape) for name, values in inputs.items()}
    if not computed:
        return found
    values = Watched(path).run(running, computed, inputs)
    return found | {name: tuple(each.shape) for name, each in zip(computed, values, strict=True)}
