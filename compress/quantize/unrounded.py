"""Who reads what is rounded to 8 bits: nodes that compute in 8 bits, and those that they give it to. All others read
the tensor as it was.

ONNX Runtime's quantizer decides by kinds of nodes, and gives all takers of a tensor what is restored from 8 bits: a
comparison, a norm or a cast beside a layer, too.
"""

from __future__ import annotations

from collections.abc import Collection

from onnx import GraphProto, ModelProto, NodeProto
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

from compress.formats.onnx.scope import captured, drop_dead, fresh, names_in

__all__ = ["ANSWERS", "ROUNDED", "WEIGHTED", "in_float", "read_rounded", "take_unrounded"]

ROUNDED = frozenset({*QDQRegistry, *QLinearOpsRegistry})  # kinds of nodes that have Q/DQ nodes of their own on the CPU
# They tell which is larger: no scale says how exact that has to be, and no 8-bit kernel gains from it.
ANSWERS = ("ArgMax", "TopK")
WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
JOINING = ("Concat", "Where")  # one scale for what was several tensors' own


def read_rounded(reader: str, maker: str | None, eight: Collection[str]) -> bool:
    """Whether a node reads a tensor rounded: its own kernel is for 8 bits, or the maker's, which has nothing else.

    Args:
        reader: name of the node.
        maker: name of the node that gives the tensor; None for an input of the graph.
        eight: names of the nodes that compute in 8 bits.
    """
    return reader in eight or maker in eight


def in_float(graph: GraphProto, eight: Collection[str]) -> set[str]:
    """Names of the nodes without weights, of those that are to be in 8 bits, that would round what nobody else has.

    They stand between tensors that are exact and a node in float, or an output: 8 bits there would save nothing but
    their own arithmetic, and reach whatever is decided by it. Between two nodes in 8 bits they are left.

    Args:
        graph: float; its nodes in order.
        eight: names of the nodes that are to be in 8 bits.
    """
    makers = {name: node for node in graph.node for name in node.output}
    exact = {value.name: True for value in graph.input}
    for node in graph.node:
        exact |= dict.fromkeys(node.output, node.name not in eight or _could_be_exact(node, exact))
    found: set[str] = set()
    seen = {value.name for value in graph.output}
    for node in graph.node:
        seen |= captured(node) if node.name in eight else {*node.input, *captured(node)}
    waiting = list(seen)
    while waiting:
        name = waiting.pop()
        maker = makers.get(name)
        if maker is None or maker.name not in eight or maker.name in found or not exact[name]:
            continue
        found.add(maker.name)
        waiting += maker.input
    return found


def _could_be_exact(node: NodeProto, exact: dict[str, bool]) -> bool:
    """Whether a node gives what was never rounded, once it is in float itself."""
    given = [exact[name] for name in node.input if name in exact]
    if node.op_type in WEIGHTED or not given:
        return False
    return any(given) if node.op_type in JOINING else all(given)


def take_unrounded(before: ModelProto, after: ModelProto, asked: Collection[str]) -> None:
    """Give nodes that are not in 8 bits, and outputs, what was rounded for others as it was, in place.

    Args:
        before: the float graph.
        after: the quantized one, whose nodes have the names that they have there.
        asked: names of the nodes that the quantizer was to round.
    """
    graph = after.graph
    was = {node.name: node for node in before.graph.node}
    first = {name: node.name for node in before.graph.node for name in node.output}
    makers = {name: node for node in graph.node for name in node.output}
    quantized = {node.input[0] for node in graph.node if node.op_type == "QuantizeLinear"}

    def raw(name: str) -> str | None:
        """The tensor that is rounded and restored to another."""
        restored = makers.get(name)
        if restored is None or restored.op_type != "DequantizeLinear":
            return None
        rounded = makers.get(restored.input[0])
        return rounded.input[0] if rounded is not None and rounded.op_type == "QuantizeLinear" else None

    def in_8_bits(node: NodeProto) -> bool:
        gives = node.op_type in WEIGHTED or bool(quantized.intersection(node.output))
        return gives and any(raw(name) for name in node.input)

    eight = {node.name for node in graph.node if node.name in asked and in_8_bits(node)}

    def unrounded(reader: str, given: str, name: str) -> str | None:
        """What a reader of the float graph's tensor `given` is to read in place of `name`; None to leave it."""
        tensor = raw(name)
        maker = None if tensor is None else makers.get(tensor)
        if tensor is None or read_rounded(reader, None if maker is None else maker.name, eight):
            return None
        # Another maker than in the float graph stands for an activation that was drawn into its range.
        return tensor if maker is None or first.get(given) == maker.name else None

    shown = {value.name for value in graph.output}
    for node in graph.node:
        shown |= captured(node)
    changes = [
        (node, at, tensor)
        for node in graph.node
        if node.name in was
        for at, (given, name) in enumerate(zip(was[node.name].input, node.input, strict=False))
        if (tensor := unrounded(node.name, given, name)) is not None
    ]
    bare = {name: tensor for name in shown if (tensor := unrounded("", name, name)) is not None}
    for node, at, tensor in changes:
        node.input[at] = tensor
    for name, tensor in bare.items():
        _swap(graph, name, tensor)
    if changes or bare:
        drop_dead(graph)


def _swap(graph: GraphProto, restored: str, tensor: str) -> None:
    """Give a tensor the name of what is restored from it, in place, and that another."""
    names = {tensor: restored, restored: fresh(f"{restored}_DequantizeLinear_Output", names_in(graph))}
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
