"""In which numbers a training multiplies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from compress.errors import RecipeError, StageError, first_line
from compress.runtime.machine import fast_bfloat16

__all__ = ["Precision", "falls_back", "precision_for"]

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


def falls_back(
    asked: str, precision: Precision, module: nn.Module, device: str, run: Callable[[], object]
) -> tuple[Precision, str | None]:
    """The precision that the network runs in, and what is to be said: on a CPU, autocast leaves some layers out.

    Args:
        asked: see `precision_for`.
        precision: what that gave.
        module: is to be trained; it is run in eval mode.
        device: "cpu" or "cuda", whose autocast lets mixed types be.
        run: runs it on a few samples.

    Raises:
        StageError: it does not run in what was asked for.
    """
    if device != "cpu" or precision != "bf16-mixed":
        return precision, None
    trained = module.training
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            module.eval()
            run()
    except Exception as err:  # the user's forward: anything may come out of it
        why = first_line(err)[:200]
        if asked != "auto":
            mend = "take --train-precision 32 or auto"
            raise StageError("this network does not run in bf16-mixed on a CPU", why=why, mend=mend) from err
        return "32-true", f"trained in float32: in bf16-mixed the network does not run ({why})"
    finally:
        module.train(trained)
    return precision, None


def _depthwise(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.Conv2d) and 1 < layer.groups == layer.in_channels for layer in module.modules())
