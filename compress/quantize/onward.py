"""Which nodes without weights are in 8 bits for TensorRT: those that give it to a layer, and round nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from onnx import GraphProto, NodeProto

from compress.formats.onnx.scope import captured

__all__ = ["MOVING", "PASSING", "WEIGHTED", "Onward"]

WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# What moves values and does not change them, so that a scale holds on both sides.
MOVING = ("Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze", "MaxPool", "GlobalMaxPool")
# What TensorRT fuses behind a layer, one value at a time.
POINTWISE = ("Clip", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Relu", "Selu", "Sigmoid", "Tanh")
PASSING = (*MOVING, *POINTWISE)
JOINING = ("Concat",)  # one scale for what was several tensors' own

Taken = Mapping[int, Collection[str]]  # tensors that a node takes in 8 bits, by the node's id


class Onward:
    """Where the tensors of a graph go.

    Args:
        graph: float; its nodes in order.

    Attributes:
        nodes: of the graph, as they are known by in what is taken.
        takers: of each tensor.
        depths: the most weighted layers on a way from the inputs to each tensor.
        shown: what is an output, or read in a body.
    """

    def __init__(self, graph: GraphProto) -> None:
        self.nodes = list(graph.node)
        self.takers: dict[str, list[NodeProto]] = {}
        self.depths: dict[str, int] = {}
        self.shown = {value.name for value in graph.output}
        self._stored = {tensor.name for tensor in graph.initializer}
        for node in self.nodes:
            self.shown |= captured(node)
            for name in node.input:
                self.takers.setdefault(name, []).append(node)
            before = max((self.depths.get(name, 0) for name in node.input), default=0)
            self.depths |= dict.fromkeys(node.output, before + (node.op_type in WEIGHTED))

    def stays(
        self, node: NodeProto, taken: Taken, moved: Callable[[str, str], None] = lambda _one, _other: None
    ) -> bool:
        """Whether a node without weights is in 8 bits, by what is of those after it.

        It is for a layer alone that what no layer has made may be rounded: a Tanh between them, or whatever else reads
        it in float, would have the steps of the largest of all values.

        Args:
            node: of the graph.
            taken: of the nodes after it.
            moved: is told of tensors that share a scale, as one is the other in another place.
        """
        given = [self.depths.get(name, 0) == 0 for name in node.input if name and name not in self._stored]
        exact = any(given) if node.op_type in JOINING else all(given)
        if exact and self._seen(node.output[0], taken):
            return False
        return self._goes_on(node.output[0], taken, moved)

    def idle(self, taken: dict[int, Collection[str]]) -> set[str]:
        """Names of the nodes without weights that do not stay, of those that take something; these are taken out."""
        found: set[str] = set()
        for node in reversed(self.nodes):
            if id(node) in taken and node.op_type not in WEIGHTED and not self.stays(node, taken):
                del taken[id(node)]
                found.add(node.name)
        return found

    def _goes_on(self, name: str, taken: Taken, moved: Callable[[str, str], None]) -> bool:
        """Whether a tensor comes to an INT8 layer, through nothing but what is fused or moves values."""
        for node in self.takers.get(name, ()):
            if name in taken.get(id(node), ()):
                return True
            if node.op_type in PASSING and node.input[0] == name and self._goes_on(node.output[0], taken, moved):
                if node.op_type in MOVING:
                    moved(name, node.output[0])
                return True
        return False

    def _seen(self, name: str, taken: Taken) -> bool:
        """Whether somebody reads a tensor in float, other than to move it."""
        return name in self.shown or any(
            name not in taken.get(id(node), ())
            and not (node.op_type in MOVING and node.input[0] == name and not self._seen(node.output[0], taken))
            for node in self.takers.get(name, ())
        )
