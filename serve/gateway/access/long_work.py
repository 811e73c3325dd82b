"""Long messages hold the event loop while they are copied: one at a time, keys in turn, and as long a pause after each.

gRPC's library makes one piece of a message as it is read, and copies it as it is sent: in the event loop, and without a
pause. 60 MiB take 0.1 to 0.4 s, and those of several calls that were whole at the same time followed each other, so
that nobody else was answered for seconds. It tells of no message how long it is before that. So whoever has had a long
one of late is known by it: before each step that may be such a one, a turn is waited for. Who has none waits for none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Generator
from contextlib import asynccontextmanager, suppress
from time import monotonic, perf_counter
from typing import Any, Generic, TypeVar

__all__ = ["LONG_BYTES", "LongWork", "Steps"]

LONG_BYTES = 1024 * 1024
SHORT_S = 0.005  # what has held the loop for less needs no pause
KNOWN_S = 10.0  # whoever had one is known for so long
COPY_S = 2e-9  # of a byte, where the library copies it when nobody can look
LEFT_S = 0.05  # who waits for something else for so long gives up the turn

T = TypeVar("T")


class LongWork:
    """Of one gateway."""

    def __init__(self) -> None:
        self._busy = False
        self._last = ""  # whose turn it was
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._known: dict[str, float] = {}  # until when, the earliest first

    def knows(self, who: str) -> bool:
        """Whether a key (or address) has had a long message of late."""
        return who in self._known and self._known[who] > monotonic()

    def had(self, who: str, took: float = 0.0) -> None:
        """It has had one, which took so many seconds out of turn."""
        if took and not self._busy:
            self._busy = True
            self.over(took)
        now = monotonic()
        self._known.pop(who, None)
        self._known[who] = now + KNOWN_S
        while (oldest := next(iter(self._known))) != who and self._known[oldest] <= now:
            del self._known[oldest]

    def steps(self, who: str, work: Coroutine[Any, Any, T], *, long: bool = False, first: bool = True) -> Steps[T]:
        """Have the library's work done, what it does of it between waits in turns: to be awaited.

        Args:
            who: a key, or an address.
            work: a call of the library's that reads or sends a message.
            long: whether the message is known to be long.
            first: whether what it does before it waits is done in a turn, too.
        """
        return Steps(self, who, work, long=long, first=first)

    async def copy(self, who: str, size: int) -> None:
        """Wait for the turn of a copy of so many bytes that the library makes next."""
        if size >= LONG_BYTES:
            self.had(who)
            turn = await self.turn(who)
            turn.used = COPY_S * size
            asyncio.get_running_loop().call_later(turn.used, turn.end)

    @asynccontextmanager
    async def alone(self, who: str, size: int) -> AsyncIterator[None]:
        """In a turn, if it is about so many bytes that it takes one."""
        if size < LONG_BYTES:
            yield
            return
        self.had(who)
        turn = await self.turn(who)
        began = perf_counter()
        try:
            yield
        finally:
            turn.used = perf_counter() - began
            turn.end()

    async def turn(self, who: str) -> Turn:
        """Wait for a turn, which is to be ended."""
        if self._busy:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(who, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():
                    self._next()
                raise
        self._busy, self._last = True, who
        return Turn(self)

    def over(self, used: float) -> None:
        """A turn has ended, in which the loop was held for so many seconds."""
        if used > SHORT_S:
            asyncio.get_running_loop().call_later(used, self._next)
        else:
            self._next()

    def _next(self) -> None:
        while self._waiting:
            who = next((each for each in self._waiting if each != self._last), self._last)
            turns = self._waiting.pop(who)
            while turns and (mine := turns.popleft()).done():  # nobody waits for it any more
                pass
            if turns:
                self._waiting[who] = turns  # behind the others
            if not mine.done():
                mine.set_result(None)
                return
        self._busy = False


class Turn:
    """One, until it is ended.

    Attributes:
        used: seconds that the loop was held for in it.
    """

    __slots__ = ("_work", "held", "used")

    def __init__(self, work: LongWork) -> None:
        self._work = work
        self.used = 0.0
        self.held = True

    def end(self) -> None:
        """The next one may begin after a pause; more than once does no harm."""
        if self.held:
            self.held = False
            self._work.over(self.used)


class Steps(Generic[T]):
    """See `LongWork.steps`.

    Attributes:
        begun: whether its first step was done.
    """

    def __init__(self, work: LongWork, who: str, coroutine: Coroutine[Any, Any, T], *, long: bool, first: bool) -> None:
        self._work = work
        self._who = who
        self._coroutine = coroutine
        self._long = long
        self._first = first
        self._took = 0.0
        self.begun = False

    def __await__(self) -> Generator[Any, Any, T]:
        turn: Turn | None = None
        failed: BaseException | None = None
        loop = asyncio.get_running_loop()
        try:
            while True:
                if failed is None and (self._first or self.begun) and not (turn is not None and turn.held):
                    try:
                        turn = yield from self._turn()
                    except BaseException:
                        if self.begun:  # this alone frees what the library has of it
                            with suppress(BaseException):
                                self._do(None, None)
                        raise
                error, failed = failed, None
                try:
                    waits = self._do(turn, error)
                finally:
                    del error  # it would hold this frame, which holds it, and its message with both
                gives_up = None if turn is None else loop.call_later(LEFT_S, turn.end)
                try:
                    yield waits
                except BaseException as err:  # it is the coroutine's
                    failed = err
                finally:
                    if gives_up is not None:
                        gives_up.cancel()
        except StopIteration as over:
            result: T = over.value
            if isinstance(result, bytes) and len(result) >= LONG_BYTES:
                self._work.had(self._who, 0.0 if turn is not None and turn.held else self._took)
            return result
        finally:
            if turn is not None:
                turn.end()
            self._coroutine.close()

    def _turn(self) -> Generator[Any, Any, Turn | None]:
        if not (self._long or self._work.knows(self._who)):
            return None
        return (yield from self._work.turn(self._who).__await__())

    def _do(self, turn: Turn | None, failed: BaseException | None) -> Any:
        began = perf_counter()
        self.begun = True
        try:
            return self._coroutine.send(None) if failed is None else self._coroutine.throw(failed)
        finally:
            self._took = perf_counter() - began
            if turn is not None:
                turn.used += self._took
