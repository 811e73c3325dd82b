"""What the model server is still at work on, after its client has left, or was told that it took too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from serve.gateway.access.memory import Share

__all__ = ["OVERDUE_S", "any_answered", "hold_until_through", "leave_once_through", "once_through", "waited_for"]

OVERDUE_S = 300.0  # that a request which is over for its client goes on to count for its key, while the server has it


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


def waited_for(through: asyncio.Future[Any], seconds: float) -> asyncio.Future[Any]:
    """Done as that is, or with False after so many seconds."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def end(_: object = None) -> None:
        late.cancel()
        if not ended.done():
            ended.set_result(through.done() and any_answered([through]))

    late = loop.call_later(max(0.0, seconds), end)
    through.add_done_callback(end)
    return ended


def hold_until_through(through: Sequence[asyncio.Future[Any]], held: Share, size: int) -> None:
    """Hold a request of so many bytes for its key until these are done, which have it."""
    if through:
        held.hold(size)
        once_through(through, held.close)


def leave_once_through(
    ended: Sequence[asyncio.Future[Any]], leave: Callable[[bool], None], size: int, held: Share | None
) -> None:
    """Keep what a client left until the server is through with it.

    Args:
        ended: as of `once_through`; True, or an answer, where the server answered.
        leave: gives its place back; is told whether the server answered.
        size: of the request, in bytes.
        held: for its key, holds the request until then.
    """
    if held is not None:
        held.hold(size)

    def over() -> None:
        leave(any_answered(ended))
        if held is not None:
            held.close()

    once_through(ended, over)


def any_answered(ended: Sequence[asyncio.Future[Any]]) -> bool:
    """Of those that are done, whether the server answered one: True, or with an answer."""
    return any(not (each.cancelled() or each.exception() is not None or each.result() is False) for each in ended)
