"""Operators that are newer than the opset that is written, by the bodies that ONNX itself gives them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TypeProto, helper, shape_inference

from compress.formats.onnx.counted import written_out
from compress.formats.onnx.scope import bodies, opset_of
from compress.formats.onnx_layers.static import bare

__all__ = ["by_bodies", "newly"]

DOMAIN = "compress.bodies"
ROUNDS = 4  # bodies may call what is newer, too


def newly(kind: str, opset: int) -> bool:
    """Whether there is no such operator in that opset of ONNX's own domain."""
    try:
        onnx.defs.get_schema(kind, opset)
    except onnx.defs.SchemaError:
        return True
    return False


def by_bodies(model: ModelProto, opset: int, leave: Collection[str] = (), *, changed: bool = False) -> None:
    """Put the bodies of nodes that are newer than an opset in their place, inside of bodies, too; in place.

    Args:
        model: without functions, with the types of its inputs.
        opset: that it will be written in.
        leave: operators that stay in the graph itself.
        changed: of operators that have another form since, too.
    """
    for _ in range(ROUNDS if opset_of(model) > opset else 0):
        made = bare(model)
        kinds = _kinds_of(made)
        made.functions.extend(_called(made.graph, kinds, opset_of(model), opset, leave, changed, 0))
        if not made.functions:
            return
        del model.graph.node[:]
        model.graph.node.extend(written_out(made).graph.node)


def _kinds_of(made: ModelProto) -> GraphProto:
    try:
        return shape_inference.infer_shapes(made).graph
    except Exception:  # of nodes that contradict each other
        return made.graph


def _called(
    graph: GraphProto, known: GraphProto, have: int, opset: int, leave: Collection[str], changed: bool, count: int,
    around: Mapping[str, TypeProto] | None = None,
) -> list[FunctionProto]:  # fmt: skip
    """Functions that nodes of a graph call from now on in place of what is newer.

    Args:
        graph: whose nodes are changed.
        known: the same with types.
        have, opset: that it is in, and that it will be written in.
        leave, changed: of `by_bodies`.
        count: of functions that there are.
        around: types of the tensors around it.
    """
    kinds = dict(around or {})
    kinds |= {each.name: each.type for each in (*known.input, *known.value_info, *known.output)}
    kinds |= {each.name: helper.make_tensor_type_proto(each.data_type, each.dims) for each in known.initializer}
    found: list[FunctionProto] = []
    for node, typed in zip(graph.node, known.node, strict=True):
        for body, inner in zip(bodies(node), bodies(typed), strict=True):
            found += _called(body, inner, have, opset, (), changed, count + len(found), kinds)
        if node.domain not in ("", "ai.onnx") or node.op_type in leave or newly(node.op_type, have):
            continue
        schema = onnx.defs.get_schema(node.op_type, have)
        if not (newly(node.op_type, opset) or (changed and schema.since_version > opset)):
            continue
        function = _body(node, schema, kinds, have)
        if function is None:
            continue
        function.domain, function.name = DOMAIN, f"{node.op_type}_{count + len(found)}"
        del function.opset_import[:]
        function.opset_import.append(helper.make_opsetid("", have))
        for at, inside in enumerate(function.node):
            inside.name = f"{node.name or node.output[0]}/{at}"
        said = {each.name for each in node.attribute}
        node.attribute.extend(
            value.default_value
            for name, value in schema.attributes.items()
            if name in function.attribute and name not in said and value.default_value.name
        )
        node.domain, node.op_type = function.domain, function.name
        found.append(function)
    return found


def _body(
    node: NodeProto, schema: onnx.defs.OpSchema, kinds: Mapping[str, TypeProto], have: int
) -> FunctionProto | None:
    """What ONNX says that a node does, by other operators; None where it does not, or its types are not known."""
    if any(name and name not in kinds for name in node.input):
        return None
    if schema.has_function:
        return FunctionProto.FromString(schema.function_body.SerializeToString())
    versions = [each for each in schema.context_dependent_function_opset_versions if each <= have]
    if not versions:
        return None
    types = [kinds[name].SerializeToString() if name else b"" for name in node.input]
    data = schema.get_context_dependent_function_with_opset_version(max(versions), node.SerializeToString(), types)
    return FunctionProto.FromString(data) if data else None
