"""What torch's exporter writes around a recurrent layer, for any length of a sequence."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import NodeProto, numpy_helper

from compress.formats.onnx.scope import drop_unused, fresh, names_in

__all__ = ["free_lengths"]

RECURRENT = ("LSTM", "GRU", "RNN")
FLATTENED = [0, 0, -1]  # [length, batch, directions, hidden] → [length, batch, directions · hidden]


def free_lengths(graph: onnx.GraphProto) -> None:
    """Let what a recurrent layer gives have the length that it has, in place.

    torch.export takes the traced length for a constant behind a recurrent layer; the exporter then writes it into the
    reshape that puts the two directions side by side, and a second recurrent layer reads batches for lengths.
    """
    made = {name: node for node in graph.node for name in node.output if name}
    sizes = {tensor.name for tensor in graph.initializer if list(tensor.dims) == [3]}
    reshapes = [
        node
        for node in graph.node
        if _joins_directions(node, made) and node.input[1] in sizes  # else it is one with what a forward does next
    ]
    if not reshapes:
        return
    name = fresh("directions_joined", names_in(graph))
    graph.initializer.append(numpy_helper.from_array(np.array(FLATTENED, np.int64), name))
    for node in reshapes:
        node.input[1] = name
        del node.attribute[:]  # with allowzero, a 0 would be a size
    del graph.value_info[:]  # the shapes have the traced length, too; they are inferred anew
    drop_unused(graph)


def _joins_directions(node: NodeProto, made: dict[str, NodeProto]) -> bool:
    turned = made.get(node.input[0]) if node.op_type == "Reshape" else None
    if turned is None or turned.op_type != "Transpose":
        return False
    layer = made.get(turned.input[0])
    order = next((list(attribute.ints) for attribute in turned.attribute if attribute.name == "perm"), None)
    return (
        layer is not None
        and layer.op_type in RECURRENT
        and turned.input[0] == layer.output[0]
        and order == [0, 2, 1, 3]
        and not any(attribute.name == "layout" and attribute.i for attribute in layer.attribute)
    )
