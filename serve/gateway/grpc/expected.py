"""How much one caller's streams may have Triton hold: answers that may be long, from their question to their reader.

Triton keeps the answers to a stream that are not read, as many as were asked for, and a decoupled model computes all
of them whether anybody reads or not. How much they will be nobody knows before: a message is taken to come to the most
that one of this caller's to the model came to, with all its answers, which fades slowly. That one was short says
little of the next to a decoupled model: as many of them go at once as have ended before, and one. A message whose
answers are read as they come does not count while Triton has none for it; nor does one whose sequence waits for a slot,
which perhaps the message behind it frees, before its first answer.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from serve.gateway.access.slots import Turn
from serve.gateway.errors import ClientGoneError, OverloadedError
from serve.gateway.oip.remembered import Remembered

__all__ = ["HELD_BYTES", "Expected", "Expecting"]

UNSEEN = 4  # messages of unknown size that have room at once
FADES = 8
REMEMBERED = 4096  # callers and models
HELD_BYTES = 1024  # that Triton holds for an answer beside its own
IDLE_S = 0.05  # that Triton takes for the next answer, all others being read: it holds none
RETRY_AFTER_S = 5.0
STOPPED_S = 1.0  # that an answer waits for its reader, who then has stopped


class Known(NamedTuple):
    """What is known of one caller's messages to a model.

    Attributes:
        size: bytes that the answers to one come to, as a whole; None before one has ended.
        part: the most that those to one without an end have come to.
        ended: messages that have.
    """

    size: int | None = None
    part: int = 0
    ended: int = 0


class Expected:
    """The messages of streams that are with Triton, by caller.

    Args:
        room: bytes of answers that one caller's may come to; one message goes whatever it comes to.
        most: messages of one caller.
    """

    def __init__(self, room: int, most: int) -> None:
        self._room = room
        self._most = most
        self._known: Remembered[tuple[str, str], Known] = Remembered(REMEMBERED)
        self._asked: dict[str, Counter[str]] = {}  # messages by caller and model
        self._idle: Counter[tuple[str, str]] = Counter()  # of them, those of which Triton holds nothing now
        self._stopped: Counter[str] = Counter()  # of them, by caller, those whose reader has
        self._waiting: dict[str, deque[asyncio.Event]] = {}
        self.left: Counter[str] = Counter()  # streams that go on without their client, by caller

    async def enter(self, caller: str, model: str, *, ahead: bool = False) -> Callable[[], None]:
        """Wait, in order, until one more message may go to a model; gives what ends it, to be called once.

        Args:
            ahead: whether the model may compute any number of answers that nobody reads.
        """
        if caller in self._waiting or not self._fits(caller, model, ahead):
            turn = asyncio.Event()
            waiting = self._waiting.setdefault(caller, deque())
            waiting.append(turn)
            try:
                while waiting[0] is not turn or not self._fits(caller, model, ahead):
                    turn.clear()
                    await turn.wait()
            finally:
                waiting.remove(turn)
                if not waiting:
                    del self._waiting[caller]
                self._wake(caller)
        return self.stand(caller, model)

    def stand(self, caller: str, model: str) -> Callable[[], None]:
        """One is with a model, whether it fits or not; gives what ends it, to be called once."""
        self._asked.setdefault(caller, Counter())[model] += 1
        return lambda: self._leave(caller, model)

    def seen(self, caller: str, model: str, size: int, *, whole: bool) -> None:
        """A message's answers have so many bytes, so far or as a whole.

        A part says that there is at least as much, never that there is less than was thought.
        """
        known = self._known.get((caller, model)) or Known()
        before = known.size
        if not whole:
            known = known._replace(part=max(size, known.part))
        elif before is None:
            known = Known(max(size, known.part), 0, 1)
        else:
            before = max(before, known.part)
            kept = size if size > before else before - (before - size) // FADES
            known = Known(kept, 0, min(known.ended + 1, self._most))
        self._known.put((caller, model), known)
        self._wake(caller)

    def endless(self, caller: str, model: str) -> None:
        """Triton was not through with a message in time: the next ones go one at a time."""
        self._known.put((caller, model), Known(self._room))

    def stopped(self, caller: str) -> Callable[[], None]:
        """The reader of one of its messages has; gives what takes this back, to be called once."""
        self._stopped[caller] += 1
        return lambda: self._reads(caller)

    def idle(self, caller: str, model: str) -> Callable[[], None]:
        """Triton holds nothing of one of its messages; gives what takes this back, to be called once."""
        self._idle[caller, model] += 1
        self._wake(caller)
        return lambda: self._goes_on(caller, model)

    def _goes_on(self, caller: str, model: str) -> None:
        self._idle[caller, model] -= 1
        if not self._idle[caller, model]:
            del self._idle[caller, model]

    def _reads(self, caller: str) -> None:
        self._stopped[caller] -= 1
        if not self._stopped[caller]:
            del self._stopped[caller]
        self._wake(caller)

    def _size(self, caller: str, model: str) -> int:
        known = self._known.get((caller, model)) or Known()
        return max(self._room // UNSEEN if known.size is None else known.size, known.part)

    def _fits(self, caller: str, model: str, ahead: bool) -> bool:
        asked = self._asked.get(caller)
        if asked is None:
            return True
        if ahead and asked[model] - self._idle[caller, model] > (self._known.get((caller, model)) or Known()).ended:
            return False
        expected = sum((count - self._idle[caller, each]) * self._size(caller, each) for each, count in asked.items())
        expected += self._stopped[caller] * (self._room // UNSEEN)
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


@dataclass(slots=True, eq=False)
class _Message:
    """One of a stream.

    Attributes:
        model: "" where its answers are short.
        leave: ends what it counts for.
        apart: whether it does not count, as its sequence waits for a slot.
    """

    model: str
    leave: Callable[[], None]
    apart: bool = False

    def wait(self) -> None:
        """Its sequence has no slot after all."""
        if not self.apart:
            self.leave()
            self.leave, self.apart = _nothing, True

    def end(self) -> None:
        """It is over."""
        leave, self.leave, self.apart = self.leave, _nothing, True
        leave()


class Expecting:
    """The messages of one stream among them, in the order of their answers.

    Those to decoupled models have none, and are told apart by their model.

    Args:
        expected: of all streams.
        caller: whose stream it is.
    """

    def __init__(self, expected: Expected, caller: str) -> None:
        self._expected = expected
        self._caller = caller
        self._asked: deque[_Message] = deque()
        self._waiting: asyncio.Future[Callable[[], None]] | None = None
        self._bytes: Counter[str] = Counter()  # of answers since the last end of a message, by model
        self._reading: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._open = ""  # model of the last answer, if it was not its message's last
        self._reads = self._goes_on = _nothing
        self._ahead = self._ended = False

    async def enter(
        self, model: str, *, ahead: bool = False, turn: Turn | None = None, patience_s: float = math.inf
    ) -> None:
        """Wait until a message may go to its model; "" for one whose answers are short.

        Args:
            ahead: as for `Expected.enter`.
            turn: of a message of a sequence.
            patience_s: how long it may wait where the caller has left streams, which may go on for long.

        Raises:
            ClientGoneError: the stream is over.
            OverloadedError: it has waited for what was left.
        """
        leave = _nothing
        self._ahead = self._ahead or ahead
        waits = turn is not None and turn.waits
        if model and not waits:
            self._waiting = asyncio.ensure_future(self._expected.enter(self._caller, model, ahead=ahead))
            try:
                leave = await self._patiently(self._waiting, model, patience_s)
            except asyncio.CancelledError:
                if not self._ended:
                    raise
        if self._ended:
            leave()
            raise ClientGoneError
        message = _Message(model, leave, waits)
        self._asked.append(message)
        if model and turn is not None and turn.begins:
            turn.on_wait(message.wait)

    async def _patiently(
        self, waiting: asyncio.Future[Callable[[], None]], model: str, patience_s: float
    ) -> Callable[[], None]:
        seconds = None if patience_s == math.inf else patience_s
        while not waiting.done():
            try:
                await asyncio.wait((waiting,), timeout=seconds)
            except asyncio.CancelledError:
                waiting.cancel()
                raise
            if not waiting.done() and self._expected.left[self._caller]:
                waiting.cancel()
                raise OverloadedError(
                    f"a message to the model {model!r} waits for others of its key",
                    why="their clients have left, and a model is still at work on them",
                    mend="read streams to their end, or wait as long as Retry-After says",
                    retry_after_s=RETRY_AFTER_S,
                )
        return await waiting

    def came(self, size: int, *, last: bool, model: str = "") -> None:
        """An answer has come, of so many bytes; whether it is its message's last, and the model that it names."""
        self._awaits(None)
        model = self._of(model)
        first = next((each for each in self._asked if each.model == model), None)
        if model and first is not None and first.apart:  # it has its slot
            first.leave, first.apart = self._expected.stand(self._caller, model), False
        self._open = "" if last else model
        if model:
            self._bytes[model] += size
            self._expected.seen(self._caller, model, self._bytes[model], whole=last)
        if last:
            del self._bytes[model]

    def shown(self) -> None:
        """The client is given an answer: it has stopped reading unless it takes it soon."""
        if self._ahead:
            self._reading = asyncio.get_running_loop().call_later(STOPPED_S, self.stops)

    def stops(self) -> None:
        """The client does not read."""
        self._reads = self._expected.stopped(self._caller)

    def read(self) -> None:
        """It took the answer, or never will."""
        if self._reading is not None:
            self._reading.cancel()
        self._reads()
        self._reading, self._reads = None, _nothing
        if self._ahead and self._open and not self._ended:
            self._awaits(asyncio.get_running_loop().call_later(IDLE_S, self.waits))

    def waits(self) -> None:
        """Triton takes its time for the next answer of the message whose answer was read last."""
        self._goes_on = self._expected.idle(self._caller, self._open)

    def _awaits(self, idle: asyncio.TimerHandle | None) -> None:
        """What tells that Triton takes its time, from now on."""
        if self._idle is not None:
            self._idle.cancel()
        self._goes_on()
        self._idle, self._goes_on = idle, _nothing

    def taken(self, model: str = "") -> None:
        """All answers to the oldest message to this model, or to any, were taken by the client."""
        if self._asked:
            found = next((each for each in self._asked if each.model == model), self._asked[0])
            self._asked.remove(found)
            found.end()

    def end(self, after: asyncio.Future[int | None] | None) -> None:
        """The stream is over, and Triton is done with it: now, or after this.

        Args:
            after: has the bytes of answers that were thrown away; None where Triton was not done in time.
        """
        self._ended = True
        self.read()
        self._awaits(None)
        if self._waiting is not None:
            self._waiting.cancel()
        if after is None:
            self._leave()
        else:
            self._expected.left[self._caller] += 1
            after.add_done_callback(self._left)

    def _left(self, after: asyncio.Future[int | None]) -> None:
        self._expected.left[self._caller] -= 1
        if not self._expected.left[self._caller]:
            del self._expected.left[self._caller]
        thrown = None if after.cancelled() or after.exception() else after.result()
        for model in {each.model for each in self._asked if each.model}:
            if thrown is None:
                self._expected.endless(self._caller, model)
            else:  # which of them had how much nobody has looked at
                size = (thrown + self._bytes.total()) // len(self._asked)
                self._expected.seen(self._caller, model, size, whole=False)
        self._leave()

    def _of(self, model: str) -> str:
        """The model of an answer that names this one, or none."""
        if any(each.model == model for each in self._asked):
            return model
        return self._asked[0].model if self._asked else ""

    def _leave(self) -> None:
        while self._asked:
            self._asked.popleft().end()


def _nothing() -> None:
    """What ends a message that counts for nothing."""
