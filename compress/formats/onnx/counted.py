"""An ONNX graph as its work and weights are counted: calls written out, constants as weights, all of it read."""

from __future__ import annotations

from pathlib import Path

from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, helper

from compress.formats.onnx.dense import written_dense
from compress.formats.onnx.functions import written_out
from compress.formats.onnx.outline import outline
from compress.formats.onnx.scope import captured, drop_dead, fresh, inner_bodies, names_in, rename

__all__ = ["counted", "counted_graph"]

_LISTS = {"value_float": TensorProto.FLOAT, "value_int": TensorProto.INT64}


def counted_graph(path: Path) -> ModelProto:
    """The outline of a file: weights are initializers, whichever way the file holds them, and each is read.

    Tensors keep their names, but for those in bodies that have the name of another one.
    """
    return counted(outline(path), values=False)


def counted(model: ModelProto, *, values: bool) -> ModelProto:
    """The same of a model, which may be changed.

    Args:
        model: of a file, or its outline.
        values: whether its weights have some.
    """
    model = written_out(model)
    written_dense(model, values=values)
    for graph in (model.graph, *inner_bodies(model.graph)):
        _weights_from_nodes(graph)
    for graph in (model.graph, *inner_bodies(model.graph)):
        drop_dead(graph)
    taken = names_in(model.graph)
    for number, body in enumerate(inner_bodies(model.graph)):
        made = {name for node in body.node for name in node.output} | {value.name for value in body.input}
        made |= {tensor.name for tensor in body.initializer}
        names = {name: fresh(f"{name}/{number}", taken) for name in made - {""}}
        rename(body, names)
        taken |= {*names.values()}
    return model


def _weights_from_nodes(graph: GraphProto) -> None:
    """Constant nodes become initializers, and Identity of an initializer that initializer, in place."""
    outputs = {value.name for value in graph.output}
    weights = {tensor.name for tensor in graph.initializer}
    same: dict[str, str] = {}
    kept = []
    for node in graph.node:
        given = same.get(node.input[0], node.input[0]) if len(node.input) else ""
        if node.op_type == "Identity" and given in weights and node.output[0] not in outputs:
            same[node.output[0]] = given
            continue
        tensor = _value(node.attribute[0], node.output[0]) if node.op_type == "Constant" and node.attribute else None
        if tensor is None or node.output[0] in outputs:
            kept.append(node)
            continue
        graph.initializer.append(tensor)
        weights.add(tensor.name)
    del graph.node[:]
    graph.node.extend(kept)
    for node in graph.node:
        node.input[:] = [same.get(name, name) for name in node.input]
        if same.keys() & captured(node):
            for attribute in node.attribute:
                for body in (attribute.g, *attribute.graphs):
                    rename(body, same)


def _value(attribute: AttributeProto, name: str) -> TensorProto | None:
    """What a Constant gives; None for texts and sparse values, which are no weights."""
    kind = _LISTS.get(attribute.name.removesuffix("s"))
    if attribute.name == "value":
        made = TensorProto()
        made.CopyFrom(attribute.t)
        made.name = name
        return made
    if kind is None:
        return None
    given = helper.get_attribute_value(attribute)
    return helper.make_tensor(
        name,
        kind,
        [len(given)] if attribute.name.endswith("s") else [],
        list(given) if attribute.name.endswith("s") else [given],
    )
