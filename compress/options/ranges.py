"""Numbers that make no sense are refused before the work, not found in the middle of it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from compress.errors import RecipeError

__all__ = ["check_ranges"]

MOST_THREADS = 1024
MOST_PROCESSES = 1024
RANGES: dict[str, tuple[int, int]] = {
    "seed": (0, 2**32 - 1),
    "threads": (1, MOST_THREADS),
    "train_threads": (1, MOST_THREADS),
    "thread_counts": (1, MOST_THREADS),
    "batches": (1, 1 << 20),
    "epochs": (0, 1 << 30),
    "tune_training": (1, 1000),
    "drop_blocks": (1, 1000),
    "rounds": (1, 1000),  # each some stages
    "devices": (1, MOST_PROCESSES),
    "loader_workers": (0, MOST_PROCESSES),
    "workers": (1, MOST_PROCESSES),
}


def check_ranges(options: Any, **more: tuple[int, int]) -> None:
    """Look at the numbers of a command's options.

    Args:
        options: a dataclass.
        more: least and most of further fields.

    Raises:
        RecipeError: a number is NaN or infinite, or outside its range; or a list that has values by default is empty.
    """
    ranges = RANGES | more
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value == () and isinstance(field.default, tuple) and field.default:
            raise _wrong(field.name, "empty", "one of its values is needed")
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise _wrong(field.name, number, "it has to be a number")
            if field.name in ranges and isinstance(number, int):
                least, most = ranges[field.name]
                if not least <= number <= most:
                    raise _wrong(field.name, number, f"it goes from {least} to {most:,}")


def _wrong(name: str, number: float | str, why: str) -> RecipeError:
    flag = "--" + name.replace("_", "-")
    return RecipeError(f"{flag} can't be {number}", why=why, mend=f"give another {flag}, or leave it out")
