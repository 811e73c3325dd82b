"""Attention for torch.onnx: of any rank, where it has it for [batch, heads, length, size] alone; and of rows that a
mask hides whole, for which torch gives 0, and torch.onnx the mean of all values, or NaN."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["written_anew"]

_TORCHLIB = "onnxscript.function_libs.torch_lib"


def written_anew() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Operators of torch that torch.onnx is to write in another way; none where its insides are other ones."""
    try:
        op: Any = importlib.import_module("onnxscript").opset18
        ir: Any = importlib.import_module("onnxscript").ir
        layers: Any = importlib.import_module(f"{_TORCHLIB}.ops.nn")
        own, own_on_cpu = (
            layers.aten_scaled_dot_product_attention, layers.aten__scaled_dot_product_flash_attention_for_cpu
        )  # fmt: skip
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

    def spread(mask: Any, query: Any) -> Any:
        """A mask for all that the leading axes of the queries hold, which become one."""
        if leading(mask) == leading(query):
            return mask
        one = op.Constant(value_ints=[1, 1, 1])
        made = op.Expand(mask, op.Concat(sizes(query, 0, len(query.shape) - 3), one, axis=0))
        made.shape, made.dtype = type(query.shape)([*list(query.shape)[:-3], *list(mask.shape)[-3:]]), mask.dtype
        return made

    def constant(value: float, like: Any) -> Any:
        return op.Constant(value=ir.tensor(value, dtype=like.dtype))

    def added(mask: Any, query: Any) -> Any:
        """A mask as what is added to the scores."""
        if mask.dtype != ir.DataType.BOOL:
            return mask
        made = op.Where(mask, constant(0.0, query), constant(query.dtype.min, query))
        made.shape, made.dtype = mask.shape, query.dtype
        return made

    def hides_all(mask: Any, least: float) -> Any:
        """Whether all of a row of the mask is below the least number."""
        highest = op.ReduceMax(mask, op.Constant(value_ints=[-1]), keepdims=1)
        return op.Less(highest, constant(least, mask))

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        more: dict[str, Any] = {
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        if attn_mask is None:  # of a causal one, each row sees the first key
            return of_any_rank(query, key, value, None, **more)
        mask = added(attn_mask, query)
        if mask is not attn_mask:
            hidden = hides_all(mask, -1.0)
        else:  # of numbers, -inf alone hides: of a row of finfo.min, torch gives the mean
            hidden = hides_all(mask, query.dtype.min)
            mask = op.Where(hidden, constant(0.0, attn_mask), attn_mask)  # no NaN where ranges and gradients are taken
            mask.shape, mask.dtype = attn_mask.shape, attn_mask.dtype
        found = of_any_rank(query, key, value, mask, **more)
        found.dtype = query.dtype
        return op.Where(hidden, constant(0.0, found), found)

    def of_any_rank(query: Any, key: Any, value: Any, attn_mask: Any, *, enable_gqa: bool, **more: Any) -> Any:
        more["enable_gqa"] = enable_gqa
        rank, masked = len(query.shape), 0 if attn_mask is None else len(attn_mask.shape)
        if rank in (0, 1, 4) or enable_gqa:
            return own(query, key, value, attn_mask, **more)
        if any(leading(each) != leading(query) for each in (key, value)):
            raise ValueError("its queries, keys and values have other leading axes than each other")
        if masked > 3:
            attn_mask = raised(spread(attn_mask, query))
        elif masked == rank == 3:
            attn_mask = raised(attn_mask)
        found = own(raised(query), raised(key), raised(value), attn_mask, **more)
        if rank < 4:
            return op.Squeeze(found, op.Constant(value_ints=[0, 1] if rank == 2 else [1]))
        return op.Reshape(found, op.Concat(sizes(query, 0, rank - 1), sizes(value, rank - 1, rank), axis=0))

    def on_cpu(
        query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, attn_mask: Any = None,
        scale: float | None = None,
    ) -> Any:  # fmt: skip
        """As programs have it that were decomposed: what it gives beside is for gradients."""
        _, beside = own_on_cpu(query, key, value, scale=scale)
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale), beside

    told = {  # as torchlib's own
        "query": floats, "key": floats, "value": floats, "attn_mask": tensors | None, "dropout_p": float,
        "is_causal": bool, "scale": float | None,
    }  # fmt: skip
    attention.__annotations__ |= told | {"enable_gqa": bool, "return": floats}
    pair: Any = types.GenericAlias(tuple, (floats, floats))
    on_cpu.__annotations__ |= told | {"return": pair}
    aten = torch.ops.aten
    return {
        aten.scaled_dot_product_attention.default: attention,
        aten._scaled_dot_product_flash_attention_for_cpu.default: on_cpu,
    }
