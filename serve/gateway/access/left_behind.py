"""What the model server is still at work on, after its client has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["any_answered", "once_through"]


def once_through(ended: Sequence[asyncio.Future[Any]], then: Callable[[], None]) -> None:
    """Call `then` when all of these are done, of which there is at least one; each is when the server is through."""
    left = len(ended)

    def over(_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            then()

    for each in ended:
        each.add_done_callback(over)


def any_answered(ended: Sequence[asyncio.Future[Any]]) -> bool:
    """Of those that are done, whether the server answered one: True, or with an answer."""
    return any(not (each.cancelled() or each.exception() is not None or each.result() is False) for each in ended)
