"""Operators that are newer than the opset that is written, by the bodies that ONNX itself gives them."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TypeProto, helper, shape_inference

from compress.console.wording import counted
from compress.formats.onnx.domains import STANDARD
from compress.formats.onnx.functions import written_out
from compress.formats.onnx.scope import bodies, opset_of
from compress.formats.onnx_layers.static import bare
from compress.formats.onnx_layers.values import NotTakenBackError

__all__ = ["altered", "by_bodies", "newly", "typed", "types_in"]

DOMAIN = "compress.bodies"
ROUNDS = 4  # bodies may call what is newer, too
MOST_NODES = 1 << 16  # of all bodies that are put into a graph at once; one of Attention has some 80


def newly(kind: str, opset: int) -> bool:
    """Whether there is no such operator in that opset of ONNX's own domain."""
    try:
        onnx.defs.get_schema(kind, opset)
    except onnx.defs.SchemaError:
        return True
    return False


@functools.cache
def altered(kind: str, have: int, opset: int) -> bool:
    """Whether an operator of ONNX's own is another in an opset than in the one that it is in: by more than the types
    that it takes, of which loading a file tells.

    Args:
        kind: of the operator; one that ONNX does not know in its opset is a runtime's, and the same in all.
        have, opset: that it is in, and that it will be written in.
    """
    if newly(kind, have):
        return False
    if newly(kind, opset):
        return True
    one, other = onnx.defs.get_schema(kind, have), onnx.defs.get_schema(kind, opset)
    return bool(one.since_version != other.since_version and _form(one) != _form(other))


def _form(schema: onnx.defs.OpSchema) -> Any:
    attributes = {
        name: (each.type, each.required, each.default_value.SerializeToString(deterministic=True))
        for name, each in schema.attributes.items()
    }
    return attributes, [each.option for each in schema.inputs], [each.option for each in schema.outputs]


def by_bodies(model: ModelProto, opset: int, leave: Collection[str] = (), *, changed: bool = False) -> None:
    """Put the bodies of nodes that are newer than an opset in their place, inside of bodies, too; in place.

    Args:
        model: without functions, with the types of its inputs.
        opset: that it will be written in.
        leave: operators that stay in the graph itself.
        changed: of operators that are others there, too.

    Raises:
        NotTakenBackError: these bodies take too much.
    """
    for _ in range(ROUNDS if opset_of(model) > opset else 0):
        made = bare(model)
        calls = _Calls(opset_of(model), opset, changed=changed)
        calls.put_into(made.graph, typed(made), {}, leave)
        if not calls.functions:
            return
        made.functions.extend(calls.functions)
        del model.graph.node[:]
        model.graph.node.extend(written_out(made).graph.node)


def typed(model: ModelProto) -> GraphProto:
    """The graph of a model with the types of what is inside, as far as ONNX infers them."""
    try:
        return shape_inference.infer_shapes(model).graph
    except Exception:  # of nodes that contradict each other
        return model.graph


def types_in(known: GraphProto, around: Mapping[str, TypeProto]) -> dict[str, TypeProto]:
    """Types of tensors by name: of a graph, and of those around it."""
    values = (each for each in (*known.input, *known.value_info, *known.output) if each.type.WhichOneof("value"))
    tables = {each.name: helper.make_tensor_type_proto(each.data_type, each.dims) for each in known.initializer}
    return dict(around) | {each.name: each.type for each in values} | tables


class _Calls:
    """Calls of functions that have come in place of what is newer.

    Attributes:
        functions: that are called, each by one node.
    """

    def __init__(self, have: int, opset: int, *, changed: bool) -> None:
        """Start.

        Args:
            have, opset: that a model is in, and that it will be written in.
            changed: of `by_bodies`.
        """
        self.functions: list[FunctionProto] = []
        self._have, self._opset, self._changed = have, opset, changed
        self._nodes = 0

    def put_into(
        self, graph: GraphProto, known: GraphProto, around: Mapping[str, TypeProto], leave: Collection[str] = ()
    ) -> None:
        """Let nodes of a graph, and of bodies in it, call functions; in place.

        Args:
            graph: whose nodes are changed.
            known: the same with types.
            around: types of the tensors around it.
            leave: operators that stay in the graph itself.

        Raises:
            NotTakenBackError: these functions take too much.
        """
        kinds = types_in(known, around)
        for node, inferred in zip(graph.node, known.node, strict=True):
            for body, inner in zip(bodies(node), bodies(inferred), strict=True):
                self.put_into(body, inner, kinds)
            if node.domain in STANDARD and node.op_type not in leave and self._is_newer(node.op_type):
                self._call(node, kinds)

    def _is_newer(self, kind: str) -> bool:
        if newly(kind, self._have):
            return False
        return altered(kind, self._have, self._opset) if self._changed else newly(kind, self._opset)

    def _call(self, node: NodeProto, kinds: Mapping[str, TypeProto]) -> None:
        schema = onnx.defs.get_schema(node.op_type, self._have)
        function = _body(node, schema, kinds, self._have)
        if function is None:
            return
        self._nodes += len(function.node)
        if self._nodes > MOST_NODES:
            raise NotTakenBackError(
                f"opset {self._opset}, which is written, has no {node.op_type} as opset {self._have} has it, and what "
                f"ONNX writes in place of {counted(len(self.functions) + 1, 'nodes')} is over {MOST_NODES:,} nodes"
            )
        function.domain, function.name = DOMAIN, f"{node.op_type}_{len(self.functions)}"
        del function.opset_import[:]
        function.opset_import.append(helper.make_opsetid("", self._have))
        for at, inside in enumerate(function.node):
            inside.name = f"{node.name or node.output[0]}/{at}"
        said = {each.name for each in node.attribute}
        node.attribute.extend(
            value.default_value
            for name, value in schema.attributes.items()
            if name in function.attribute and name not in said and value.default_value.name
        )
        node.domain, node.op_type = function.domain, function.name
        self.functions.append(function)


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
