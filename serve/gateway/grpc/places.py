"""A place among the requests of its model for each message of a stream, from before it is sent until its last answer.

A message waits for its place as long as the gateway's time-out, where a single request is turned away after half a
second: had streams all places of a slow model, others would be refused for as long as one stream lasts. So the streams
of one caller have three quarters of them, and wait for those among themselves, in order.

Whatever has a place can be answered without another's getting one. A message whose sequence waits for its slot can't:
it waits for a message that ends another sequence, perhaps one behind it. It has no place, and counts apart.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from serve.gateway.access.admission import Admission
from serve.gateway.access.gate import Gate
from serve.gateway.access.identity import Identity
from serve.gateway.access.slots import MOST_WAITING, Turn
from serve.gateway.errors import ClientGoneError

__all__ = ["Placed", "Places"]

OF_OTHERS = 4  # one place in so many is not for one caller's streams
SLOW_PART = 0.1  # of an answer's time: a client that took more for those before it says nothing of the model


class _Line:
    """What one caller has of something, and its messages that wait for more, the first first."""

    def __init__(self) -> None:
        self.held = 0
        self._waiting: deque[asyncio.Event] = deque()

    def free(self, most: int) -> bool:
        """Whether one more may be held, and nobody waits for it."""
        return not self._waiting and self.held < most

    async def enter(self, most: Callable[[], int], on_wait: Callable[[], None]) -> None:
        """Wait until fewer than so many are held, and hold one more; each is given back with `leave`."""
        if not self.free(most()):
            turn = asyncio.Event()
            self._waiting.append(turn)
            try:
                while self._waiting[0] is not turn or self.held >= most():
                    on_wait()
                    turn.clear()
                    await turn.wait()
            finally:
                self._waiting.remove(turn)
                self._wake()
        self.held += 1
        self._wake()

    def leave(self) -> None:
        self.held -= 1
        self._wake()

    @property
    def empty(self) -> bool:
        return not self.held and not self._waiting

    def _wake(self) -> None:
        if self._waiting:
            self._waiting[0].set()


class Places:
    """Those of all streams.

    Args:
        gate: has the models' places.
        patience_s: that a message waits for one, and that one of a sequence keeps it.
    """

    def __init__(self, gate: Gate, patience_s: float) -> None:
        self.gate = gate
        self.patience_s = patience_s
        self._lines: dict[tuple[str, Admission, bool], _Line] = {}

    def of_stream(self, caller: str) -> Placed:
        """The places of one stream.

        Args:
            caller: whose stream it is.
        """
        return Placed(self, caller)

    def at_once(self, caller: str, model: str, turn: Turn | None) -> Place | None:
        """A place that is free; arguments as of `enter`."""
        places = self.gate.places(model)
        slotless = turn is not None and turn.waits
        line = self._line(caller, places, slotless)
        if line.free(_most(places, slotless)) and (slotless or places.try_enter()):
            line.held += 1
            return Place(self, caller, places, slotless)
        self._forget(caller, places, slotless)
        return None

    async def enter(self, caller: str, identity: Identity, model: str, turn: Turn | None) -> Place:
        """Wait for a place, to be given back with its `leave`.

        Args:
            identity: of the caller.
            turn: of the message among those of its sequence, where it has one.

        Raises:
            OverloadedError: there was none in time.
        """
        places = self.gate.places(model)
        until = time.monotonic() + self.patience_s
        slotless = turn is not None and turn.waits
        try:
            async with asyncio.timeout(self.patience_s):
                await self._join(caller, places, slotless)
        except TimeoutError:
            raise places.late() from None
        place = Place(self, caller, places, slotless)
        if not slotless:
            try:
                await places.enter(identity.priority, until - time.monotonic(), identity.id, patient=True)
            except BaseException:
                self.leave(caller, places, slotless)
                raise
        return place

    async def _join(self, caller: str, places: Admission, slotless: bool) -> None:
        line = self._line(caller, places, slotless)
        try:
            await line.enter(lambda: _most(places, slotless), _nothing if slotless else places.wanted)
        finally:
            self._forget(caller, places, slotless)

    def leave(self, caller: str, places: Admission, slotless: bool) -> None:
        self._lines[caller, places, slotless].leave()
        self._forget(caller, places, slotless)

    def set_apart(self, caller: str, places: Admission) -> None:
        """What had a place has none any more, and counts among those without a slot, beyond their number if need be."""
        self.leave(caller, places, False)
        self._line(caller, places, True).held += 1

    def _line(self, caller: str, places: Admission, slotless: bool) -> _Line:
        return self._lines.setdefault((caller, places, slotless), _Line())

    def _forget(self, caller: str, places: Admission, slotless: bool) -> None:
        line = self._lines.get((caller, places, slotless))
        if line is not None and line.empty:
            del self._lines[caller, places, slotless]


class Place:
    """One of them, or what counts in its stead while a sequence waits for its slot."""

    def __init__(self, all_: Places, caller: str, places: Admission, slotless: bool) -> None:
        self._all = all_
        self._caller = caller
        self._places = places
        self._slotless = slotless

    def set_apart(self) -> None:
        """Give the place to others, though the server still has the message."""
        if not self._slotless:
            self._slotless = True
            self._all.set_apart(self._caller, self._places)
            self._places.leave(None)

    def leave(self, seconds: float | None, size: int = 0) -> None:
        """The message is over; arguments as for `Admission.leave`."""
        self._all.leave(self._caller, self._places, self._slotless)
        if not self._slotless:
            self._places.leave(seconds, size)


@dataclass(slots=True, eq=False)
class _Message:
    model: str
    size: int
    place: Place
    sent: float
    taking_s: float  # that the client had taken for answers when it was sent
    tells: bool  # whether its time tells how busy the model is
    timer: asyncio.TimerHandle | None


class Placed:
    """The messages of one stream that Triton has; see `Places.of_stream`."""

    def __init__(self, places: Places, caller: str) -> None:
        self._places = places
        self._caller = caller
        self._messages: deque[_Message] = deque()
        self._waiting: asyncio.Future[Place] | None = None
        self._taking_s = 0.0
        self._ended = False

    async def enter(
        self, identity: Identity, model: str, size: int, turn: Turn | None, *, of_sequence: bool, tells: bool
    ) -> None:
        """Wait for a message's place.

        Args:
            size: of the message, in bytes.
            turn: as of `Places.enter`.
            of_sequence: whether it is one of a sequence: its place is given back after the time-out at the latest.
            tells: whether a model of this kind is busy when its answers take long.

        Raises:
            OverloadedError: there was none in time.
            ClientGoneError: the stream is over.
        """
        place = None if self._ended else self._places.at_once(self._caller, model, turn)
        if place is None:
            place = await self._wait(identity, model, turn)
        tells = tells and not of_sequence and all(each.model == model for each in self._messages)
        timer = None
        if of_sequence:
            timer = asyncio.get_running_loop().call_later(self._places.patience_s, place.set_apart)
        self._messages.append(_Message(model, size, place, time.monotonic(), self._taking_s, tells, timer))

    async def _wait(self, identity: Identity, model: str, turn: Turn | None) -> Place:
        if self._ended:
            raise ClientGoneError
        waiting = self._waiting = asyncio.ensure_future(self._places.enter(self._caller, identity, model, turn))
        try:
            place = await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                waiting.result().leave(None)  # it came too late for us
            if self._ended:
                raise ClientGoneError from None
            raise
        finally:
            self._waiting = None
        if self._ended:
            place.leave(None)
            raise ClientGoneError
        return place

    def took(self, seconds: float) -> None:
        """The client has taken an answer, in so many seconds; those behind it were not looked at meanwhile."""
        self._taking_s += seconds

    def answered(self, model: str, *, good: bool) -> None:
        """The last answer of a message has come.

        Args:
            model: that it names; "" where it names none.
            good: whether it is none of an error.
        """
        found = next((each for each in self._messages if each.model == model), None)
        found = found or (self._messages[0] if self._messages else None)  # those that name none come in order
        if found is None:
            return
        self._messages.remove(found)
        seconds = time.monotonic() - found.sent
        tells = good and found.tells and self._taking_s - found.taking_s <= SLOW_PART * seconds
        self._leave(found, seconds if tells else None)
        if good:
            self._places.gate.known(found.model)

    def end(self, after: asyncio.Future[None] | None) -> None:
        """The stream is over, and Triton is done with it: now, or after this."""
        self._ended = True
        if self._waiting is not None:
            self._waiting.cancel()
        if after is None:
            self._leave_all()
        else:
            after.add_done_callback(self._leave_all)

    def _leave_all(self, _: object = None) -> None:
        while self._messages:
            self._leave(self._messages.popleft(), None)

    def _leave(self, message: _Message, seconds: float | None) -> None:
        if message.timer is not None:
            message.timer.cancel()
        message.place.leave(seconds, message.size)


def _most(places: Admission, slotless: bool) -> int:
    """What one caller's streams may have with a model; of places one in any case, and so many that others find some."""
    if slotless:
        return MOST_WAITING
    limit = int(places.limit)
    return max(1, limit - max(1, limit // OF_OTHERS))


def _nothing() -> None:
    """Nothing else is to be done."""
