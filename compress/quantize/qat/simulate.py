"""A torch network that computes what its quantized export will: the same tensors rounded, for the same takers.

The network is exported, folded and quantized as it will be in the end; what that rounds is read off the file
(`int8_scheme`), and fake quantization is put there in the program that the export was made from (`torch.export`), whose
nodes have the names of the file's tensors. Its parameters are those of the network that was given.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from compress.onnx_export.exported_graph import ROOT, fold, graph_of
from compress.quantize.precision import LAYERS
from compress.quantize.qat.fake_quantize import FakeActivation, FakeBias, FakeWeight
from compress.quantize.qat.scheme import FloatGraph, Scheme, WeightPlan

__all__ = ["Simulation", "simulate"]

aten = torch.ops.aten
# Products with a gate: the gate's node in the file, and in the program.
GATED: Mapping[Any, tuple[str, Any]] = {
    aten.silu.default: ("Sigmoid", aten.sigmoid.default),
    aten.hardswish.default: ("HardSigmoid", aten.hardsigmoid.default),
}
CLOSE = 1e-4
_Edge = tuple[fx.Node, fx.Node, int | None]


@dataclass(frozen=True)
class Simulation:
    """The network with fake quantization inside.

    Attributes:
        module: gives a dict of outputs.
        activations: by name of the exported graph's tensor.
        layers: how many of those with weights are in INT8.
        missing: what is rounded in the exported file, and not here, with the layer that it is in.
    """

    module: fx.GraphModule
    activations: Mapping[str, FakeActivation]
    layers: int
    missing: tuple[str, ...]

    def ranges(self) -> dict[str, tuple[float, float]]:
        """(lowest, highest) by tensor, from which a quantizer finds the same scales."""
        return {name: fake.range() for name, fake in self.activations.items()}


def simulate(
    program: torch.export.ExportedProgram,
    network: nn.Module,
    outputs: tuple[str, ...],
    floats: FloatGraph,
    scheme: Scheme,
) -> Simulation:
    """Put fake quantization where a quantized file has it.

    Args:
        program: that the file was made from.
        network: what was exported; its parameters are those of the simulation.
        outputs: names of what the network gives.
        floats: the file before the quantization.
        scheme: what the quantization rounds.
    """
    root = nn.Module()
    root.add_module(ROOT, network)
    graph = graph_of(program, root, outputs)
    found = _Found(graph, root, floats)
    missing: list[str] = []
    constants = [(plan, found.constant(plan)) for plan in scheme.weights]
    edges = []
    for activation in scheme.activations:
        node = found.nodes.get(activation.name)
        users = None if node is None else found.users(node, activation.takers)
        if node is None or users == []:
            missing.append(activation.name)
        else:
            edges.append((activation, node, users))
    shared: dict[tuple[Any, ...], tuple[str, FakeActivation]] = {}
    activations: dict[str, FakeActivation] = {}
    for activation, node, users in edges:
        # Tensors of one scale may have to share it: moved or joined values.
        levels = (activation.scale, activation.zero, activation.low, activation.high)
        if levels not in shared:
            same = [other for other, _, _ in edges if (other.scale, other.zero, other.low, other.high) == levels]
            fake = FakeActivation(
                *levels,
                learned=all(other.learnable for other in same),
                most=min(other.most for other in same),
            )
            shared[levels] = f"activation{len(shared)}", fake
            root.add_module(*shared[levels])
        name, fake = shared[levels]
        with graph.inserting_after(node):
            rounded = graph.call_module(name, (node,))
        if users is None:
            node.replace_all_uses_with(rounded, delete_user_cb=lambda user, own=rounded: user is not own)
        for user in users or ():
            user.replace_input_with(node, rounded)
        activations[activation.name] = fake
    missing += _round_constants(graph, root, constants, activations)
    module = fx.GraphModule(root, graph)
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()
    layers = sum(edge is not None and plan.operator in LAYERS for plan, edge in constants if plan.given is None)
    return Simulation(module, activations, layers, tuple(_located(program, floats, name) for name in missing))


def _located(program: torch.export.ExportedProgram, floats: FloatGraph, told: str) -> str:
    """A tensor of the file, with the layer that it is computed in, or the nearest one that is named."""
    stacks = {node.name: node.meta.get("nn_module_stack") for node in program.graph.nodes}
    ahead, seen = [told.rsplit(" ", 1)[-1]], set[str]()
    while ahead:
        name = ahead.pop(0)
        if name in seen:
            continue
        if stack := stacks.get(name):
            layer = str(list(stack.values())[-1][0])
            return f"{told} (in {layer})" if layer else told
        seen.add(name)
        after = [str(taker.output[0]) for taker in floats.takers.get(name, ())]
        before = [str(given) for given in floats.makers[name].input] if name in floats.makers else []
        ahead += [other for other in (*after, *before) if other not in seen and other in floats.makers]
    return told


def _round_constants(
    graph: fx.Graph,
    root: nn.Module,
    constants: Sequence[tuple[WeightPlan, _Edge | None]],
    activations: Mapping[str, FakeActivation],
) -> list[str]:
    """Put weights and biases through their rounding; gives what could not be."""
    missing = [f"a constant of {plan.taker}" for plan, edge in constants if edge is None]
    weights: dict[fx.Node, tuple[fx.Node, FakeWeight]] = {}
    fake: nn.Module
    for number, (plan, edge) in enumerate(constants):
        if edge is None or plan.given is not None:
            continue
        constant, user, axis = edge
        fake = FakeWeight(axis, plan.low, plan.high, symmetric=plan.symmetric)
        weights[user] = constant, fake
        root.add_module(f"weight{number}", fake)
        with graph.inserting_before(user):
            user.replace_input_with(constant, graph.call_module(f"weight{number}", (constant,)))
    for number, (plan, edge) in enumerate(constants):
        if edge is None or plan.given is None:
            continue
        constant, user, _ = edge
        given = activations.get(plan.given)
        if given is None or user not in weights:
            missing.append(f"a bias of {plan.taker}")
            continue
        weight, of_weight = weights[user]
        root.add_module(f"bias{number}", FakeBias(given, of_weight))
        with graph.inserting_before(user):
            user.replace_input_with(constant, graph.call_module(f"bias{number}", (constant, weight)))
    return missing


class _Found:
    """Which node of the program is which tensor of the file."""

    def __init__(self, graph: fx.Graph, root: nn.Module, floats: FloatGraph) -> None:
        self._graph, self._root, self._floats = graph, root, floats
        fold(graph, floats.tensors)
        inside = "_inside"  # what the export adds to a name that it needs for an input or output
        named = {node.name: node for node in graph.nodes if node.op != "output"}
        self.nodes = {name: named[name] for name in floats.makers if name in named}
        self.nodes |= {
            name: named[name.removesuffix(inside)]
            for name in floats.makers
            if name not in named and name.endswith(inside) and name.removesuffix(inside) in named
        }
        given = [node for node in graph.nodes if node.op == "placeholder"]
        self.nodes |= dict(zip(floats.inputs, given, strict=True))
        results = next(node for node in graph.nodes if node.op == "output").args[0]
        self.nodes |= dict(zip(floats.outputs, results.values(), strict=True))
        self._open()
        self._anchors = set(self.nodes.values())
        self._constant: dict[fx.Node, bool] = {}
        for node in graph.nodes:
            fed = node.op == "get_attr" or bool(node.all_input_nodes)
            self._constant[node] = fed and all(self._constant[before] for before in node.all_input_nodes)

    def _open(self) -> None:
        """Operators that the file writes as two nodes, with a tensor between, become two here."""
        for name, node in list(self.nodes.items()):
            last = self._floats.makers.get(name)
            inner = [self._floats.makers[i] for i in last.input if i in self._floats.makers] if last else []
            kinds = {maker.op_type: str(maker.output[0]) for maker in inner}
            if last is None or node.op != "call_function":
                continue
            added = last.op_type == "Add" and "MatMul" in kinds
            added, gate = last.op_type == "Add" and "MatMul" in kinds, GATED.get(node.target)
            first: tuple[Any, Any]
            if node.target is aten.linear.default and len(node.args) == 3 and added:
                between, first = kinds["MatMul"], (aten.linear.default, node.args[:2])
                second = aten.add.Tensor, node.args[2]
            elif gate is not None and last.op_type == "Mul" and gate[0] in kinds:
                between, first = kinds[gate[0]], (gate[1], node.args)
                second = aten.mul.Tensor, node.args[0]
            else:
                continue
            if between in self.nodes:
                continue
            with self._graph.inserting_before(node):
                middle = self._graph.call_function(*first)
            node.target, node.args, node.kwargs = second[0], (middle, second[1]), {}
            self.nodes[between] = middle

    def users(self, node: fx.Node, takers: frozenset[str] | None) -> list[fx.Node] | None:
        """Those of a tensor's users that the takers are made of; None for all."""
        if takers is None:
            return None
        found: list[fx.Node] = []
        for taker in takers:
            end = self.nodes.get(self._named(taker))
            found += [] if end is None else [user for user in node.users if user in self._region(end)]
        return list(dict.fromkeys(found))

    def _named(self, tensor: str) -> str:
        """The tensor, or the next one after it that has a node of its own."""
        while tensor not in self.nodes and len(after := self._floats.takers.get(tensor, [])) == 1:
            tensor = str(after[0].output[0])
        return tensor

    def _region(self, end: fx.Node) -> set[fx.Node]:
        """A node and what it is computed by since the last tensors of the file."""
        region, ahead = {end}, [end]
        while ahead:
            for before in ahead.pop().all_input_nodes:
                if before not in region and before not in self._anchors:
                    region.add(before)
                    ahead.append(before)
        return region

    def constant(self, plan: WeightPlan) -> _Edge | None:
        """Where a constant goes in: its node, its taker, and the axis of its channels there."""
        end = self.nodes.get(self._named(plan.taker))
        if end is None:
            return None
        for user in self._region(end):
            for before in user.all_input_nodes:
                if self._constant[before] and not self._constant[user]:
                    value = self._value(before)
                    if isinstance(value, torch.Tensor) and (way := _turned(plan.values, value)) is not None:
                        axis = plan.axis
                        return before, user, 1 - axis if way and axis is not None else axis
        return None

    def _value(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self._root)
        with torch.no_grad():
            args = fx.node.map_arg(node.args, self._value)
            kwargs = fx.node.map_arg(node.kwargs, self._value)
            assert callable(node.target)  # noqa: S101  what is no attribute and no input is a function
            return node.target(*args, **kwargs)


def _turned(want: Any, value: torch.Tensor) -> bool | None:
    """Whether a constant of the file is a tensor (False) or a matrix turned round (True); None where it is neither."""
    if not value.is_floating_point() or value.numel() != want.size:
        return None
    have, want = value.detach().double().cpu().numpy(), want.astype(np.float64)
    near = CLOSE * np.abs(want).max(initial=1e-30)
    for turned, candidate in ((False, have), (True, have.T)):
        if candidate.shape == want.shape and np.abs(candidate - want).max(initial=0) <= near:
            return turned
    squeezed = [tuple(size for size in array.shape if size > 1) for array in (have, want)]
    same = squeezed[0] == squeezed[1] and np.abs(have.ravel() - want.ravel()).max(initial=0) <= near
    return False if same and len(squeezed[0]) < 2 else None
