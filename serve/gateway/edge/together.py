"""Several pieces of work for one client, a few at a time: each is told when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Generic, TypeVar

from starlette.types import Receive, Scope

from serve.gateway.edge.asking import watch_by_receiving
from serve.gateway.edge.extensions import LEAVING
from serve.gateway.errors import ClientGoneError, OverloadedError

__all__ = ["together"]

T = TypeVar("T")
Work = Callable[[Scope], Awaitable[T]]
Leave = Callable[[], None]


async def together(scope: Scope, receive: Receive, works: Iterable[Work[T]], most: int) -> list[T]:
    """What the pieces give, in their order.

    Each is taken from the iterable as its turn comes, so that what a request costs grows with what is under way, not
    with what it asks for. Once one fails, none is begun any more; what is under way comes to its end, and the first
    failure is raised. One that is turned away because others wait begins anew when one of these has ended, as long as
    any of these is under way: pieces of one request don't turn each other away.

    Args:
        scope, receive: of the client's request.
        works: each gets a scope of its own, for `unless_client_leaves`, which one request can wait in once at a time.
        most: that are under way at a time.

    Raises:
        ClientGoneError: the client left.
    """
    left = iter(works)
    begun = list(islice(left, 2))
    if len(begun) == 1:
        return [await begun[0](scope)]
    pieces = _Pieces(scope, chain(begun, left))
    watch = scope.get("extensions", {}).get(LEAVING) or partial(watch_by_receiving, receive, [])
    watch(pieces.leave)
    tasks = [asyncio.create_task(pieces.work()) for _ in range(most)]
    try:
        await asyncio.gather(*tasks)
    finally:  # where the gateway ends, they are cancelled with this
        watch(None)
    return pieces.made()


class _Pieces(Generic[T]):
    """Those of one request."""

    def __init__(self, scope: Scope, works: Iterator[Work[T]]) -> None:
        self._scope = scope
        self._todo = enumerate(works)
        self._made: dict[int, T] = {}
        self._calls: dict[int, Leave] = {}
        self._left = False
        self._error: BaseException | None = None
        self._under_way = 0
        self._waiting: list[asyncio.Future[None]] = []

    def made(self) -> list[T]:
        """What all have given."""
        if self._left:
            raise ClientGoneError
        if self._error is not None:
            raise self._error
        return [self._made[number] for number in range(len(self._made))]

    def leave(self) -> None:
        """The client left; it may be told twice."""
        self._left = True
        for call in list(self._calls.values()):
            call()
        self._one_ended()

    async def work(self) -> None:
        """Do one after the other, until there are none or they have come to nothing."""
        try:
            while not self._over and (next_one := next(self._todo, None)) is not None:
                number, work = next_one
                self._made[number] = await self._do(number, work)
        except asyncio.CancelledError:
            raise
        except BaseException as err:
            if self._error is None:
                self._error = err
        finally:
            self._one_ended()

    @property
    def _over(self) -> bool:
        return self._left or self._error is not None

    async def _do(self, number: int, work: Work[T]) -> T:
        own = {**self._scope.get("extensions", {}), LEAVING: partial(self._watch, number)}
        while True:
            self._under_way += 1
            try:
                made = await work({**self._scope, "extensions": own})
            except OverloadedError:
                if self._under_way == 1 or self._over:
                    raise
            else:
                self._one_ended()
                return made
            finally:
                self._under_way -= 1
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
            if self._over:
                raise ClientGoneError

    def _watch(self, number: int, call: Leave | None) -> None:
        if call is None:
            self._calls.pop(number, None)
            return
        self._calls[number] = call
        if self._left:
            call()

    def _one_ended(self) -> None:
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)
        self._waiting.clear()
