"""How long one run of a model may take that repeats itself for as long as its own numbers say so."""

from __future__ import annotations

import math
import os

from compress.errors import RecipeError

__all__ = ["SETTING", "loop_seconds"]

SETTING = "COMPRESS_LOOP_SECONDS"
SECONDS = 120.0


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
