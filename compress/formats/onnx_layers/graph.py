"""An ONNX graph becomes a torch.fx graph, node by node, whose products with weights are layers of torch.nn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import fx

from compress.errors import StageError, first_line
from compress.formats.native.graph import GraphError, from_data, to_data
from compress.formats.onnx.scope import bodies, drop_dead, in_order
from compress.formats.onnx_layers.layers import HANDLERS
from compress.formats.onnx_layers.static import static_shapes
from compress.formats.onnx_layers.values import Graph, Live, NotTakenBackError
from compress.model.inputs import Arrays
from compress.storage.shortages import raise_shortage

__all__ = ["NOT_PRUNED", "layers_of"]

NOT_PRUNED = (
    "without --prune and --finetune the file goes through as it is, INT8 too; to prune or train it, start from the "
    "torch model it was made of, where there is one"
)


def layers_of(model: ModelProto, inputs: Arrays, source: str) -> fx.GraphModule:
    """The graph as a module in evaluation mode, that takes its inputs by position and gives a dict of its outputs.

    Names of the file are names of layers where they are plain ones, and never code.

    Args:
        model: of opset 13 or newer, its weights inside, without functions; what no output comes from is dropped.
        inputs: a sample, which tells ranks and types.
        source: names the file in errors.

    Raises:
        StageError: an operator has no form as a layer or function.
    """
    drop_dead(model.graph)
    _refuse_unknown(model, source)
    try:
        nodes = in_order(model.graph)
    except ValueError as err:
        raise StageError(f"can't take {source} back to layers", why=str(err), mend="export the model again") from err
    known = static_shapes(model)
    grown = Graph()
    held: dict[str, Any] = {"": None}
    for tensor in model.graph.initializer:
        held[tensor.name] = _constant(grown, tensor, tensor.name)
    for number, value in enumerate(model.graph.input):
        if value.name not in held:
            held[value.name] = Live(grown.graph.placeholder(f"x{number}"), torch.from_numpy(inputs[value.name]))
    last = {name: at for at, node in enumerate(nodes) for name in node.input if name}
    kept = {value.name for value in model.graph.output}
    added = _added(nodes, kept)
    done: set[str] = set()
    for at, node in enumerate(nodes):
        if node.output[0] in done:
            continue
        bias, sum_of = _bias(node, added, held)
        shape = known.get(node.input[0]) if node.input else None
        made = _of(grown, node, held, source, {"outputs": len(node.output), "bias": bias, "shape": shape})
        if sum_of:
            done.add(sum_of)
            held[sum_of] = made
        parts = made if isinstance(made, list) else [made]
        for number, name in enumerate(node.output[len(parts) :], len(parts) + 1):
            if name in last or name in kept:
                raise _refused(source, node, f"its output {number}, {name!a}, is used, and has no form here")
        held |= {name: part for name, part in zip(node.output, parts, strict=False) if name}
        for name in node.input:  # samples of what is not read again
            if name and last[name] == at and name not in kept:
                held.pop(name, None)
    outputs = {value.name: grown.tensor(held[value.name]) for value in model.graph.output}
    fixed = next((name for name, value in outputs.items() if not isinstance(value, Live)), None)
    if fixed is not None:
        why = f"its output {fixed!r} does not hang on any input"
        raise StageError(f"can't take {source} back to layers", why=why, mend="export the model without that output")
    grown.graph.output({name: value.node for name, value in outputs.items()})
    module = fx.GraphModule(grown.placed.root, grown.graph)
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    try:
        return from_data(to_data(module, inputs=len(inputs)))
    except GraphError as err:
        raise StageError(f"can't take {source} back to layers", why=str(err), mend=NOT_PRUNED) from err


def _added(nodes: list[NodeProto], kept: set[str]) -> dict[str, tuple[str, str]]:
    """Of each product that an addition alone reads, the other summand and the sum."""
    readers = Counter(name for node in nodes for name in node.input)
    products = {node.output[0] for node in nodes if node.op_type == "MatMul"} - kept
    return {
        name: (next(iter({*node.input} - {name}), ""), node.output[0])
        for node in nodes
        if node.op_type == "Add"
        for name in node.input
        if name in products and readers[name] == 1
    }


def _bias(
    node: NodeProto, added: Mapping[str, tuple[str, str]], held: Mapping[str, Any]
) -> tuple[torch.Tensor | None, str]:
    """The bias of a product with a matrix of the file, where what is added to it is one, and the sum's name."""
    other, sum_of = added.get(node.output[0], ("", ""))
    bias, weight = held.get(other), held.get(node.input[1]) if node.op_type == "MatMul" else None
    if not (isinstance(held.get(node.input[0]) if node.input else None, Live) and isinstance(weight, torch.Tensor)):
        return None, ""
    fits = isinstance(bias, torch.Tensor) and weight.ndim == 2 and tuple(bias.shape) == (weight.shape[1],)
    return (bias, sum_of) if fits else (None, "")


def _of(grown: Graph, node: NodeProto, held: Mapping[str, Any], source: str, more: Mapping[str, Any]) -> Any:
    """What a node gives.

    Args:
        more: what a handler may want to know besides the node's own attributes.

    Raises:
        StageError: it has no form here, or does not run on the sample.
    """
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute} | dict(more)
    try:
        if node.op_type == "Constant":
            return _value(grown, node)
        return HANDLERS[node.op_type](grown, [held[name] for name in node.input], attributes)
    except NotTakenBackError as err:
        raise _refused(source, node, str(err)) from err
    except Exception as err:  # a graph is anybody's
        raise_shortage(err)
        raise _refused(source, node, f"as a function of torch it fails: {first_line(err)[:150]}") from err


def _value(grown: Graph, node: NodeProto) -> Any:
    (attribute,) = node.attribute
    if attribute.name == "value":
        return _constant(grown, attribute.t, node.output[0])
    if attribute.name in ("value_float", "value_floats", "value_int", "value_ints"):
        whole = attribute.name.startswith("value_int")
        found = helper.get_attribute_value(attribute)
        return grown.named(torch.tensor(found, dtype=torch.int64 if whole else torch.float32), node.output[0])
    raise NotTakenBackError(f"its value is a {attribute.name}")


def _constant(grown: Graph, tensor: TensorProto, name: str) -> torch.Tensor:
    return grown.named(torch.from_numpy(numpy_helper.to_array(tensor).copy()), name)


def _refuse_unknown(model: ModelProto, source: str) -> None:
    """Refuse operators that nothing here knows, before any of the graph is computed."""
    unknown = [
        node
        for node in model.graph.node
        if node.domain not in ("", "ai.onnx") or bodies(node) or node.op_type not in {*HANDLERS, "Constant"}
    ]
    if unknown:
        kinds = Counter(f"{node.domain}.{node.op_type}".lstrip(".") for node in unknown)
        some = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5))
        raise _refused(source, unknown[0], f"there is no layer or function for it here; of such nodes it has {some}")


def _refused(source: str, node: NodeProto, why: str) -> StageError:
    return StageError(
        f"can't take {source} back to layers, to prune or train it: {node.op_type} at {node.name!a}",
        why=why,
        mend=NOT_PRUNED,
    )
