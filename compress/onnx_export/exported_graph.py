"""A program that torch.export gave, as a graph to train: the parameters are the network's own.

It is the network in evaluation mode: batch normalization keeps its statistics, and is folded where the exported file
has it folded (Jacob et al., CVPR 2018, section 3.2), so that weights are rounded as they are exported; nothing is
dropped out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

__all__ = ["ROOT", "fold", "graph_of"]

ROOT = "network"
aten = torch.ops.aten
# On tensors whose memory is laid out otherwise than in the export, a view can't be had.
RESHAPING = (aten.view.default, aten._unsafe_view.default)
CONVOLUTIONS = (
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.convolution.default,
    aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input,
)  # fmt: skip
TRANSPOSED = CONVOLUTIONS[4:]
NORMALIZING = (aten._native_batch_norm_legit_no_training.default,)


def graph_of(program: torch.export.ExportedProgram, root: nn.Module, outputs: tuple[str, ...]) -> fx.Graph:
    """The program's graph in a form that trains: on any device, in any layout.

    Args:
        program: with its parameters as inputs.
        root: has the network that was exported as its child `ROOT`; constants and what makes tensors are added to it.
        outputs: keys of the dict that the graph gives.
    """
    signature = program.graph_signature
    held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in held:
            made[node] = graph.create_node("get_attr", f"{ROOT}.{held[node.name]}", name=node.name)
        elif node.op == "placeholder" and node.name in signature.inputs_to_lifted_tensor_constants:
            constant = program.constants[signature.inputs_to_lifted_tensor_constants[node.name]]
            root.register_buffer(f"constant_{node.name}", constant.detach().clone())
            made[node] = graph.create_node("get_attr", f"constant_{node.name}", name=node.name)
        elif node.op == "output":
            values = [made[value] for value in node.args[0] if isinstance(value, fx.Node)]
            graph.output(dict(zip(outputs, values, strict=True)))
        else:
            made[node] = graph.node_copy(node, lambda old: made[old])
            _trainable(made[node], root)
    _once(graph)
    return graph


def _once(graph: fx.Graph) -> None:
    """What is computed twice alike is computed once, as in the file; nothing here is random."""
    seen: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        key = repr((node.target, node.args, node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def fold(graph: fx.Graph, there: Set[str]) -> None:
    """Fold normalizations into convolutions, in place, where an exported file has no tensor between the two.

    Args:
        graph: of `graph_of`.
        there: names of the file's tensors.
    """
    for node in list(graph.nodes):
        if node.target is not operator.getitem or node.args[0].target is not _normalized:
            continue
        normal = node.args[0]
        layer, mean, variance, weight, bias, eps = normal.args
        if layer.target not in CONVOLUTIONS or layer.name in there or len(layer.users) > 1:
            continue
        inputs, kernel, *rest = layer.args
        transposed, groups = _form(layer)
        with graph.inserting_before(node):
            factor = graph.call_function(_factor, (variance, weight, eps))
            folded = graph.call_function(_folded_weight, (kernel, factor, transposed, groups))
            shift = graph.call_function(_folded_bias, (rest[0] if rest else None, mean, factor, bias))
        node.target, node.args = layer.target, (inputs, folded, shift, *rest[1:])


def _form(layer: fx.Node) -> tuple[bool, int]:
    """Whether a convolution is transposed, and its groups."""
    if layer.target is aten.convolution.default:
        return bool(layer.args[6]), int(layer.args[8])  # type: ignore[arg-type]
    return layer.target in TRANSPOSED, int(layer.args[6]) if len(layer.args) > 6 else 1  # type: ignore[arg-type]


def _factor(variance: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    factor = (variance + eps).rsqrt()
    return factor if weight is None else factor * weight


def _folded_weight(kernel: torch.Tensor, factor: torch.Tensor, transposed: bool, groups: int) -> torch.Tensor:
    if not transposed:
        return kernel * factor.reshape(-1, *[1] * (kernel.ndim - 1))
    parts = kernel.reshape(groups, -1, *kernel.shape[1:])  # [groups, inputs, outputs, …]
    return (parts * factor.reshape(groups, 1, -1, *[1] * (kernel.ndim - 2))).reshape(kernel.shape)


def _folded_bias(
    before: torch.Tensor | None, mean: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    shift = (-mean if before is None else before - mean) * factor
    return shift if bias is None else shift + bias


def _trainable(node: fx.Node, root: nn.Module) -> None:
    """Forms of operators that have gradients, for other layouts and devices than the export's."""
    if node.target in RESHAPING:
        node.target = torch.reshape
    elif node.target in NORMALIZING:
        x, weight, bias, mean, variance, _, eps = node.args
        node.target, node.args = _normalized, (x, mean, variance, weight, bias, eps)
    elif node.target is aten.lstm.input:
        node.args = (*node.args[:5], 0.0, True, *node.args[7:])  # cuDNN has gradients in this mode alone
    elif node.target is aten.gru.input:
        node.args = (*node.args[:5], 0.0, True, *node.args[7:])
    if node.kwargs.get("device") is not None:
        assert callable(node.target)  # noqa: S101  what has this argument is a function
        root.add_module(f"maker_{node.name}", _Maker(node.target))
        node.op, node.target = "call_module", f"maker_{node.name}"
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "device"}


class _Maker(nn.Module):
    """A function that makes tensors, on the device that this module is on."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function
        self.register_buffer("place", torch.zeros(()), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs, device=self.get_buffer("place").device)


def _normalized(x: Any, mean: Any, variance: Any, weight: Any, bias: Any, eps: float) -> tuple[torch.Tensor]:
    return (F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps),)
