"""An ONNX graph in another opset, where each of its operators does what it did, in bodies of If and Loop, too."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, version_converter

from compress.console.wording import counted
from compress.errors import first_line
from compress.formats.onnx.domains import STANDARD, named_once
from compress.formats.onnx.scope import bodies, fresh, inner_names, names_in, opset_of, rename
from compress.formats.onnx_layers.newer import altered, by_bodies, newly, typed, types_in
from compress.formats.onnx_layers.static import SMALL, bare
from compress.formats.onnx_layers.values import NotTakenBackError
from compress.storage.shortages import raise_shortage

__all__ = ["in_opset"]

MOST_FORMS = 1000  # of nodes that ONNX's converter is asked about, some 12 ms each


def in_opset(model: ModelProto, opset: int) -> ModelProto:
    """A model in another opset.

    Nodes that are the same there, in all but the types that they may take, stay as they are; others are written by the
    bodies that ONNX gives for them, or as its converter writes them.

    A sample tells nothing of the branch that it does not take: what an operator does there is told by its form.

    Args:
        model: without functions, with the types of its inputs.
        opset: that it will be written in.

    Raises:
        NotTakenBackError: one of its operators has no such form there that ONNX tells of.
    """
    found = ModelProto.FromString(model.SerializeToString())
    named_once(found)
    have = opset_of(found)
    by_bodies(found, opset, changed=True)
    if have != opset:
        known = bare(found)
        _Conversion(have, opset, found).convert(found.graph, typed(known), {}, {})
    for entry in found.opset_import:
        if entry.domain in STANDARD:
            entry.version = opset
    return found


class _Conversion:
    """Node by node, as ONNX's converter takes no graph in which one has a body."""

    def __init__(self, have: int, opset: int, model: ModelProto) -> None:
        """Start.

        Args:
            have, opset: that it is in, and that it will be written in.
            model: whose names are taken.
        """
        self._have, self._opset, self._ir = have, opset, model.ir_version
        self._taken = names_in(model.graph) | inner_names(model.graph)
        self._kept: set[tuple[bytes, ...]] = set()  # forms of nodes that the converter, which takes long, leaves alone
        self._asked: set[bytes] = set()  # models of one node that it was given

    def convert(
        self,
        graph: GraphProto,
        known: GraphProto,
        around: Mapping[str, TypeProto],
        tables_around: Mapping[str, TensorProto],
    ) -> None:
        """Nodes of a graph, and of bodies in it, that are others in the other opset; in place.

        Args:
            graph: whose nodes are changed.
            known: the same with types.
            around: types of the tensors around it.
            tables_around: small constants among these.

        Raises:
            NotTakenBackError: one has no form there.
        """
        kinds = types_in(known, around)
        own = {name for node in graph.node for name in node.output} | {value.name for value in graph.input}
        tables = {name: each for name, each in tables_around.items() if name not in own}
        tables |= {each.name: each for each in graph.initializer if each.ByteSize() <= SMALL}
        nodes: list[NodeProto] = []
        for node, inferred in zip(graph.node, known.node, strict=True):
            for body, inner in zip(bodies(node), bodies(inferred), strict=True):
                self.convert(body, inner, kinds, tables)
            standard = node.domain in STANDARD and not bodies(node)
            if not (standard and altered(node.op_type, self._have, self._opset)):
                nodes.append(node)
                continue
            form = _form(node, kinds)
            made = None if form in self._kept else self._made(node, kinds, tables)
            if made is None or _is(made, node):
                self._refuse_unknown(node)
                self._kept.add(form)
                nodes.append(node)
                continue
            for each in made.node:
                self._refuse_unknown(each)
            nodes += made.node
            graph.initializer.extend(each for each in made.initializer if each.name not in tables)
        del graph.node[:]
        graph.node.extend(nodes)

    def _made(self, node: NodeProto, kinds: Mapping[str, TypeProto], tables: Mapping[str, TensorProto]) -> GraphProto:
        """What the converter makes of a node: asked once for all that are alike but for names."""
        names = [name for name in dict.fromkeys(node.input) if name]
        made_names = [name for name in node.output if name]
        plain = {name: f"in{at}" for at, name in enumerate(names)} | {
            name: f"out{at}" for at, name in enumerate(made_names)
        }
        one = NodeProto(op_type=node.op_type, attribute=node.attribute)
        one.input.extend(plain.get(name, "") for name in node.input)
        one.output.extend(plain.get(name, "") for name in node.output)
        whole = helper.make_model(
            helper.make_graph(
                [one], "one",
                [_value(name, plain[name], kinds) for name in names if name not in tables],
                [_value(name, plain[name], kinds) for name in made_names],
                [_named(tables[name], plain[name]) for name in names if name in tables],
            ), opset_imports=[helper.make_opsetid("", self._have)], ir_version=self._ir,
        )  # fmt: skip
        made = self._converted(whole, node)
        self._without_defaults(made, node)
        names_of = {other: name for name, other in plain.items()}
        for name in sorted(names_in(made) - {*names_of}):
            names_of[name] = fresh(f"{node.output[0]}/{name}", self._taken)
            self._taken.add(names_of[name])
        rename(made, names_of)
        for each in made.node:
            each.name = node.name if each.op_type == node.op_type else each.name
        return made

    def _converted(self, whole: ModelProto, node: NodeProto) -> GraphProto:
        """A model of one node in the other opset."""
        data = whole.SerializeToString(deterministic=True)
        self._asked.add(data)
        if len(self._asked) > MOST_FORMS:
            raise NotTakenBackError(
                f"over {counted(MOST_FORMS, 'different nodes')} of it are others in opset {self._opset}, which is "
                f"written, than in opset {self._have}, and would be converted one by one"
            )
        try:
            return GraphProto.FromString(_by_converter(data, self._opset))
        except Exception as err:  # of its C++, without a common base
            raise_shortage(err)
            told = first_line(err).rpartition(" failed: ")[2]  # behind its own file and line
            raise NotTakenBackError(
                f"opset {self._opset}, which is written, has no {node.op_type} as opset {self._have} has it, and "
                f"ONNX can't write it by others: {told[:100]}"
            ) from err

    def _refuse_unknown(self, node: NodeProto) -> None:
        """Leave out attributes that are not there in the other opset, in place, where they say what holds anyway.

        Raises:
            NotTakenBackError: one says something else.
        """
        if node.domain not in STANDARD or newly(node.op_type, self._opset):
            return
        known = onnx.defs.get_schema(node.op_type, self._opset).attributes
        defaults = {} if newly(node.op_type, self._have) else onnx.defs.get_schema(node.op_type, self._have).attributes
        for at in reversed(range(len(node.attribute))):
            each = node.attribute[at]
            if each.name in known:
                continue
            if not _is_default(each, defaults.get(each.name)):
                raise NotTakenBackError(
                    f"opset {self._opset}, which is written, has no {node.op_type} with {each.name!r}, as opset "
                    f"{self._have} has it"
                )
            del node.attribute[at]

    def _without_defaults(self, made: GraphProto, node: NodeProto) -> None:
        """Leave out what the converter writes, and the node did not say, where it holds anyway."""
        said = {each.name for each in node.attribute}
        for each in made.node:
            if each.op_type != node.op_type:
                continue
            defaults = onnx.defs.get_schema(each.op_type, self._opset).attributes
            kept = [a for a in each.attribute if a.name in said or not _is_default(a, defaults.get(a.name))]
            del each.attribute[:]
            each.attribute.extend(kept)


def _form(node: NodeProto, kinds: Mapping[str, TypeProto]) -> tuple[bytes, ...]:
    """What a node is, but for names; of its inputs the types."""
    copy = NodeProto(op_type=node.op_type, attribute=node.attribute)
    types = [TypeProto.FromString(kinds[name].SerializeToString()) if name in kinds else None for name in node.input]
    for each in filter(None, types):
        each.tensor_type.ClearField("shape")
    told = [b"" if each is None else each.SerializeToString(deterministic=True) for each in types]
    there = bytes(bool(name) for name in (*node.input, *node.output))
    return copy.SerializeToString(deterministic=True), there, bytes([len(node.input) % 256]), *told


def _is(made: GraphProto, node: NodeProto) -> bool:
    """Whether all that there is in a graph is a node."""
    if len(made.node) != 1:
        return False
    (one,) = made.node
    told, told_too = ({a.name: a.SerializeToString(deterministic=True) for a in each.attribute} for each in (one, node))
    same = (one.op_type, [*one.input], [*one.output]) == (node.op_type, [*node.input], [*node.output])
    return same and told == told_too


def _is_default(attribute: onnx.AttributeProto, told: onnx.defs.OpSchema.Attribute | None) -> bool:
    if told is None or not told.default_value.name:
        return False
    return bool(helper.get_attribute_value(attribute) == helper.get_attribute_value(told.default_value))


@functools.lru_cache(maxsize=MOST_FORMS)
def _by_converter(model: bytes, opset: int) -> bytes:
    """The graph that ONNX's converter makes of a model."""
    made: bytes = version_converter.convert_version(ModelProto.FromString(model), opset).graph.SerializeToString()
    return made


def _value(name: str, plain: str, kinds: Mapping[str, TypeProto]) -> ValueInfoProto:
    """An input or output under a plain name, without names of its sizes; of a type that is not known, any."""
    if name not in kinds:
        return helper.make_tensor_value_info(plain, TensorProto.FLOAT, None)
    made = ValueInfoProto(name=plain, type=kinds[name])
    for dim in made.type.tensor_type.shape.dim if made.type.tensor_type.HasField("shape") else ():
        dim.ClearField("dim_param")
    return made


def _named(tensor: TensorProto, name: str) -> TensorProto:
    made = TensorProto()
    made.CopyFrom(tensor)
    made.name = name
    return made
