"""ONNX's Attention, of opset 23 on, as torch's function of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import functional as F

from compress.formats.onnx_layers.values import Graph, NotTakenBackError, samples

__all__ = ["attention"]

WINDOWS = ("left_window_size", "right_window_size")  # of opset 25 on


def attention(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    """Of queries, keys and values [batch, heads, length, size] or [batch, length, heads · size], and a mask."""
    if any(a.get(side, -1) >= 0 for side in WINDOWS):
        raise NotTakenBackError("it looks at a window alone")
    query, key, value, mask = (each if each is None else g.tensor(each) for each in [*x, None][:4])
    if any(each is not None for each in x[4:]) or a.get("softcap", 0.0):
        raise NotTakenBackError("it keeps keys and values, or its scores are capped")
    causal = bool(a.get("is_causal", 0))
    if causal and mask is not None:
        raise NotTakenBackError("it has a mask, and looks at what was before alone")
    flat = samples(query).ndim == 3
    if flat:
        query = _in_heads(g, query, a["q_num_heads"])
        key, value = (_in_heads(g, each, a["kv_num_heads"]) for each in (key, value))
    shared = samples(query).shape[1] // samples(key).shape[1]
    if shared > 1:
        key, value = (g.call("repeat_interleave", each, shared, 1) for each in (key, value))
    scale = float(a["scale"]) if "scale" in a else None
    found = g.call(F.scaled_dot_product_attention, query, key, value, mask, 0.0, causal, scale=scale)
    return g.call("flatten", g.call("transpose", found, 1, 2), 2) if flat else found


def _in_heads(g: Graph, x: Any, heads: int) -> Any:
    return g.call("transpose", g.call("unflatten", x, 2, (heads, -1)), 1, 2)
