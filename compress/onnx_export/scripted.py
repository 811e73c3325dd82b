"""Attention of TorchScript modules, as `compress.onnx_export.attention` writes it for others."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["attention_anew"]

_ATTENTION, _SINCE = "aten::scaled_dot_product_attention", 14
_EXPORTER = "torch.onnx._internal.torchscript_exporter"


@contextlib.contextmanager
def attention_anew() -> Iterator[None]:
    """Around an export of a ScriptModule: 0, as torch gives it, where -inf hides a row; the exporter writes NaN.

    Of masks of truths it makes 0 itself. As it was with a torch whose insides are other ones.
    """
    try:
        own: Any = importlib.import_module(f"{_EXPORTER}.symbolic_opset{_SINCE}").scaled_dot_product_attention
        types: Any = importlib.import_module(f"{_EXPORTER}._type_utils").JitScalarType
        is_none: Any = importlib.import_module(f"{_EXPORTER}.symbolic_helper")._is_none
    except (ImportError, AttributeError):
        yield
        return

    def attention(g: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, *more: Any) -> Any:
        kind = None if is_none(attn_mask) else types.from_value(attn_mask)
        if kind is None or kind == types.BOOL:
            return own(g, query, key, value, attn_mask, *more)
        least = torch.tensor(torch.finfo(kind.dtype()).min, dtype=kind.dtype())
        none = g.op("Constant", value_t=torch.zeros_like(least))
        highest = g.op("ReduceMax", attn_mask, g.op("Constant", value_t=torch.tensor([-1])), keepdims_i=1)
        hidden = g.op("Less", highest, g.op("Constant", value_t=least))
        seen = g.op("Where", hidden, none, attn_mask)
        seen.setType(attn_mask.type())
        return g.op("Where", hidden, none, own(g, query, key, value, seen, *more))

    exporter: Any = torch.onnx
    exporter.register_custom_op_symbolic(_ATTENTION, attention, _SINCE)
    try:
        yield
    finally:
        exporter.unregister_custom_op_symbolic(_ATTENTION, _SINCE)
