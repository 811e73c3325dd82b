"""An ONNX graph becomes a torch.fx graph, node by node, whose products with weights are layers of torch.nn."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import fx

from compress.errors import StageError, first_line
from compress.formats.native.graph import GraphError, from_data, to_data
from compress.formats.onnx.domains import STANDARD
from compress.formats.onnx.scope import bodies, captured, drop_dead, fresh, in_order, inner_names, names_in, rename
from compress.formats.onnx_layers.layers import HANDLERS
from compress.formats.onnx_layers.measured_sizes import UnprovenError, measured
from compress.formats.onnx_layers.newer import by_bodies
from compress.formats.onnx_layers.parts import UNTOLD, has_weights, no_gradient_before, part_of, read_by
from compress.formats.onnx_layers.splits import UNKNOWN, varying
from compress.formats.onnx_layers.static import static_shapes
from compress.formats.onnx_layers.values import Graph, Live, NotTakenBackError, Sizes, TooLargeError
from compress.model.inputs import Arrays
from compress.storage.shortages import raise_shortage

__all__ = ["NOT_PRUNED", "layers_of"]

NOT_PRUNED = (
    "leave out --prune and --finetune, which alone need layers: INT8 is made of the file itself; to prune or train it, "
    "start from the torch model it was made of, where there is one"
)
MOST_PARTS = 1000
DECIDED = (
    "where an input alone decides which branch is taken, give that input a value in the file (an initializer of its "
    "name), and the branch is taken back; "
)


def layers_of(
    model: ModelProto, inputs: Arrays, source: str, others: Callable[[], Sequence[Arrays]], opset: int
) -> tuple[fx.GraphModule, Mapping[str, str]]:
    """The graph as a module in evaluation mode, that takes its inputs by position and gives a dict of its outputs.

    Names of the file are names of layers where they are plain ones, and never code.

    Args:
        model: of opset 13 or newer, its weights inside, without functions; what no output comes from is dropped.
        inputs: a sample, which tells ranks and types.
        source: names the file in errors.
        others: gives samples of other sizes, which tell how large that is what parts that stay as they are give.
        opset: that the network will be written in, with what stays as it is.

    Returns:
        The module, and which nodes stay as they are in ONNX, as parts of it, each with the reason.

    Raises:
        StageError: nothing of it has a form as a layer, or what has none can't stay as it is.
    """
    drop_dead(model.graph)
    try:
        by_bodies(model, opset, HANDLERS)
    except NotTakenBackError as err:
        raise StageError(f"can't take {source} back to layers", why=str(err), mend=NOT_PRUNED) from err
    unproven: dict[str, str] = {}
    uneven: set[str] = set()
    names = [value.name for value in model.graph.input]
    elsewhere: list[list[torch.Tensor]] | None = None
    while True:
        taking = _Taking(model, source, opset, unproven, uneven)
        for number, value in enumerate(model.graph.input):
            if value.name not in taking.held:
                node = taking.grown.graph.placeholder(f"x{number}")
                taking.held[value.name] = Live(node, torch.from_numpy(inputs[value.name]))
        taking.take()
        module = taking.module()
        splits = taking.splits
        if elsewhere is None and (taking.left or splits):
            elsewhere = [[torch.from_numpy(each[name]) for name in names] for each in others()]
        if splits and (more_uneven := {splits[node.name] for node in varying(module, elsewhere or [])} - uneven):
            uneven |= more_uneven
            continue
        try:
            if taking.left:
                measured(module, [[torch.from_numpy(inputs[name]) for name in names], *(elsewhere or [])])
                no_gradient_before(module)
            return from_data(to_data(module, inputs=len(inputs))), taking.reasons
        except UnprovenError as err:  # with all behind these in ONNX, too, no size of what they give has to be known
            more = {taking.at[path]: str(err) for path in err.paths}
            if unproven.keys() >= more.keys():
                raise _refused(source, *taking.left[next(iter(more))], str(err)) from err
            unproven |= more
        except GraphError as err:
            raise StageError(f"can't take {source} back to layers", why=str(err), mend=NOT_PRUNED) from err
        except NotTakenBackError as err:
            raise _refused(source, *next(iter(taking.left.values())), str(err)) from err


class _Taking:
    """A graph on its way.

    Attributes:
        held: by name, what there is of the file's tensors.
        left: by their first output that is read, nodes that stay as they are, with the reason.
        at: by the path of a part, the name in `left` of its node.
        splits: by name, nodes that split an axis by its size in the sample, and their first output in the file.
    """

    def __init__(
        self, model: ModelProto, source: str, opset: int, unproven: Mapping[str, str], uneven: Set[str]
    ) -> None:
        """Start.

        Args:
            model: that is taken back.
            source: names the file in errors.
            opset: that the network will be written in.
            unproven: by their first output that is read, nodes that give nobody knows how much, with the reason.
            uneven: by their first output, nodes that split an axis whose size varies.
        """
        self._model, self._source, self._opset = model, source, opset
        try:
            self._nodes = in_order(model.graph)
        except ValueError as err:
            raise StageError(
                f"can't take {source} back to layers", why=str(err), mend="export the model again"
            ) from err
        self._known = static_shapes(model)
        self._kept = {value.name for value in model.graph.output}
        self.grown = Graph()
        self.held: dict[str, Any] = {"": None}
        self.left: dict[str, tuple[NodeProto, str]] = {}
        self.at: dict[str, str] = {}
        self.splits: dict[str, str] = {}
        self._unproven, self._uneven = unproven, uneven
        self._taken = names_in(model.graph) | inner_names(model.graph)
        self._readers: Counter[str] = Counter()  # how many nodes read a tensor; of those that are left
        self._unread: Counter[str] = Counter()
        self._last: list[NodeProto] = []  # that stay as they are with all that is behind them
        self._last_read: dict[str, Any] = {}
        self._made_last: set[str] = set()
        for tensor in model.graph.initializer:
            self.held[tensor.name] = _constant(self.grown, tensor, tensor.name)

    @property
    def reasons(self) -> dict[str, str]:
        return {told(node): why for node, why in self.left.values()}

    def take(self) -> None:
        """All nodes, in order."""
        waiting = self._nodes[::-1]
        self._meet(waiting)
        added = _added(self._nodes, self._kept)
        done: set[str] = set()
        while waiting:
            node = waiting.pop()
            if (branch := self._known_branch(node)) is not None:
                self._readers.subtract(read_by(node))
                self._meet(branch)
                added |= _added(branch, self._kept)
                waiting += reversed(branch)
            elif node.output[0] not in done:
                if not self._made_last.isdisjoint(read_by(node)):
                    self._put_last(node)
                else:
                    bias, sum_of = _bias(node, added, self.held)
                    made, whole = self._of(node, bias)
                    self.held |= made
                    if sum_of and whole:
                        done.add(sum_of)
                        self.held[sum_of] = made[node.output[0]]
            for name in read_by(node):
                self._unread[name] -= 1
                if not self._unread[name] and name not in self._kept:  # samples of what is not read again
                    self.held.pop(name, None)
        if self._last:
            self._take_last()

    def _meet(self, nodes: Sequence[NodeProto]) -> None:
        for node in nodes:
            self._readers.update(read_by(node))
            self._unread.update(read_by(node))

    def module(self) -> fx.GraphModule:
        """What has become of the graph."""
        grown = self.grown
        outputs = {value.name: grown.tensor(self.held[value.name]) for value in self._model.graph.output}
        fixed = next((name for name, value in outputs.items() if not isinstance(value, Live)), None)
        if fixed is not None:
            why = f"its output {fixed!r} does not hang on any input"
            mend = "export the model without that output"
            raise StageError(f"can't take {self._source} back to layers", why=why, mend=mend)
        grown.graph.output({name: value.node for name, value in outputs.items()})
        module = fx.GraphModule(grown.placed.root, grown.graph)
        module.graph.eliminate_dead_code()
        module.delete_all_unused_submodules()
        module.recompile()  # its code still calls the layers of nodes that stay as they are after all
        if self.left and not has_weights(module):
            node, why = next(iter(self.left.values()))
            raise _refused(self._source, node, why, "nothing else of it has weights")
        return module

    def _of(self, node: NodeProto, bias: torch.Tensor | None) -> tuple[dict[str, Any], bool]:
        """What a node gives, by name, and whether that is as torch does it: by the bias that is added to it, too.

        Raises:
            StageError: it has no form in torch, and can't stay as it is.
        """
        read = [name for name in node.output if name and (self._unread[name] or name in self._kept)]
        shape = self._known.get(node.input[0]) if node.input else None
        try:
            more_told = {"outputs": len(node.output), "bias": bias, "shape": shape}
            made = _of(self.grown, node, self.held, more_told | {"varies": node.output[0] in self._uneven})
            parts = made if isinstance(made, list) else [made]
            found = {name: part for name, part in zip(node.output, parts, strict=False) if name}
            for name in read:
                if name not in found:
                    number = list(node.output).index(name) + 1
                    raise NotTakenBackError(f"its output {number}, {name!a}, is used, and has no form here")
            if node.op_type == "Split" and isinstance(parts[0], Live):
                (split,) = parts[0].node.all_input_nodes
                self.splits |= {split.name: node.output[0]} if UNKNOWN in split.meta else {}
            return found, True
        except TooLargeError as err:
            raise _refused(self._source, node, str(err)) from err
        except NotTakenBackError as err:
            why = str(err)
        if (more := self._unproven.get(read[0])) is not None:
            self._put_last(node)
            self.left[read[0]] = node, f"{why}; {more}: all behind it stays, too"
            return {}, False
        if node.op_type in UNTOLD and any(_hangs_on_inputs(self.held.get(name)) for name in read_by(node)):
            self._put_last(node)
            self.left[node.output[0]] = node, why
            return {}, False

        def shared(name: str) -> bool:
            return self._readers[name] > 1

        try:
            found = part_of(self.grown, [node], self.held, read, self._model, self._opset, told(node), shared)
        except NotTakenBackError as err:
            raise _refused(self._source, node, why, f"it can't stay as it is: {err}") from err
        if any(isinstance(each, Live) for each in found.values()):
            self.left[read[0]] = node, why
            if len(self.left) > MOST_PARTS:
                more = f"over {MOST_PARTS:,} nodes of it would stay in ONNX, each with a session of ONNX Runtime"
                raise _refused(self._source, node, why, more)
            self.at[str(next(iter(found.values())).node.args[0].target)] = read[0]
        return found, False

    def _put_last(self, node: NodeProto) -> None:
        """Leave a node for the end: how much it gives hangs on values, so that all behind it stays in ONNX, too."""
        self._last.append(node)
        self._last_read |= {name: self.held[name] for name in read_by(node) if name not in self._made_last}
        self._made_last |= {*node.output} - {""}

    def _take_last(self) -> None:
        nodes, model = self._last, self._model
        wanted = [value.name for value in model.graph.output if value.name in self._made_last]
        own = Counter(itertools.chain.from_iterable(map(read_by, nodes)))

        def shared(name: str) -> bool:
            return self._readers[name] > own[name]

        try:
            self.held |= part_of(
                self.grown, nodes, self._last_read, wanted, model, self._opset, told(nodes[0]), shared, free=True
            )
        except NotTakenBackError as err:
            raise _refused(self._source, nodes[0], f"it can't stay as it is: {err}") from err

    def _known_branch(self, node: NodeProto) -> list[NodeProto] | None:
        """The nodes of the branch that an If takes whatever comes in; None if that hangs on the inputs."""
        if node.op_type != "If" or node.domain not in STANDARD:
            return None
        which = self.held.get(node.input[0])
        if not isinstance(which, torch.Tensor) or which.numel() != 1:
            return None
        branch = next(a.g for a in node.attribute if a.name == ("then_branch" if which.item() else "else_branch"))
        branch = GraphProto.FromString(branch.SerializeToString())
        inside = {name for inner in branch.node for name in inner.output} | {t.name for t in branch.initializer}
        whole = next(filter(None, node.output), node.name)
        names = {name: fresh(f"{whole}/{name}", self._taken) for name in sorted(inside - {""})}
        self._taken.update(names.values())
        rename(branch, names)
        for tensor in branch.initializer:
            self.held[tensor.name] = _constant(self.grown, tensor, tensor.name)
        out = [
            helper.make_node("Identity", [value.name], [name])
            for value, name in zip(branch.output, node.output, strict=True)
            if name
        ]
        return [*in_order(branch), *out]


def _hangs_on_inputs(value: Any) -> bool:
    return isinstance(value, Live) or (isinstance(value, Sizes) and any(isinstance(each, Live) for each in value.items))


def told(node: NodeProto) -> str:
    """A node in an error."""
    return f"{f'{node.domain}.'.lstrip('.')}{node.op_type} at {node.name!a}"


def _added(nodes: list[NodeProto], kept: set[str]) -> dict[str, tuple[str, str]]:
    """Of each product that an addition alone reads, the other summand and the sum."""
    readers = Counter(name for node in nodes for name in (*node.input, *captured(node)))
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


def _of(grown: Graph, node: NodeProto, held: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
    """What a node gives.

    Args:
        more: what a handler may want to know besides the node's own attributes.

    Raises:
        NotTakenBackError: it has no form here, or does not run on the sample.
    """
    known = node.domain in STANDARD and not bodies(node) and node.op_type in {*HANDLERS, "Constant"}
    if not known:
        raise NotTakenBackError("there is no layer or function for it here")
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute} | dict(more)
    try:
        if node.op_type == "Constant":
            return _value(grown, node)
        return HANDLERS[node.op_type](grown, [held[name] for name in node.input], attributes)
    except NotTakenBackError:
        raise
    except Exception as err:  # a graph is anybody's
        raise_shortage(err)
        raise NotTakenBackError(f"as a function of torch it fails: {first_line(err)[:150]}") from err


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


def _refused(source: str, node: NodeProto, why: str, also: str = "") -> StageError:
    return StageError(
        f"can't take {source} back to layers, to prune or train it: {told(node)}",
        why="; ".join(filter(None, (why, also))),
        mend=f"{DECIDED if node.op_type == 'If' else ''}{NOT_PRUNED}",
    )
