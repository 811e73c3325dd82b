"""torch's own attention and encoder layers, which are one step of a graph, as steps of plain layers.

`nn.MultiheadAttention` has one matrix for q, k and v, and hides its heads; an `nn.TransformerEncoderLayer` hides its
feed-forward as well. What stands here gives the same with a linear layer for each matrix, and can be traced. How masks
are given is looked up in a run, since a trace knows no dtypes.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from compress.model.unfused import unfused

__all__ = ["MASKS", "with_plain_layers"]

Masks = dict[str, tuple[torch.dtype, int] | None]
MASKS = {
    nn.MultiheadAttention: {"key_padding_mask": 3, "attn_mask": 5},
    nn.TransformerEncoderLayer: {"src_mask": 1, "src_key_padding_mask": 2},
    nn.TransformerEncoder: {"mask": 1, "src_key_padding_mask": 2},
}


def with_plain_layers(module: nn.Module, inputs: Sequence[torch.Tensor]) -> nn.Module | None:
    """A copy in which these layers are plain ones; None where it has none. The weights are those of the module.

    Args:
        module: in eval mode.
        inputs: of its forward, for a run.
    """
    found = {name: layer for name, layer in module.named_modules() if type(layer) in MASKS}
    if not found:
        return None
    masks = _masks(found, module, inputs)
    uses = Counter(id(tensor) for _, tensor in module.named_parameters(remove_duplicate=False))
    tensors = [*module.parameters(), *module.buffers()]
    own = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    for name in sorted(found, key=len, reverse=True):  # the inner ones first
        layer: Any = own.get_submodule(name)
        plain: nn.Module
        given = masks.get(name)
        if given is None:
            continue
        if isinstance(layer, nn.MultiheadAttention):
            if any(
                uses[id(tensor)] > 1 for tensor in layer.parameters()
            ):  # cut in three, they would not be tied any more
                continue
            if layer.bias_k is not None or layer.add_zero_attn or layer.in_proj_bias is None:
                continue
            plain = PlainAttention(layer, given)
        elif isinstance(layer, nn.TransformerEncoderLayer):
            if not isinstance(layer.self_attn, PlainAttention):
                continue
            plain = PlainEncoderLayer(layer, given)
        else:
            if not all(isinstance(each, PlainEncoderLayer) for each in layer.layers):
                continue
            plain = PlainEncoder(layer, given)
        owner, _, last = name.rpartition(".")
        setattr(own.get_submodule(owner), last, plain.eval())
    return own.eval()


class PlainAttention(nn.Module):
    """`nn.MultiheadAttention` with a linear layer for each of q, k and v."""

    def __init__(self, layer: nn.MultiheadAttention, masks: Masks) -> None:
        super().__init__()
        self.heads, self.size, self.batch_first, self.masks = (
            layer.num_heads, layer.head_dim, layer.batch_first, masks,
        )  # fmt: skip
        if layer.in_proj_weight is not None:
            weights = layer.in_proj_weight.detach().chunk(3)
        else:
            weights = tuple(each.detach() for each in (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight))
        self.query, self.key, self.value = (
            _linear(weight, bias, layer.in_proj_bias.requires_grad)
            for weight, bias in zip(weights, layer.in_proj_bias.detach().chunk(3), strict=True)
        )
        self.out_proj = nn.Linear(1, 1)
        self.out_proj.weight, self.out_proj.bias = layer.out_proj.weight, layer.out_proj.bias
        self.out_proj.out_features, self.out_proj.in_features = layer.out_proj.weight.shape
        self.drop = nn.Dropout(layer.dropout)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,  # noqa: ARG002  a hint beside the mask
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As torch's; the heads' number is what is left of the channels."""
        if not self.batch_first:
            query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        q, k, v = (
            layer(each).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer, each in ((self.query, query), (self.key, key), (self.value, value))
        )
        scores = q @ k.transpose(2, 3) * self.size**-0.5
        mask = None if attn_mask is None else _added(attn_mask, self.masks["attn_mask"], q)
        if key_padding_mask is not None:
            padding = _added(key_padding_mask, self.masks["key_padding_mask"], q)[:, None, None, :]
            mask = padding if mask is None else mask + padding
        if mask is None:
            weights = scores.softmax(-1)
        elif need_weights:
            weights = (scores + mask).softmax(-1)
        else:  # as torch's faster way, which gives 0 where all keys are hidden
            hidden = mask.amax(-1, keepdim=True) == float("-inf")
            weights = (scores + mask.masked_fill(hidden, 0.0)).softmax(-1).masked_fill(hidden, 0.0)
        mixed = self.out_proj((self.drop(weights) @ v).transpose(1, 2).flatten(2))
        if not self.batch_first:
            mixed = mixed.transpose(0, 1)
        if not need_weights:
            return mixed, None
        return mixed, weights.mean(1) if average_attn_weights else weights


class PlainEncoderLayer(nn.Module):
    """`nn.TransformerEncoderLayer` of plain layers."""

    def __init__(self, layer: Any, masks: Masks) -> None:
        super().__init__()
        self.masks, self.norm_first, self.activation = masks, layer.norm_first, layer.activation
        for name, child in layer.named_children():
            setattr(self, name, child)

    def forward(
        self,
        src: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,  # noqa: ARG002
    ) -> torch.Tensor:
        """As torch's."""
        own: Any = self
        padding = _added_if(src_key_padding_mask, self.masks["src_key_padding_mask"], src)
        mask = _added_if(src_mask, self.masks["src_mask"], src)

        def attended(x: torch.Tensor) -> torch.Tensor:
            mixed, _ = own.self_attn(x, x, x, padding, need_weights=False, attn_mask=mask)
            return own.dropout1(mixed)  # type: ignore[no-any-return]

        def fed(x: torch.Tensor) -> torch.Tensor:
            return own.dropout2(own.linear2(own.dropout(own.activation(own.linear1(x)))))  # type: ignore[no-any-return]

        if self.norm_first:
            src = src + attended(own.norm1(src))
            return src + fed(own.norm2(src))
        src = own.norm1(src + attended(src))
        return own.norm2(src + fed(src))  # type: ignore[no-any-return]


class PlainEncoder(nn.Module):
    """`nn.TransformerEncoder` of plain layers."""

    def __init__(self, encoder: Any, masks: Masks) -> None:
        super().__init__()
        self.layers, self.norm, self.masks = encoder.layers, encoder.norm, masks

    def forward(
        self,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """As torch's."""
        mask = _added_if(mask, self.masks["mask"], src)
        padding = _added_if(src_key_padding_mask, self.masks["src_key_padding_mask"], src)
        for layer in self.layers:
            src = layer(src, mask, padding)
        return src if self.norm is None else self.norm(src)


def _added_if(mask: torch.Tensor | None, told: tuple[torch.dtype, int] | None, like: torch.Tensor) -> Any:
    return None if mask is None else _added(mask, told, like)


def _added(mask: torch.Tensor, told: tuple[torch.dtype, int] | None, like: torch.Tensor) -> torch.Tensor:
    """What is added to scores: where a mask is of truth values, nothing or minus infinity."""
    boolean = told is not None and told[0] == torch.bool
    return mask.to(like.dtype).masked_fill(mask, float("-inf")) if boolean else mask


def _linear(weight: torch.Tensor, bias: torch.Tensor, trained: bool) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight = nn.Parameter(weight.clone(), requires_grad=trained)
    layer.bias = nn.Parameter(bias.clone(), requires_grad=trained)
    return layer


def _masks(found: dict[str, nn.Module], module: nn.Module, inputs: Sequence[torch.Tensor]) -> dict[str, Masks | None]:
    """Of each layer that was called, the dtypes and dimensions of its masks; None where that is not always the same."""
    told: dict[str, Masks | None] = {}

    def hook(name: str, layer: nn.Module) -> Any:
        names = MASKS[type(layer)]

        def seen(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = {key: args[at] if at < len(args) else kwargs.get(key) for key, at in names.items()}
            now: Masks = {key: None if one is None else (one.dtype, one.ndim) for key, one in given.items()}
            attended = now.get("attn_mask")
            fits = args[0].ndim == 3 if args else False
            fits = fits and (attended is None or attended[1] == 2) and told.get(name, now) == now
            told[name] = now if fits else None

        return layer.register_forward_pre_hook(seen, with_kwargs=True)

    handles = [hook(name, layer) for name, layer in found.items()]
    try:
        with torch.no_grad(), unfused():
            module(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return told
