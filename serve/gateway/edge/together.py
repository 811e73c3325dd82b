"""Several pieces of work for one client, side by side: each is told when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from starlette.types import Receive, Scope

from serve.gateway.edge.asking import watch_by_receiving
from serve.gateway.edge.extensions import LEAVING
from serve.gateway.errors import ClientGoneError, OverloadedError

__all__ = ["together"]

T = TypeVar("T")
Leave = Callable[[], None]


async def together(
    scope: Scope, receive: Receive, works: Sequence[Callable[[Scope], Awaitable[T]]], most: int
) -> list[T]:
    """What the pieces give, in their order.

    Once one fails, none is begun any more; what is under way comes to its end, and the first failure is raised. One
    that is turned away because others wait begins anew when one of these has ended, as long as any of these is under
    way: pieces of one request don't turn each other away.

    Args:
        scope, receive: of the client's request.
        works: each gets a scope of its own, for `unless_client_leaves`, which one request can wait in once at a time.
        most: that are under way at a time.

    Raises:
        ClientGoneError: the client left.
    """
    if len(works) == 1:
        return [await works[0](scope)]
    calls: dict[int, Leave] = {}
    places = asyncio.Semaphore(most)
    left = failed = False
    under_way = 0
    waiting: list[asyncio.Future[None]] = []

    def leave() -> None:
        nonlocal left
        left = True
        for call in list(calls.values()):
            call()
        one_ended()

    def watch_of(number: int, call: Leave | None) -> None:
        if call is None:
            calls.pop(number, None)
            return
        calls[number] = call
        if left:
            call()

    def one_ended() -> None:
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)
        waiting.clear()

    async def one(number: int, work: Callable[[Scope], Awaitable[T]]) -> T:
        nonlocal failed, under_way
        async with places:
            if left or failed:
                raise ClientGoneError
            own = {**scope.get("extensions", {}), LEAVING: partial(watch_of, number)}
            while True:
                under_way += 1
                try:
                    made = await work({**scope, "extensions": own})
                except OverloadedError:
                    under_way -= 1
                    if not under_way or left or failed:
                        failed = True
                        one_ended()
                        raise
                except BaseException:
                    under_way -= 1
                    failed = True
                    one_ended()
                    raise
                else:
                    under_way -= 1
                    one_ended()
                    return made
                turn = asyncio.get_running_loop().create_future()
                waiting.append(turn)
                await turn
                if left or failed:
                    raise ClientGoneError

    watch = scope.get("extensions", {}).get(LEAVING) or partial(watch_by_receiving, receive, [])
    watch(leave)
    tasks = [asyncio.create_task(one(number, work)) for number, work in enumerate(works)]
    try:
        done = await asyncio.gather(*tasks, return_exceptions=True)
    finally:  # where the gateway ends, they are cancelled with this
        watch(None)
    errors = [each for each in done if isinstance(each, BaseException)]
    if left:
        raise ClientGoneError
    if errors:
        raise next((each for each in errors if not isinstance(each, ClientGoneError)), errors[0])
    return [each for each in done if not isinstance(each, BaseException)]
