"""In which numbers a training multiplies."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from compress.errors import RecipeError
from compress.machine import fast_bfloat16

__all__ = ["Precision", "precision_for"]

Precision = Literal["32-true", "bf16-mixed", "16-mixed"]


def precision_for(asked: str, module: nn.Module, device: str, *, exact: bool = False) -> tuple[Precision, str | None]:
    """The precision, and what is to be said of it.

    On a GPU, bfloat16 where it has it, else float16 with loss scaling. On a CPU, bfloat16 where it multiplies it in
    hardware, but for networks with depthwise convolutions, which are slower in it there.

    Args:
        asked: "auto", "32", "bf16-mixed" or "16-mixed".
        module: is to be trained.
        device: "cpu" or "cuda".
        exact: all in float32, whatever was asked for.

    Raises:
        RecipeError: the device can't.
    """
    if exact or asked == "32":
        return "32-true", None
    if asked == "16-mixed" and device == "cpu":
        raise RecipeError(
            "can't train in 16-mixed on a CPU",
            why="float16 is for GPUs; a CPU has bfloat16, if anything",
            mend="take --train-precision bf16-mixed, 32 or auto",
        )
    if device == "cuda":
        bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if asked == "auto":
            return ("bf16-mixed" if bfloat16 else "16-mixed"), None
        slow = asked == "bf16-mixed" and not bfloat16
        return asked, "this GPU has no bfloat16 of its own: 16-mixed is faster" if slow else None  # type: ignore[return-value]
    if asked == "auto":
        return ("bf16-mixed" if fast_bfloat16() and not _depthwise(module) else "32-true"), None
    slow = not fast_bfloat16()
    return "bf16-mixed", "this CPU does not multiply bfloat16 in hardware: 32 is faster" if slow else None


def _depthwise(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.Conv2d) and 1 < layer.groups == layer.in_channels for layer in module.modules())
