"""An ONNX graph as TensorRT fuses it: what each node computes in, and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
from onnx import NodeProto, TensorProto

from compress.errors import StageError
from compress.formats.onnx.scope import in_order
from compress.quantize.place_qdq import PASSING, WEIGHTED

__all__ = ["HALVES", "Layer", "View", "name_of"]

TYPES = {
    TensorProto.FLOAT: "FP32", TensorProto.FLOAT16: "FP16", TensorProto.BFLOAT16: "BF16", TensorProto.INT8: "INT8",
    TensorProto.INT32: "INT32", TensorProto.INT64: "INT64", TensorProto.BOOL: "BOOL", TensorProto.UINT8: "UINT8",
    TensorProto.DOUBLE: "FP64", TensorProto.STRING: "STRING",
}  # fmt: skip
HALVES = ("FP16", "BF16")


@dataclass(frozen=True)
class Layer:
    """One node.

    Attributes:
        name, kind: of the node.
        precision: what it computes in: "INT8", "FP16", "BF16", "FP32" or another type.
        gives: the type of what it gives, once TensorRT has fused what it can.
        why: in words.
    """

    name: str
    kind: str
    precision: str
    gives: str
    why: str


class View:
    """The graph, looked at from each tensor."""

    def __init__(self, model: onnx.ModelProto, inferred: onnx.ModelProto) -> None:
        graph = model.graph
        self.nodes: Sequence[NodeProto] = list(graph.node)
        self.weights = {t.name: t for t in graph.initializer}
        self.makers = {name: node for node in graph.node for name in node.output}
        self.takers: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self.takers.setdefault(name, []).append(node)
        values = (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output)
        self.kinds = {v.name: v.type.tensor_type.elem_type for v in values}
        self.kinds |= {t.name: t.data_type for t in graph.initializer}
        self.by_name = {name_of(node): node for node in graph.node}
        self._next: dict[str, bool] = {}
        try:
            order = in_order(graph)
        except ValueError as err:
            mend = "export it again: no runtime takes such a file"
            raise StageError("can't look at this graph", why=str(err), mend=mend) from err
        for node in reversed(order):  # from the end, so that what follows a tensor is known
            for name in node.output:
                self._next[name] = self._quantized_next(name)

    def kind(self, name: str) -> str:
        number = self.kinds.get(name, 0)
        return TYPES.get(number) or (TensorProto.DataType.Name(number) if number else "?")

    def restored(self, name: str) -> bool:
        """Whether a tensor comes from INT8."""
        return name in self.makers and self.makers[name].op_type == "DequantizeLinear"

    def quantized_next(self, name: str) -> bool:
        """Whether a tensor becomes INT8 again behind nothing but what is fused."""
        return self._next[name] if name in self._next else self._quantized_next(name)

    def _quantized_next(self, name: str) -> bool:
        takers = self.takers.get(name, [])
        if not takers:
            return False
        return all(
            taker.op_type == "QuantizeLinear"
            or (taker.op_type in (*PASSING, "Cast") and self.quantized_next(taker.output[0]))
            or self.fused_addition(taker, name)
            for taker in takers
        )

    def fused_addition(self, node: NodeProto, name: str) -> bool:
        """Whether an addition to the tensor takes its other side in INT8, and gives INT8."""
        if node.op_type != "Add":
            return False
        others = [other for other in node.input if other != name]
        return all(self.restored(other) for other in others) and self.quantized_next(node.output[0])

    def behind(self, node: NodeProto) -> NodeProto | None:
        """The INT8 layer that TensorRT fuses this pointwise node into."""
        while node.op_type in (*PASSING, "Add", "Cast"):
            makers = [self.makers[name] for name in node.input if name in self.makers]
            before = [maker for maker in makers if maker.op_type != "DequantizeLinear"]
            if len(before) != 1 or len(self.takers.get(before[0].output[0], [])) != 1:
                return None
            node = before[0]
            if self.in_int8(node):
                return node
        return None

    def in_int8(self, node: NodeProto) -> bool:
        """Whether its products are of 8-bit numbers, or, without weights, all that goes in and out is INT8."""
        floats = [name for name in node.input if name and self.kind(name) in ("FP32", *HALVES)]
        if node.op_type in WEIGHTED:
            return len(node.input) > 1 and self.restored(node.input[0]) and self.restored(node.input[1])
        return bool(floats) and all(map(self.restored, floats)) and self.quantized_next(node.output[0])

    def layer(self, node: NodeProto) -> Layer:
        name, given = name_of(node), self.kind(node.output[0])
        out = "INT8" if self.quantized_next(node.output[0]) else given
        if self.in_int8(node):
            return Layer(name, node.op_type, "INT8", out, "all that it takes is restored from INT8")
        behind = self.behind(node) if node.op_type in (*PASSING, "Add") else None
        if behind is not None:
            return Layer(name, node.op_type, "INT8", out, f"fused into {name_of(behind)}")
        if node.op_type in WEIGHTED and len(node.input) > 1:
            sides = [side for side, at in (("input", 0), ("weight", 1)) if self.restored(node.input[at])]
            weight = node.input[1] in self.weights or self.restored(node.input[1])
            why = f"only its {sides[0]} is INT8" if sides else "nothing that it takes is INT8"
            why = why if weight else "a product of two activations"
        else:
            why = f"the graph gives {given}"
        return Layer(name, node.op_type, given, out if out == given else given, why)


def name_of(node: NodeProto) -> str:
    """A node's name, or its output's where it has none."""
    return str(node.name or node.output[0])
