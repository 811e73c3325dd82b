"""How much one caller's streams may have Triton hold: answers that may be long, from their question to their reader.

Triton keeps the answers to a stream that are not read, as many as were asked for. How long they will be nobody knows
before: they are taken to be as long as the longest that this caller has had of the model, which fades slowly.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from serve.gateway.errors import ClientGoneError
from serve.gateway.oip.remembered import Remembered

__all__ = ["Expected", "Expecting"]

UNSEEN = 4  # messages that go at once while no answer to one has been seen
FADES = 8
REMEMBERED = 4096  # callers and models


class Expected:
    """The messages of streams that are with Triton, by caller.

    Args:
        room: bytes of answers that one caller's may come to; one message goes whatever it comes to.
        most: messages of one caller.
    """

    def __init__(self, room: int, most: int) -> None:
        self._room = room
        self._most = most
        self._longest: Remembered[tuple[str, str], int] = Remembered(REMEMBERED)
        self._asked: dict[str, Counter[str]] = {}  # messages by caller and model
        self._waiting: dict[str, deque[asyncio.Event]] = {}

    async def enter(self, caller: str, model: str) -> Callable[[], None]:
        """Wait, in order, until one more message may go to a model; gives what ends it, to be called once."""
        if caller in self._waiting or not self._fits(caller, model):
            turn = asyncio.Event()
            waiting = self._waiting.setdefault(caller, deque())
            waiting.append(turn)
            try:
                while waiting[0] is not turn or not self._fits(caller, model):
                    turn.clear()
                    await turn.wait()
            finally:
                waiting.remove(turn)
                if not waiting:
                    del self._waiting[caller]
                self._wake(caller)
        self._asked.setdefault(caller, Counter())[model] += 1
        return lambda: self._leave(caller, model)

    def seen(self, caller: str, model: str, size: int, *, whole: bool) -> None:
        """A message's answers have so many bytes, so far or as a whole."""
        before = self._longest.get((caller, model))
        if before is None or size > before:
            self._longest.put((caller, model), size)
        elif whole:
            self._longest.put((caller, model), before - (before - size) // FADES)
        self._wake(caller)

    def _size(self, caller: str, model: str) -> int:
        found = self._longest.get((caller, model))
        return self._room // UNSEEN if found is None else found

    def _fits(self, caller: str, model: str) -> bool:
        asked = self._asked.get(caller)
        if asked is None:
            return True
        expected = sum(count * self._size(caller, each) for each, count in asked.items())
        return asked.total() < self._most and expected + self._size(caller, model) <= self._room

    def _leave(self, caller: str, model: str) -> None:
        asked = self._asked[caller]
        asked[model] -= 1
        if not asked[model]:
            del asked[model]
        if not asked:
            del self._asked[caller]
        self._wake(caller)

    def _wake(self, caller: str) -> None:
        waiting = self._waiting.get(caller)
        if waiting:
            waiting[0].set()


class Expecting:
    """The messages of one stream among them, in the order of their answers.

    Args:
        expected: of all streams.
        caller: whose stream it is.
    """

    def __init__(self, expected: Expected, caller: str) -> None:
        self._expected = expected
        self._caller = caller
        self._asked: deque[tuple[str, Callable[[], None]]] = deque()
        self._waiting: asyncio.Future[Callable[[], None]] | None = None
        self._bytes = 0  # of answers to the oldest
        self._ended = False

    async def enter(self, model: str) -> None:
        """Wait until a message may go to its model; "" for one whose answers are short.

        Raises:
            ClientGoneError: the stream is over.
        """
        leave = _nothing
        if model:
            self._waiting = asyncio.ensure_future(self._expected.enter(self._caller, model))
            try:
                leave = await self._waiting
            except asyncio.CancelledError:
                if not self._ended:
                    raise
        if self._ended:
            leave()
            raise ClientGoneError
        self._asked.append((model, leave))

    def came(self, size: int, *, last: bool) -> None:
        """An answer has come, of so many bytes; whether it is its message's last."""
        self._bytes += size
        model = self._asked[0][0] if self._asked else ""
        if model:
            self._expected.seen(self._caller, model, self._bytes, whole=last)
        if last:
            self._bytes = 0

    def taken(self) -> None:
        """The oldest message's answers were taken by the client."""
        if self._asked:
            self._asked.popleft()[1]()

    def end(self, after: asyncio.Future[None] | None) -> None:
        """The stream is over, and Triton is done with it: now, or after this."""
        self._ended = True
        if self._waiting is not None:
            self._waiting.cancel()
        if after is None:
            self._leave()
        else:
            after.add_done_callback(self._leave)

    def _leave(self, _: object = None) -> None:
        while self._asked:
            self.taken()


def _nothing() -> None:
    """What ends a message that counts for nothing."""
