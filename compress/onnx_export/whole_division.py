"""Division of whole numbers for torch.onnx, which divides them as float32: seconds of today by a day came out wrong."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["divided_anew"]

_TORCHLIB = "onnxscript.function_libs.torch_lib"


def divided_anew() -> dict[Callable[..., Any], Callable[..., Any]]:
    """`torch.div` with a rounding for torch.onnx; none where its insides are other ones."""
    try:
        op: Any = importlib.import_module("onnxscript").opset18
        core: Any = importlib.import_module(f"{_TORCHLIB}.ops.core")
        own, floored = core.aten_div_mode, core.aten_floor_divide
        real = importlib.import_module(f"{_TORCHLIB}.tensor_typing").TReal
    except (ImportError, AttributeError):
        return {}

    def divided(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
        if rounding_mode is None or not self.dtype.is_integer():
            return own(self, other, rounding_mode)
        return op.Div(self, other) if rounding_mode == "trunc" else floored(self, other)  # ONNX cuts off, as C does

    divided.__annotations__ |= {"self": real, "other": real, "rounding_mode": str | None, "return": real}
    modes = torch.ops.aten.div
    return dict.fromkeys((modes.Tensor_mode, modes.Scalar_mode), divided)
