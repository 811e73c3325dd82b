"""A graph in FP16 as one in FP32 with the same inputs and outputs: they are cast at its borders."""

from __future__ import annotations

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from compress.formats.onnx.scope import fresh, inner_bodies, names_in, rename

__all__ = ["in_float32"]

HALF, SINGLE = TensorProto.FLOAT16, TensorProto.FLOAT
TYPES = ("to", "dtype")  # attributes that name an element type


def in_float32(model: ModelProto) -> int:
    """Compute in FP32 what a model computes in FP16, in place.

    Args:
        model: its weights inside.

    Returns:
        How many weights, casts and borders were FP16; 0 for a model that has none.
    """
    graph = model.graph
    given = [value.name for value in graph.input if value.type.tensor_type.elem_type == HALF]
    shown = [value.name for value in graph.output if value.type.tensor_type.elem_type == HALF]
    changed = sum(_widened(body) for body in (graph, *inner_bodies(graph)))
    taken = names_in(graph)
    inside: dict[str, str] = {}
    for name in dict.fromkeys((*given, *shown)):
        inside[name] = fresh(f"{name}_float", taken)
        taken.add(inside[name])
    rename(graph, inside)
    back = {other: name for name, other in inside.items()}
    for value in (*graph.input, *graph.output):
        if value.name in back:
            value.name = back[value.name]
            value.type.tensor_type.elem_type = HALF
    first = [_cast(name, inside[name], SINGLE) for name in given]
    last = [_cast(inside[name], name, HALF) for name in shown if name not in given]
    nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend([*first, *nodes, *last])
    return changed + len(given) + len(shown)


def _cast(source: str, target: str, kind: int) -> NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"{target}_cast", to=kind)


def _widened(graph: GraphProto) -> int:
    """Weights, constants, casts and declared types of one graph, in place; how many of the first three there were."""
    changed = 0
    for tensor in graph.initializer:
        changed += _tensor(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                changed += _tensor(attribute.t)
            elif attribute.name in TYPES and attribute.type == AttributeProto.INT and attribute.i == HALF:
                attribute.i = SINGLE
                changed += 1
    for value in (*graph.input, *graph.output, *graph.value_info):
        _type(value.type)
    return changed


def _tensor(tensor: TensorProto) -> int:
    if tensor.data_type != HALF:
        return 0
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype("float32"), tensor.name))
    return 1


def _type(kind: TypeProto) -> None:
    """Of a tensor, or of those that a sequence or an optional holds."""
    while (held := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
        kind = getattr(kind, held).elem_type
    if held == "tensor_type" and kind.tensor_type.elem_type == HALF:
        kind.tensor_type.elem_type = SINGLE
