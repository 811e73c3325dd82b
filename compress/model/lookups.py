"""What a table was asked for that it lacks: told by the error that a run ended with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from compress.console.wording import counted

__all__ = ["beyond_table"]

OUT_OF_TABLE = re.compile(r"idx=(-?\d+) must be within the inclusive range \[-\d+,(\d+)\]")  # ONNX Runtime's words


def beyond_table(err: Exception, inputs: Mapping[str, Any]) -> str:
    """What of a table was asked for that it lacks, an id or a position, in words; "" where it was nothing like it."""
    found = OUT_OF_TABLE.search(str(err))
    asked, rows = (int(found[1]), int(found[2]) + 1) if found else _looked_up(err)
    if not rows:
        return ""
    ids = [name for name, values in inputs.items() if _holds(values, asked)]
    told = f"a table of {counted(rows, 'rows')} was asked for row {asked:,}"
    if ids:
        told += (
            f", which {ids[0]} holds: the tokenizer, or whoever made the ids, has a larger vocabulary than the model"
        )
    else:
        told += ", which is in no input: as a text has that is longer than the model has positions for"
    return told


def _looked_up(err: Exception) -> tuple[int, int]:
    """Of torch's embedding that an error came from: what it was asked for, and its rows; zeros where it was none.

    The error's words name neither; the call that raised it has both.
    """
    trace = err.__traceback__
    while trace is not None:
        held = trace.tb_frame.f_locals
        given = (held.get("weight"), held.get("input")) if trace.tb_frame.f_code.co_name == "embedding" else ()
        if given == () and isinstance(held.get("args"), tuple) and "embedding" in _operator(held):
            given = held["args"][:2]  # torch.ops.aten.embedding, as an exported program calls it
        match given:
            case (torch.Tensor() as table, torch.Tensor() as ids) if table.dim() == 2 and not ids.is_floating_point():
                if ids.numel() and (int(ids.max()) >= len(table) or int(ids.min()) < 0):
                    return int(ids.max() if int(ids.max()) >= len(table) else ids.min()), len(table)
        trace = trace.tb_next
    return 0, 0


def _operator(held: Mapping[str, Any]) -> str:
    """What a frame of torch's calls, by its own name; "" where it is no operator."""
    called = held.get("target", held.get("self"))
    return str(called) if isinstance(called, torch._ops.OpOverload) else ""


def _holds(values: Any, asked: int) -> bool:
    array = np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values)
    return array.dtype.kind in "iu" and bool((array == asked).any())
