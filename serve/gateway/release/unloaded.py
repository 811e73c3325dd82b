"""What to do about a candidate that Triton has not loaded."""

from __future__ import annotations

import difflib
from collections.abc import Collection

__all__ = ["how_to_load"]

SHOWN = 5


def how_to_load(model: str, known: Collection[str]) -> str:
    """To be added to "it is not loaded yet"; "" where Triton does not tell what it has.

    Args:
        model: the candidate's.
        known: names of the models that Triton has, loaded or not.
    """
    if not known:
        return ""
    if model in known:
        return f": `serve models load {model}`, where `serve up` was started with --model-control"
    names = sorted(known)
    like = difflib.get_close_matches(model, names, 1)
    more = ", …" if len(names) > SHOWN else ""
    there = f"is it {like[0]}?" if like else f"it has {', '.join(names[:SHOWN])}{more}"
    return f": Triton has no model of that name, {there}"
