"""A place among the requests of its model for each message of a stream, from before it is sent until its last answer.

A message waits for its place as long as the gateway's time-out and a second, where a single request is turned away
after half a second: had streams all places of a slow model, others would be refused for as long as one stream lasts. So
the streams of one caller have three quarters of them, and wait for those among themselves, in order.

Whatever has a place can be answered without another's getting one. A message whose sequence waits for its slot can't:
it waits for a message that ends another sequence, perhaps one behind it. It has no place, and counts apart.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from serve.gateway.access.admission import Admission
from serve.gateway.access.gate import Gate
from serve.gateway.access.identity import Identity
from serve.gateway.access.left_streams import Trial
from serve.gateway.access.slots import MOST_WAITING, Turn
from serve.gateway.errors import OverloadedError
from serve.gateway.health.flights import At

__all__ = ["Place", "Places"]

OF_OTHERS = 4  # one place in so many is not for one caller's streams
# Longer than one of a sequence keeps its place, as it may have got that just before: what ends a sequence, sent behind
# it, would be refused in the moment in which the place is free.
FOLLOWS_S = 1.0


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
        patience_s: that one of a sequence keeps its place; a message waits for one a second longer.
    """

    def __init__(self, gate: Gate, patience_s: float) -> None:
        self.gate = gate
        self.patience_s = patience_s
        self._lines: dict[tuple[str, Admission, bool], _Line] = {}

    def knows(self, model: str, *, decoupled: bool) -> None:
        """Triton has this model. How long a decoupled one answers does not tell how busy it is."""
        self.gate.known(model)
        if decoupled:
            self.gate.places(model).opens()

    async def beside_left(self, model: str) -> Trial | None:
        """Let a message to a decoupled model go on beside what was left with it; see `LeftStreams.enter`."""
        places = self.gate.places(model)
        return await self.gate.left_streams.enter(places, min(places.wait_s, self.patience_s))

    def left(self, model: str) -> Callable[[bool], None]:
        """A message's client has left, and the model goes on with it; gives what is to be told once it does not, and
        whether that is not known."""
        places, left = self.gate.places(model), self.gate.left_streams
        since = left.begin(places)
        return lambda stuck: left.end(places, since, stuck=stuck)

    def answered_first(self, model: str, seconds: float) -> None:
        """The first answer to a message took so long."""
        self.gate.left_streams.answered_first(self.gate.places(model), seconds)

    def late(self, model: str) -> OverloadedError:
        """What refuses a message to which there is no answer beside what was left."""
        return self.gate.left_streams.late(self.gate.places(model))

    def at_once(self, caller: str, identity: Identity, model: str, turn: Turn | None) -> Place | None:
        """A place that is free; arguments as of `enter`."""
        places = self.gate.places(model)
        slotless = turn is not None and turn.waits
        line = self._line(caller, places, slotless)
        if line.free(_most(places, slotless)) and (slotless or places.try_enter(identity.id, identity.priority)):
            line.held += 1
            return Place(self, caller, identity.id, places, slotless, turn is not None)
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
        patience_s = self.patience_s + FOLLOWS_S
        until = time.monotonic() + patience_s
        slotless = turn is not None and turn.waits
        try:
            async with asyncio.timeout(patience_s):
                await self._join(caller, places, slotless)
        except TimeoutError:
            raise places.late() from None
        if not slotless:
            try:
                await places.enter(identity.priority, until - time.monotonic(), identity.id, patient=True)
            except BaseException:
                self.leave(caller, places, slotless)
                raise
        return Place(self, caller, identity.id, places, slotless, turn is not None)

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
    """One of them, or what counts in its stead while a sequence waits for its slot.

    Attributes:
        of_model: the places among which it is.
    """

    def __init__(
        self, all_: Places, caller: str, who: str, places: Admission, slotless: bool, of_sequence: bool
    ) -> None:
        self._all = all_
        self._caller = caller
        self._who = who
        self.of_model = places
        self._slotless = slotless
        self._of_sequence = of_sequence
        self._begun = places.now
        self._over = self._left = False

    def leaves(self) -> None:
        """Its client has left, and the server has the message still."""
        if not (self._slotless or self._left):
            self._left = True
            self.of_model.left += 1

    def _comes_back(self) -> None:
        if self._left:
            self._left = False
            self.of_model.left -= 1

    def set_apart(self, *, counts: bool = True) -> None:
        """Give the place to others, though the server still has the message.

        Args:
            counts: whether its time so far was the model's, for all that is known; else it waits for its slot.
        """
        if self._slotless or self._over:
            return
        self._slotless = True
        self._comes_back()
        self._all.set_apart(self._caller, self.of_model)
        if counts:
            self.of_model.leave(None, who=self._who, begun=self._begun)
        else:
            self.of_model.take_back(self._who, self._begun)

    def leave(self, seconds: float | None, size: int = 0, at: At | None = None) -> None:
        """The message is over; arguments as for `Admission.leave`."""
        self._over = True
        self._comes_back()
        self._all.leave(self._caller, self.of_model, self._slotless)
        if not self._slotless:
            begun = self._begun if self._of_sequence else -math.inf
            self.of_model.leave(seconds, size, self._who, at, begun)


def _most(places: Admission, slotless: bool) -> int:
    """What one caller's streams may have with a model; of places one in any case, and so many that others find some."""
    if slotless:
        return MOST_WAITING
    limit = int(places.limit)
    return max(1, limit - max(1, limit // OF_OTHERS))


def _nothing() -> None:
    """Nothing else is to be done."""
