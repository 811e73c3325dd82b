"""INT8 for TensorRT: Q/DQ nodes where its fusions want them, every zero-point 0.

The rules are those of NVIDIA's guide to explicit quantization ("Q/DQ Layer-Placement Recommendations"): all inputs of
weighted layers; not their outputs, so that what follows is fused; of an addition after a weighted layer, the other
input, whose type decides what the fused layer gives; and layers without weights only where INT8 comes in and goes out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from compress.formats.onnx.scope import drop_unused, fresh, names_in
from compress.quantize.onward import MOVING, PASSING, WEIGHTED, Onward
from compress.quantize.quantizer_limits import one_scale, spread_out
from compress.quantize.weights_onnx import channel_axis, rounded

__all__ = ["MOVING", "PASSING", "WEIGHTED", "place"]

POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")
SMALLEST = np.float32(1e-12)

Ranges = Mapping[str, tuple[float, float]]


def place(model: onnx.ModelProto, ranges: Ranges, exclude: Collection[str] = ()) -> None:
    """Add Q/DQ nodes in place; weights become 8-bit numbers with a scale for each output channel, biases stay float.

    Each tensor is quantized once, and restored for each layer that takes it: what one of them computes in is then no
    matter to the others.

    Args:
        model: float32, folded, its shapes inferred.
        ranges: (lowest, highest) of each activation.
        exclude: names of nodes that stay in float.
    """
    graph = model.graph
    plan = _Plan(graph, ranges, exclude)
    names = _Names(graph)
    scales = plan.scales()
    weights = {tensor.name: tensor for tensor in graph.initializer}
    zero = names.of("int8_zero")
    made: dict[str, TensorProto] = {zero: numpy_helper.from_array(np.int8(0), zero)}
    quantized: set[str] = set()
    nodes: list[NodeProto] = []
    for node in graph.node:
        for at in plan.taken.get(id(node), ()):
            name = node.input[at]
            restored = names.of(f"{node.name or node.output[0]}_input{at}")
            if name in weights:
                values, scale, zeros, axis = _weight(made, weights[name], node, names)
                nodes.append(_dequantize([values, scale, zeros], restored, axis))
            else:
                whole, scale = names.of(f"{name}_int8"), names.of(f"{name}_scale")
                if name not in quantized:
                    quantized.add(name)
                    made[scale] = numpy_helper.from_array(scales[name], scale)
                    nodes.append(
                        helper.make_node("QuantizeLinear", [name, scale, zero], [whole], name=f"{name}_QuantizeLinear")
                    )
                nodes.append(_dequantize([whole, scale, zero], restored, None))
            node.input[at] = restored
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(made.values())
    drop_unused(graph)


class _Names:
    """Names for new tensors that no tensor of the graph has, the same for the same wish."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._taken = names_in(graph)
        self._given: dict[str, str] = {}

    def of(self, wish: str) -> str:
        """The name wished for, or one like it."""
        if wish not in self._given:
            self._given[wish] = fresh(wish, self._taken)
            self._taken.add(self._given[wish])
        return self._given[wish]


def _dequantize(given: list[str], restored: str, axis: int | None) -> NodeProto:
    fields = {} if axis is None else {"axis": axis}
    return helper.make_node("DequantizeLinear", given, [restored], name=f"{restored}_DequantizeLinear", **fields)


def _weight(
    made: dict[str, TensorProto], tensor: TensorProto, node: NodeProto, wishes: _Names
) -> tuple[str, str, str, int | None]:
    """Names of 8-bit values, scale and zero-points, and the scale's axis; None where all share one scale."""
    values = numpy_helper.to_array(tensor)
    axis = channel_axis(node, values.ndim)
    if one_scale(node, values.ndim):
        axis = None
    parts = ("int8", "scale", "zero")
    names = tuple(wishes.of(f"{tensor.name}_{part}_{axis}") for part in parts)
    if names[0] not in made:
        whole, scale = rounded(values, axis)
        zeros = np.zeros(scale.shape, np.int8)
        for name, array in zip(names, (whole, scale, zeros), strict=True):
            made[name] = numpy_helper.from_array(array, name)
    return names[0], names[1], names[2], axis


class _Plan:
    """Which inputs of which nodes are quantized, and which tensors share a scale."""

    def __init__(self, graph: onnx.GraphProto, ranges: Ranges, exclude: Collection[str]) -> None:
        self._ranges = ranges
        fed = {value.name for value in graph.input}  # a caller may give another value: no weight
        self._weights = {t.name: t for t in graph.initializer if t.name not in fed}
        self._onward = Onward(graph)
        self._makers = {name: node for node in graph.node for name in node.output}
        values = (*graph.input, *graph.value_info, *graph.output)
        self._shapes = {v.name: _shape(v) for v in values}
        self.taken: dict[int, tuple[int, ...]] = {}
        self._tensors: dict[int, set[str]] = {}
        self._together: dict[str, str] = {}
        allowed = [node for node in self._onward.nodes if node.name not in exclude]
        for node in allowed:
            if self._weighted(node):
                self._take(node, (0, 1))
        # From the outputs on: whether a pool or an addition may be in INT8 depends on what comes after it.
        for node in reversed(allowed):
            if at := self._unweighted(node):
                self._take(node, at)

    def _take(self, node: NodeProto, at: tuple[int, ...]) -> None:
        self.taken[id(node)] = at
        self._tensors[id(node)] = {node.input[place] for place in at}

    def scales(self) -> dict[str, np.ndarray[tuple[()], np.dtype[np.float32]]]:
        """A scale for each activation, symmetric; tensors that are moved or joined without a change share theirs."""
        groups: dict[str, float] = {}
        for name, (low, high) in self._ranges.items():
            root = self._root(name)
            groups[root] = max(groups.get(root, 0.0), abs(low), abs(high))
        # What was 0 throughout has no range: any scale holds it, and one of 1 does not silence what comes later.
        reach = {root: size or 127.0 for root, size in groups.items()}
        return {
            name: np.maximum(np.float32(reach[self._root(name)] / 127), SMALLEST).reshape(()) for name in self._ranges
        }

    def _weighted(self, node: NodeProto) -> bool:
        if node.op_type not in WEIGHTED or node.input[0] not in self._ranges:
            return False
        tensor = self._weights.get(node.input[1])
        if tensor is None or tensor.data_type != TensorProto.FLOAT or len(tensor.dims) < 2 or 0 in tensor.dims:
            return False
        if not np.isfinite(numpy_helper.to_array(tensor)).all():
            return False
        return not any(a.name == "transA" and a.i for a in node.attribute)

    def _unweighted(self, node: NodeProto) -> tuple[int, ...]:
        """Inputs to quantize of a node without weights."""
        pools = (node.op_type in POOLS and not spread_out(node)) or self._spatial_mean(node)
        if not (pools or node.op_type in ("Add", "Concat")):
            return ()
        if not self._onward.stays(node, self._tensors, self._share):
            return ()
        activations = tuple(at for at, name in enumerate(node.input) if name in self._ranges)
        if len(activations) != len(node.input) and not pools:
            return ()
        if node.op_type == "Add":
            return self._addition(node)
        if node.op_type in ("MaxPool", "GlobalMaxPool", "Concat"):
            for name in node.input:
                self._share(name, node.output[0])
        return activations

    def _spatial_mean(self, node: NodeProto) -> bool:
        """Whether it is a global average pooling, as torch's exporter writes it."""
        dims = len(self._shapes.get(node.input[0], ())) if node.input else 0
        axes = self._weights.get(node.input[1]) if node.op_type == "ReduceMean" and len(node.input) > 1 else None
        if axes is None or dims < 3:
            return False
        return sorted(int(axis) % dims for axis in numpy_helper.to_array(axes).ravel()) == list(range(2, dims))

    def _addition(self, node: NodeProto) -> tuple[int, ...]:
        """Both inputs; or, after a weighted layer that is in INT8, only the other: the addition is fused into it."""
        left, right = node.input
        if self._shapes.get(left, ()) != self._shapes.get(right, (None,)):
            return ()
        fused = [at for at, name in enumerate(node.input) if self._fuses(name)]
        if len(fused) == 2:  # the shortcut is the side with fewer layers
            fused = [max(fused, key=lambda at: self._onward.depths[node.input[at]])]
        return tuple(at for at in (0, 1) if at not in fused)

    def _fuses(self, name: str) -> bool:
        maker = self._makers.get(name)
        alone = len(self._onward.takers[name]) == 1 and name not in self._onward.shown
        return maker is not None and alone and maker.op_type in WEIGHTED and id(maker) in self.taken

    def _share(self, one: str, other: str) -> None:
        self._together[self._root(one)] = self._root(other)

    def _root(self, name: str) -> str:
        while (above := self._together.get(name, name)) != name:
            name = above
        return name


def _shape(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)
