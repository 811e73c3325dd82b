"""Tensors that carry a mask's infinities, from the constant that holds them to the operator that takes them away.

An attention mask is -inf where a position must not be seen, and Softmax makes exactly 0 of it. 8 bits hold no
infinity, and a range that reached to one would leave nothing for the other values: such tensors stay in float.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx
from onnx import NodeProto, TensorProto, numpy_helper

from compress.formats.onnx.domains import STANDARD

__all__ = ["Hiding", "MaskChain", "beside", "hiding", "mask_chain"]

LARGE = 1e9  # what masks are that are not infinite: -1e9, finfo.min; no weight is as large
ENDLESS = 1e38  # two masks of finfo.min, one added to the other, are -inf
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
ALL = tuple(range(64))
# By operator: at which inputs an infinity comes in that is in the output, too.
HOLDING = {
    "Add": ALL, "Sub": ALL, "Sum": ALL, "Mul": ALL, "Concat": ALL, "Div": (0,), "Neg": (0,), "Where": (1, 2),
    "Cast": (0,), "Expand": (0,), "Flatten": (0,), "Gather": (0,), "GatherElements": (0,), "GatherND": (0,),
    "Identity": (0,), "Pad": (0, 2), "Reshape": (0,), "ScatterElements": (0, 2), "ScatterND": (0, 2), "Slice": (0,),
    "Split": (0,), "Squeeze": (0,), "Tile": (0,), "Transpose": (0,), "Trilu": (0,), "Unsqueeze": (0,),
}  # fmt: skip
# The same where it is in the output only for some inputs: of a window or row that is masked whole.
CHOOSING = {
    "Clip": (0,), "GlobalMaxPool": (0,), "LogSoftmax": (0,), "Max": ALL, "MaxPool": (0,), "Min": ALL,
    "ReduceMax": (0,), "ReduceMin": (0,), "TopK": (0,),
}  # fmt: skip
# What distances and places are reckoned with.
COUNTING = {
    "Abs", "Add", "Ceil", "Clip", "Div", "Expand", "Floor", "Identity", "Log", "Max", "Min", "Mul", "Neg", "Reshape",
    "Round", "Sign", "Sqrt", "Squeeze", "Sub", "Unsqueeze", "Where",
}  # fmt: skip


@dataclass(frozen=True)
class MaskChain:
    """What was found.

    Attributes:
        holding: names of tensors that hold a mask, whatever the input is.
        infinite: names of tensors that may hold infinities of a mask, or the logarithm of a distance of 0 on its way to
            a whole number: there, an infinity is no overflow.
    """

    holding: frozenset[str]
    infinite: frozenset[str]

    @property
    def all(self) -> frozenset[str]:
        """Names of all tensors that may carry a mask."""
        return self.holding | self.infinite


def mask_chain(graph: onnx.GraphProto) -> MaskChain:
    """Follow infinite and very large constants through a graph, up to what makes finite numbers of them.

    Args:
        graph: folded, its nodes in order. Its bodies of If and Loop are not looked into.
    """
    fed = {value.name for value in graph.input}
    stored = {t.name: t for t in graph.initializer if t.name not in fed and t.data_type in FLOATS}
    largest = {"": 0.0}
    holding: set[str] = set()
    infinite: set[str] = set()
    for node in graph.node:
        reach = _made(node)
        standard = node.domain in STANDARD
        held, chosen = (kinds.get(node.op_type, ()) if standard else () for kinds in (HOLDING, CHOOSING))
        for at, name in enumerate(node.input):
            if at in held:
                if name not in largest:
                    largest[name] = _reach(stored[name]) if name in stored else 0.0
                reach = max(reach, largest[name])
            if (at in held and name in holding) or reach >= LARGE:
                holding.update(node.output)
            if ((at in held or at in chosen) and name in infinite) or reach >= ENDLESS:
                infinite.update(node.output)
        if not node.input and reach >= LARGE:
            holding.update(node.output)
            infinite.update(node.output if reach >= ENDLESS else ())
    return MaskChain(frozenset(holding), frozenset(infinite | _places(graph)))


@dataclass(frozen=True)
class Hiding:
    """What tells of which rows a mask hides all.

    Attributes:
        nodes: names of those that tell it, by a number as low as only float32 has it.
        masks: names of the tensors that they look at.
    """

    nodes: frozenset[str]
    masks: frozenset[str]


def hiding(graph: onnx.GraphProto) -> Hiding:
    """Find comparisons of a mask's largest numbers with finfo.min, as `compress.onnx_export.attention` writes them.

    Args:
        graph: folded, its nodes in order; node names are unique.
    """
    fed = {value.name for value in graph.input}
    lowest = {t.name for t in graph.initializer if t.name not in fed and t.data_type in FLOATS and _reach(t) >= ENDLESS}
    lowest |= {name for node in graph.node if _made(node) >= ENDLESS for name in node.output}
    makers = {name: node for node in graph.node for name in node.output}
    nodes: set[str] = set()
    masks: set[str] = set()
    for node in graph.node:
        if node.op_type != "Less" or node.input[1] not in lowest:
            continue
        nodes.add(node.name)
        reduced = makers.get(node.input[0])
        if reduced is not None and reduced.op_type == "ReduceMax":
            nodes.add(reduced.name)
            masks.add(reduced.input[0])
        else:
            masks.add(node.input[0])
    return Hiding(frozenset(nodes), frozenset(masks))


def _places(graph: onnx.GraphProto) -> set[str]:
    """Tensors that become whole numbers whatever way they go: places in a table (MPNet's buckets), no values."""
    users: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    given = {value.name for value in graph.output}
    found: set[str] = set()

    def whole(node: NodeProto) -> bool:
        if node.op_type == "Cast":
            return next(each.i for each in node.attribute if each.name == "to") not in FLOATS
        return node.op_type in COUNTING and found.issuperset(node.output)

    for node in reversed(graph.node):
        found.update(
            name for name in node.output if name not in given and name in users and all(map(whole, users[name]))
        )
    return found


def beside(graph: onnx.GraphProto, tensors: Collection[str]) -> list[str]:
    """Names of the nodes that make or take one of the tensors."""
    names = set(tensors)
    return [node.name for node in graph.node if names & {*node.input, *node.output}]


def _made(node: NodeProto) -> float:
    """The largest size of what a Constant or ConstantOfShape gives; 0 for others."""
    if node.op_type not in ("Constant", "ConstantOfShape"):
        return 0.0
    found = 0.0
    for attribute in node.attribute:
        if attribute.name == "value" and attribute.t.data_type in FLOATS:
            found = _reach(attribute.t)
        elif attribute.name in ("value_float", "value_floats"):
            found = max(map(abs, (attribute.f, *attribute.floats)))
    return found


def _reach(tensor: TensorProto) -> float:
    """The largest size in it, without a copy of what may be a table of embeddings."""
    values = numpy_helper.to_array(tensor)
    return max(float(values.max(initial=0)), -float(values.min(initial=0)))
