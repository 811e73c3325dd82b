"""ONNX files that repeat parts of themselves for as long as their own numbers say so: which, and how long one may take.

The standard library alone, so that `serve` asks, too.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path

from compress.errors import RecipeError
from compress.vetting.files import open_file
from compress.vetting.wire import WireError, fields

__all__ = ["SETTING", "loop_seconds", "may_not_end"]

SETTING = "COMPRESS_LOOP_SECONDS"
SECONDS = 120.0
# Numbers of fields in onnx.proto3, which are fixed for good.
GRAPH, FUNCTION, FUNCTION_NODE = 7, 25, 7  # of ModelProto, of ModelProto, of FunctionProto
NODE, OP_TYPE, ATTRIBUTE, DOMAIN = 1, 4, 5, 7  # of GraphProto, and of NodeProto
BODY = (6, 11)  # of AttributeProto
DEEPEST = 100
"""Bodies in each other; what is deeper has been refused."""


def loop_seconds() -> float:
    """Seconds that one run of such a file may take: COMPRESS_LOOP_SECONDS, 120 if not said.

    Raises:
        RecipeError: it is no number above 0.
    """
    said = os.environ.get(SETTING, "").strip()
    try:
        seconds = float(said) if said else SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        why = "it says how many seconds one run of a model with a loop may take: a number above 0"
        raise RecipeError(f"{SETTING} can't be {said!r}", why=why, mend=f"give {SECONDS:g}, or more for a slow model")
    return seconds


def may_not_end(model: Path | bytes) -> bool:
    """Whether a file, or its bytes, has a Loop, or another operator that repeats a body; what can't be read is not run.

    An `If` repeats nothing, but what is in its branches may; a function of that name may do as it likes.
    """
    try:
        if isinstance(model, bytes):
            return _repeats_anywhere(memoryview(model))
        with open_file(model) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _repeats_anywhere(data)
    except (OSError, ValueError, WireError):  # an empty file can't be mapped
        return False


def _repeats_anywhere(data: memoryview | mmap.mmap) -> bool:
    return any(
        _repeats_in(data, inside, end, NODE if number == GRAPH else FUNCTION_NODE, 0)
        for number, _, inside, end in fields(data, 0, len(data))
        if inside is not None and number in (GRAPH, FUNCTION)
    )


def _repeats_in(data: memoryview | mmap.mmap, begin: int, end: int, nodes: int, depth: int) -> bool:
    found = fields(data, begin, end)
    return any(number == nodes and at is not None and _repeats(data, at, to, depth) for number, _, at, to in found)


def _repeats(data: memoryview | mmap.mmap, begin: int, end: int, depth: int) -> bool:
    """Whether a node does."""
    kind, domain = b"", b""
    bodies: list[tuple[int, int]] = []
    for number, _, at, to in fields(data, begin, end):
        if at is None:
            continue
        if number == OP_TYPE:
            kind = bytes(data[at:to])
        elif number == DOMAIN:
            domain = bytes(data[at:to])
        elif number == ATTRIBUTE:
            inner = fields(data, at, to)
            bodies += [(start, stop) for field, _, start, stop in inner if field in BODY and start is not None]
    if kind in (b"Loop", b"Scan") or depth > DEEPEST:
        return True
    if bodies and (kind != b"If" or domain not in (b"", b"ai.onnx")):
        return True
    return any(_repeats_in(data, start, stop, NODE, depth + 1) for start, stop in bodies)
