"""What pruning leaves alone before it looks at channels: by name, and with what truly holds it.

Layers of several matrices keep their size; and a weight that a forward multiplies itself is no layer's, so that no
group of channels begins from it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Mapping

from torch import fx, nn

from compress.prune.layer_kinds import RECURRENT

__all__ = ["keeps_size", "listed", "multiplied"]

WHOLE: Mapping[type[nn.Module], str] = {
    nn.RNNCellBase: "recurrent cells keep their size: the forward passes their states on by itself",
    nn.Bilinear: "bilinear layers keep their size",
    nn.EmbeddingBag: "embedding bags keep their size",
}
MULTIPLY = ("addmm", "mm", "matmul", "bmm", "baddbmm", "linear", "einsum")
TURN = ("t", "transpose", "permute")
INSTEAD = "pruning knows weights of layers alone, such as nn.Linear with the weight transposed in its place"


def keeps_size(module: nn.Module) -> dict[str, str]:
    """Layers that lose no channel of their own, by name, with the reason."""
    uses = Counter(id(tensor) for _, tensor in module.named_parameters(remove_duplicate=False))
    found: dict[str, str] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.MultiheadAttention):
            shared = any(uses[id(tensor)] > 1 for tensor in layer.parameters())
            found[name] = f"nn.MultiheadAttention keeps its heads: {_of_attention(layer, shared=shared)}"
        elif isinstance(layer, nn.RNNBase):
            if type(layer) not in RECURRENT:
                found[name] = f"a {type(layer).__name__} may do otherwise than torch's own"
            elif layer.proj_size:
                found[name] = "recurrent layers that project their states (proj_size) keep their size"
        elif (why := next((why for kind, why in WHOLE.items() if isinstance(layer, kind)), None)) is not None:
            found[name] = why
    return found


def _of_attention(layer: nn.MultiheadAttention, *, shared: bool) -> str:
    if type(layer) is not nn.MultiheadAttention:
        return f"a {type(layer).__name__} may do otherwise than torch's own"
    if layer.bias_k is not None:
        return "it adds a learned key and value (add_bias_kv)"
    if layer.add_zero_attn:
        return "it adds a key and a value of zeros (add_zero_attn)"
    if layer.in_proj_bias is None:
        return "it has no bias (bias=False), and is taken apart with one alone"
    if shared:
        return "other layers have its weights, too"
    return "as the forward calls it, they could not be told apart, or the outputs hang on them"


def multiplied(module: nn.Module, known: Collection[str]) -> dict[str, str]:
    """Weights that the forward multiplies itself, by the module that they are of, with the reason.

    Args:
        module: a graph tells of the forward; of others, transformers' Conv1D alone is known.
        known: names of modules and parameters that can lose channels, or are told already.
    """
    found: dict[str, str] = {}
    if isinstance(module, fx.GraphModule):
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for node in module.graph.nodes:
            path = str(node.target)
            if node.op == "get_attr" and path in parameters and parameters[path].ndim >= 2:
                name = path.rpartition(".")[0] or path
                if isinstance(module.get_submodule(name) if name != path else None, nn.Embedding):
                    continue  # a table that scores are made with, too, is no layer in disguise
                by = next(filter(None, map(_multiplies, node.users)), "")
                if by and not {name, path} & set(known):
                    found[name] = f"the forward multiplies its weight itself ({by}): {INSTEAD}"
        return found
    for name, layer in module.named_modules():
        own = type(layer)
        if own.__name__ == "Conv1D" and own.__module__.startswith("transformers.") and name not in known:
            found[name] = f"transformers' Conv1D multiplies its weight itself (addmm): {INSTEAD}"
    return found


def _multiplies(node: fx.Node) -> str:
    """The product that a node is, or that takes the weight that it turns; "" if neither."""
    name = _called(node)
    if name in TURN:
        name = next((each for user in node.users if (each := _called(user)) in MULTIPLY), "")
    return name if name in MULTIPLY else ""


def _called(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    turned = node.target is getattr and len(node.args) > 1 and node.args[1] in ("T", "mT")
    return "t" if turned else "matmul" if node.target is operator.matmul else getattr(node.target, "__name__", "")


def listed(left_alone: Mapping[str, str]) -> str:
    """The first of what was left alone, in words."""
    shown = "; ".join(f"{name} ({reason})" for name, reason in list(left_alone.items())[:3])
    return f"left alone: {shown or 'none'}" + (f" and {len(left_alone) - 3} more" if len(left_alone) > 3 else "")
