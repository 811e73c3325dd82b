"""Attention of any rank for torch.onnx, which has it for [batch, heads, length, size] alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["written_anew"]

_TORCHLIB = "onnxscript.function_libs.torch_lib"


def written_anew() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Operators of torch that torch.onnx is to write in another way; none where its insides are other ones."""
    try:
        op: Any = importlib.import_module("onnxscript").opset18
        own: Any = importlib.import_module(f"{_TORCHLIB}.ops.nn").aten_scaled_dot_product_attention
        floats = importlib.import_module(f"{_TORCHLIB}.tensor_typing").TFloat
        tensors = importlib.import_module("onnxscript.onnx_types").TensorType
    except (ImportError, AttributeError):
        return {}

    def sizes(x: Any, begin: int, end: int) -> Any:
        return op.Slice(op.Shape(x), op.Constant(value_ints=[begin]), op.Constant(value_ints=[end]))

    def raised(x: Any) -> Any:
        """To four axes, where heads are missing, or batches, too; or where there is more than one axis of these."""
        shape = list(x.shape)
        if len(shape) < 4:
            made = op.Unsqueeze(x, op.Constant(value_ints=[0, 1] if len(shape) == 2 else [1]))
            shape = [1, 1, *shape] if len(shape) == 2 else [shape[0], 1, *shape[1:]]
        else:
            kept = sizes(x, len(shape) - 3, len(shape))
            made = op.Reshape(x, op.Concat(op.Constant(value_ints=[-1]), kept, axis=0))
            shape = [None, *shape[-3:]]
        made.shape, made.dtype = type(x.shape)(shape), x.dtype  # which nothing infers here
        return made

    def leading(x: Any) -> list[str]:
        return [str(size) for size in x.shape][:-3]

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        more = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        rank, masked = len(query.shape), 0 if attn_mask is None else len(attn_mask.shape)
        if rank in (0, 1, 4) or enable_gqa:
            return own(query, key, value, attn_mask, **more)
        others = [key, value, attn_mask] if masked > 4 else [key, value]
        if any(leading(each) != leading(query) for each in others):
            raise ValueError("its queries, keys, values and mask have other leading axes than each other")
        if masked > 4 or (masked == 3 and rank == 3):
            attn_mask = raised(attn_mask)
        found = own(raised(query), raised(key), raised(value), attn_mask, **more)
        if rank < 4:
            return op.Squeeze(found, op.Constant(value_ints=[0, 1] if rank == 2 else [1]))
        return op.Reshape(found, op.Concat(sizes(query, 0, rank - 1), sizes(value, rank - 1, rank), axis=0))

    attention.__annotations__ |= {
        "query": floats,
        "key": floats,
        "value": floats,
        "return": floats,
    }  # as torchlib's own
    attention.__annotations__ |= {
        "attn_mask": tensors | None, "dropout_p": float, "is_causal": bool, "scale": float | None, "enable_gqa": bool,
    }  # fmt: skip
    return {torch.ops.aten.scaled_dot_product_attention.default: attention}
