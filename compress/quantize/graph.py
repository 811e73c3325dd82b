"""A float ONNX graph opened for changing its weights: who makes a tensor, who takes it, and how a layer is laid out."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from compress.data.dataset import Dataset
from compress.formats.onnx.scope import captured, drop_unused, name_nodes
from compress.model import Arrays
from compress.model.inputs import run_on
from compress.model.watched import Watched
from compress.onnx_export.file import save
from compress.onnx_export.tied import apart, share
from compress.quantize.calibrate import batch_for
from compress.runtime.backends.onnxrt import session
from compress.runtime.measure import cores

__all__ = ["Graph", "attribute", "observe"]

Array = np.ndarray[Any, Any]
LAYERS = ("Conv", "Gemm", "MatMul")


class Graph:
    """A file in memory; a weight that is changed is copied first where several nodes share it.

    Args:
        path: float32, folded, its shapes inferred.
    """

    def __init__(self, path: Path) -> None:
        self.model = onnx.load(path)
        name_nodes(self.model)
        apart(self.model)
        self.weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in self.model.graph.initializer}
        self.outputs = {value.name for value in self.model.graph.output}
        self.consumers: dict[str, list[NodeProto]] = {}
        for node in self.model.graph.node:
            self.outputs |= captured(node)  # what a body reads must stay as it is, like an output
            for name in node.input:
                self.consumers.setdefault(name, []).append(node)
        values = (*self.model.graph.input, *self.model.graph.value_info, *self.model.graph.output)
        self.shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}

    def layers(self) -> list[NodeProto]:
        """Conv, Gemm and MatMul nodes with a weight of their own kind, in the order of the graph."""
        return [node for node in self.model.graph.node if self.is_layer(node)]

    def is_layer(self, node: NodeProto) -> bool:
        """Whether its input 1 is a float32 weight laid out as `split` expects."""
        if node.op_type not in LAYERS or len(node.input) < 2 or node.input[1] not in self.weights:
            return False
        weight = self.weights[node.input[1]]
        if node.op_type == "Gemm":
            scales = {attribute(node, "alpha", 1.0), attribute(node, "beta", 1.0)}
            return bool(weight.dtype == np.float32 and not attribute(node, "transA", 0) and scales == {1.0})
        return bool(weight.dtype == np.float32 and (weight.ndim >= 3 if node.op_type == "Conv" else weight.ndim == 2))

    def split(self, node: NodeProto) -> Array:
        """A layer's weight as [groups, outputs, inputs, positions], all of one group; positions are a kernel's."""
        weight: Array = self.weights[node.input[1]]
        if node.op_type == "Conv":
            groups = attribute(node, "group", 1)
            return weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
        if node.op_type == "Gemm" and attribute(node, "transB", 0):
            return weight[None, :, :, None]
        return weight.T[None, :, :, None]

    def join(self, node: NodeProto, split: Array) -> None:
        """Set a layer's weight from what `split` gives."""
        before = self.weights[node.input[1]]
        if node.op_type == "Conv" or (node.op_type == "Gemm" and attribute(node, "transB", 0)):
            after = split.reshape(before.shape)
        else:
            after = split[0, :, :, 0].T
        self.set(node, 1, after)

    def bias_of(self, node: NodeProto) -> tuple[NodeProto, int] | None:
        """Where a layer's bias [outputs] is: a node and its input; None for a MatMul without one.

        A Conv's or a Gemm's may be missing: `set` then adds it.
        """
        if node.op_type != "MatMul":
            return node, 2
        takers = self.consumers.get(node.output[0], [])
        outputs = self.weights[node.input[1]].shape[1]
        if len(takers) == 1 and takers[0].op_type == "Add" and node.output[0] not in self.outputs:
            for index, name in enumerate(takers[0].input):
                if name in self.weights and self.weights[name].shape == (outputs,):
                    return takers[0], index
        return None

    def bias(self, node: NodeProto) -> Array | None:
        """A layer's bias [outputs], 0 where it is missing; None where there is no place for one."""
        outputs = self.split(node).shape[0] * self.split(node).shape[1]
        place = self.bias_of(node)
        if place is None:
            return None
        at, index = place
        if len(at.input) <= index or not at.input[index]:
            return np.zeros(outputs, np.float32)
        values = self.weights.get(at.input[index])
        if values is None or (values.size != 1 and (values.size, values.shape[-1]) != (outputs, outputs)):
            return None  # a Gemm may add a value for each row
        return np.broadcast_to(values.ravel(), (outputs,))

    def set_bias(self, node: NodeProto, values: Array) -> None:
        """Set a layer's bias [outputs]; `bias` gave one."""
        place = self.bias_of(node)
        assert place is not None  # noqa: S101  the caller has asked `bias`
        self.set(*place, values)

    def set(self, node: NodeProto, index: int, values: Array) -> None:
        """Set an input that is a weight; other nodes that share it keep theirs."""
        old = node.input[index] if len(node.input) > index else ""
        name = old
        shared = sum(list(taker.input).count(old) for taker in self.consumers.get(old, [])) > 1 or old in self.outputs
        if not old or shared:
            name = f"{node.name or node.output[0]}_{index}_own"
            while len(node.input) <= index:
                node.input.append("")
            node.input[index] = name
            self.consumers[name] = [node]
            if shared:
                self.consumers[old] = [taker for taker in self.consumers[old] if taker is not node]
        self.weights[name] = np.ascontiguousarray(values, np.float32)

    def save(self, path: Path) -> None:
        """Write the file, with the weights as they are now."""
        graph = self.model.graph
        del graph.initializer[:]
        graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in self.weights.items())
        drop_unused(graph)
        share(self.model)
        save(self.model, path)


def attribute(node: NodeProto, name: str, default: Any) -> Any:
    """An attribute's value, or the default where the node lacks it."""
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def observe(
    path: Path, names: Sequence[str], data: Dataset, *, batch: int | None = None
) -> Iterator[tuple[Arrays, int]]:
    """Tensors of a graph for each batch of the data, and of how many samples; one batch in memory at a time.

    Args:
        path: an ONNX file.
        names: inputs or computed tensors.
        data: fits its inputs.
        batch: samples at a time; None for as many as their tensors' sizes allow.
    """
    model = onnx.load(path)
    known = {value.name: value for value in (*model.graph.input, *model.graph.value_info, *model.graph.output)}
    fed = {value.name for value in model.graph.input}
    floats = {name: v for name, v in known.items() if v.type.tensor_type.elem_type == TensorProto.FLOAT}
    computed = [name for name in dict.fromkeys(names) if name not in fed]
    del model.graph.output[:]  # what nothing asked for is not run
    model.graph.output.extend(known.get(name) or onnx.ValueInfoProto(name=name) for name in computed)
    with tempfile.TemporaryDirectory() as folder:
        augmented = Path(folder) / "augmented.onnx"
        save(model, augmented)
        running, watched = session(augmented, cores()), Watched(path)
    for inputs, _ in data.batches(batch or batch_for(path, floats, data)):
        run = partial(watched.run, running, computed, inputs)
        found = dict(zip(computed, run_on(inputs, run), strict=True)) if computed else {}
        samples = len(next(iter(inputs.values())))
        yield found | {name: inputs[name] for name in names if name in fed}, samples
