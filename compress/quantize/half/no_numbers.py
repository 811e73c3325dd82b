"""What to say of a tensor that is NaN or infinite, and not by a mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from compress.errors import StageError
from compress.quantize.half.mask_chain import mask_chain

__all__ = ["no_numbers"]


def no_numbers(
    graph: onnx.GraphProto,
    name: str,
    found: Mapping[str, np.ndarray[Any, Any]],
    samples: tuple[int, int],
    *,
    shown: bool,
) -> StageError:
    """An error that names the tensor, its samples and where it is made.

    Args:
        graph: that the tensor is in.
        name: of the first tensor, in the graph's order, that is no number.
        found: float tensors of a batch, by name.
        samples: the first and the last of that batch, from 0.
        shown: whether it is an output of the model.
    """
    values = found[name]
    maker = next((node for node in graph.node if name in node.output), None)
    kind = "NaN" if np.isnan(values).any() else "infinite"
    of = f"the tensor {name!r}" if maker is None else f"the tensor {name!r}, which a {maker.op_type} gives,"
    why = f"{of} is {kind} for a sample from {samples[0]} to {samples[1]} of the calibration data"
    masked = next(
        (given for given in (() if maker is None else maker.input) if np.isinf(found.get(given, np.zeros(1))).any()),
        None,
    )
    if masked is not None and np.isneginf(found[masked]).all(-1).any() and maker and maker.op_type == "Softmax":
        mend = f"a row of {masked!r} is masked whole: leave each row a place, or mask with torch.finfo(x.dtype).min"
    elif maker is not None and maker.op_type == "Log" and masked is None and kind == "infinite":
        mend = (
            "the logarithm of 0 is -inf: where it is a mask, give it its number itself (torch.where(mask, 0.0, -1e4), "
            "masked_fill before the softmax), else keep what it takes above 0 (x.clamp(min=1e-6).log())"
        )
    elif masked is not None and maker and maker.op_type != "Softmax":
        mend = f"{masked!r} holds a mask's infinities, which only a softmax or a maximum takes away: mask just before"
    elif shown and kind == "infinite" and name in mask_chain(graph).infinite:
        mend = f"mask with a finite number (-1e4), or outside of the model, so that {name!r} is finite"
    else:
        mend = (
            f"the float model overflows there, too: mend what gives {name!r}; drop samples only if none like them "
            "is ever served"
        )
    return StageError("calibration gives values that are no numbers", why=why, mend=mend)
