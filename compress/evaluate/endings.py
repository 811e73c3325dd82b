"""The last operation before an output, as far as the graph says: what it bounds, or that it bounds nothing."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Literal

from onnx import NodeProto
from torch import fx, nn

from compress.formats.onnx.outline import outline
from compress.model import OnnxModel, TorchModel
from compress.model.in_order import InOrder

__all__ = ["Ending", "ending_of", "endings_of", "unbounded_of"]

Ending = Literal["softmax", "log_softmax", "sigmoid", "normalize"]

# What moves values, or gives them another type, and does not change them.
MOVING = {
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "t",
    "contiguous", "clone", "detach", "dropout", "float", "to", "_to_copy", "alias", "rearrange",
}  # fmt: skip
MOVING_LAYERS = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout)
LAYERS: dict[type[nn.Module], Ending] = {
    nn.Softmax: "softmax", nn.Softmax2d: "softmax", nn.LogSoftmax: "log_softmax", nn.Sigmoid: "sigmoid",
}  # fmt: skip
FUNCTIONS: dict[str, Ending] = {
    "softmax": "softmax", "_softmax": "softmax", "log_softmax": "log_softmax", "_log_softmax": "log_softmax",
    "sigmoid": "sigmoid", "expit": "sigmoid", "normalize": "normalize",
}  # fmt: skip
MOVING_NODES = {"Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Dropout"}
NODES: dict[str, Ending] = {
    "Softmax": "softmax", "LogSoftmax": "log_softmax", "Sigmoid": "sigmoid", "LpNormalization": "normalize",
}  # fmt: skip
# What gives any number: an output that ends in it is no probability, whatever some samples' values are.
UNBOUNDED_LAYERS = (
    nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
UNBOUNDED = {
    "linear", "addmm", "mm", "matmul", "bmm", "baddbmm", "bilinear", "conv1d", "conv2d", "conv3d", "convolution",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
}  # fmt: skip
UNBOUNDED_NODES = {"Gemm", "MatMul", "Conv", "ConvTranspose"}
NORMS = ("norm", "vector_norm", "linalg_vector_norm", "linalg_norm")


def endings_of(model: TorchModel | OnnxModel) -> dict[str, Ending | None]:
    """The last operation before each output; see `ending_of`."""
    names = [spec.name for spec in model.signature.outputs]
    if isinstance(model, TorchModel):
        return {name: ending_of(model.module, at) for at, name in enumerate(names)}
    found = {name: node for name, (node, _) in _last_nodes(model).items()}
    return {name: NODES.get(found[name].op_type) if name in found else None for name in names}


def unbounded_of(model: TorchModel | OnnxModel) -> set[str]:
    """The outputs that end in what gives any number, a linear layer or a convolution, as far as the graph says so."""
    if isinstance(model, TorchModel):
        lasts = {spec.name: _last(model.module, at) for at, spec in enumerate(model.signature.outputs)}
        return {name for name, found in lasts.items() if found is not None and _any_number(*found)}
    return {name for name, (node, biased) in _last_nodes(model).items() if (biased or node).op_type in UNBOUNDED_NODES}


def _last_nodes(model: OnnxModel) -> dict[str, tuple[NodeProto, NodeProto | None]]:
    """The last node before each output, and, where that adds a constant, what it adds it to."""
    graph = outline(model.path).graph
    makers = {name: node for node in graph.node for name in node.output}
    found = {}
    for spec in model.signature.outputs:
        node = _maker(makers, spec.name)
        if node is not None:
            added = [maker for name in node.input if (maker := _maker(makers, name)) is not None]
            told = [each for each in added if each.op_type != "Constant"]
            found[spec.name] = node, told[0] if node.op_type == "Add" and len(told) == 1 else None
    return found


def _maker(makers: Mapping[str, NodeProto], name: str) -> NodeProto | None:
    while (maker := makers.get(name)) is not None and maker.op_type in MOVING_NODES:
        name = maker.input[0]
    return maker


def ending_of(module: nn.Module, index: int = 0) -> Ending | None:
    """The last operation before an output, where it bounds it; None without one, or where the forward can't be traced.

    Args:
        module: in evaluation mode.
        index: of the output, in the order of what the forward gives.
    """
    found = _last(module, index)
    return None if found is None else _ending(*found)


def _last(module: nn.Module, index: int) -> tuple[fx.GraphModule, fx.Node] | None:
    """The last node before an output that changes its values; None where the forward can't be traced."""
    if isinstance(module, InOrder):
        return _last(module.original, module.outputs[index])
    try:
        graph = module if isinstance(module, fx.GraphModule) else fx.symbolic_trace(module)
    except Exception:  # the user's forward: anything may come out of it
        return None
    given = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    while isinstance(given, tuple | list | dict) and len(given) == 1 and not isinstance(given, fx.Node):
        given = next(iter(given.values() if isinstance(given, dict) else given))
    if isinstance(given, tuple | list | dict):
        values = [v for v in (given.values() if isinstance(given, dict) else given) if isinstance(v, fx.Node)]
        given = values[index] if index < len(values) else None
    while isinstance(given, fx.Node) and _moves(graph, given):
        given = given.args[0] if given.args else None
    return (graph, given) if isinstance(given, fx.Node) else None


def _any_number(graph: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(graph.get_submodule(str(node.target)), UNBOUNDED_LAYERS)
    return node.op != "placeholder" and _name(node) in UNBOUNDED


def _moves(graph: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(graph.get_submodule(str(node.target)), MOVING_LAYERS)
    return _name(node) in MOVING


def _ending(graph: fx.GraphModule, node: fx.Node) -> Ending | None:
    if node.op == "call_module":
        layer = graph.get_submodule(str(node.target))
        return next((ending for kind, ending in LAYERS.items() if isinstance(layer, kind)), None)
    if node.target in (operator.truediv, "div") or _name(node) in ("div", "true_divide"):
        return "normalize" if _norm_of(node.args[1], node.args[0]) else None
    return FUNCTIONS.get(_name(node))


def _norm_of(node: Any, of: Any) -> bool:
    """Whether a node is the norm of another, bounded or moved."""
    while isinstance(node, fx.Node):
        if _name(node) in NORMS:
            return bool(node.args) and node.args[0] is of
        if _name(node) not in MOVING | {"clamp", "clamp_min", "clip", "expand", "expand_as", "add", "maximum"}:
            return False
        node = node.args[0] if node.args else None
    return False


def _name(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    packet = getattr(node.target, "overloadpacket", node.target)  # of torch.ops
    return str(getattr(packet, "__name__", ""))
