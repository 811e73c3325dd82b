"""Which of several changes hold together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["bearing"]


def bearing(items: Sequence[Any], fails: Callable[[Sequence[Any]], str | None]) -> tuple[list[Any], dict[int, str]]:
    """The items that hold together, and, by its place, why each of the others was dropped.

    All are tried at once; only where that fails, halves are, each together with what holds already.
    """
    kept: list[Any] = []
    dropped: dict[int, str] = {}
    stack = [list(enumerate(items))]
    while stack:
        part = stack.pop()
        if not part:
            continue
        why = fails([*kept, *(item for _, item in part)])
        if why is None:
            kept += [item for _, item in part]
        elif len(part) == 1:
            dropped[part[0][0]] = why
        else:
            middle = len(part) // 2
            stack += [part[middle:], part[:middle]]
    return kept, dropped
