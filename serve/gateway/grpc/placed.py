"""The messages of one stream that have places, until their last answers have come; see `serve.gateway.grpc.places`."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from serve.gateway.access.begins import SLOT_S
from serve.gateway.access.identity import Identity
from serve.gateway.access.left_streams import Trial
from serve.gateway.access.slots import Turn
from serve.gateway.errors import ClientGoneError, GatewayError
from serve.gateway.grpc.places import Place, Places
from serve.gateway.health.flights import NOWHERE, At
from serve.gateway.release.beside import Besides

__all__ = ["Placed"]

SLOW_PART = 0.1  # of an answer's time: a client that took more for those before it says nothing of the model


def _nowhere(_path: str) -> At:
    """Nobody was told."""
    return NOWHERE


@dataclass(slots=True, eq=False)
class _Message:
    model: str
    path: str
    size: int
    place: Place
    sent: float
    taking_s: float  # that the client had taken for answers when it was sent
    tells: bool  # whether its time tells how busy the model is
    timer: asyncio.TimerHandle | None
    beside: Besides | None
    over: Callable[[], None]  # its place was given back
    trial: Trial | None = None
    trying: asyncio.TimerHandle | None = None
    begun: bool = False  # whether an answer has come


class Placed:
    """Those of one stream.

    Args:
        places: of all streams.
        caller: whose stream it is.
        end: ends the stream, with why.
    """

    def __init__(self, places: Places, caller: str, end: Callable[[GatewayError], None] = lambda _: None) -> None:
        self._end = end
        self._places = places
        self._caller = caller
        self._messages: deque[_Message] = deque()
        self._waiting: asyncio.Future[Place] | None = None
        self._taking_s = 0.0
        self._ended = self._decoupled = False

    def check(self, identity: Identity) -> None:
        """Raises ForbiddenError where the key may not ask a model whose answers still come."""
        for model in {each.model for each in self._messages}:
            identity.check_model(model)

    async def enter(
        self,
        identity: Identity,
        model: str,
        size: int,
        turn: Turn | None,
        *,
        of_sequence: bool,
        decoupled: bool | None,
        beside: Besides | None = None,
        path: str = "",
    ) -> None:
        """Wait for a message's place.

        Args:
            size: of the message, in bytes.
            turn: as of `Places.enter`.
            of_sequence: whether it is one of a sequence: its place is given back after the time-out at the latest. One
                that begins it gives it back as soon as others are known to have all slots, or after SLOT_S.
            decoupled: whether the model is; None where that is not known.
            beside: is told of it, while it is with Triton.
            path: of the model, with its version where that was asked for.

        Raises:
            OverloadedError: there was none in time.
            ClientGoneError: the stream is over.
        """
        if decoupled is not None:
            self._places.knows(model, decoupled=decoupled)
        trial = None
        if decoupled and not any(each.model == model for each in self._messages):  # else they tell by themselves
            trial = await self._places.beside_left(model)
        try:
            place = None if self._ended else self._places.at_once(self._caller, identity, model, turn)
            if place is None:
                place = await self._wait(identity, model, turn)
        except BaseException:
            if trial is not None:
                trial.over()
            raise
        tells = not of_sequence and all(each.model == model for each in self._messages)
        timer, over = None, _nothing
        if turn is not None and turn.begins:  # its slot may be another's by now
            timer, over = self._begins(turn, place)
        elif of_sequence:
            timer = asyncio.get_running_loop().call_later(self._places.patience_s, place.set_apart)
        self._decoupled = self._decoupled or bool(decoupled)
        if beside is not None:
            beside.enter(identity.id)
        message = _Message(
            model, path or model, size, place, time.monotonic(), self._taking_s, tells, timer, beside, over, trial
        )
        if trial is not None and trial.patience_s is not None:
            message.trying = asyncio.get_running_loop().call_later(trial.patience_s, self._tried, model)
        self._messages.append(message)

    def _tried(self, model: str) -> None:
        """The model has not answered, and what was left with it is why."""
        self._end(self._places.late(model))

    def held_up(self, model: str, turn: Turn | None) -> AbstractContextManager[None]:
        """While a message waits: if its sequence has a slot, what begins others gives its place back sooner."""
        if turn is None or turn.begins:
            return nullcontext()
        return self._places.gate.begins.held_up(self._places.gate.places(model))

    def _begins(self, turn: Turn, place: Place) -> tuple[asyncio.TimerHandle, Callable[[], None]]:
        """A message that begins a sequence has a place, until its slot is another's: what sees to that, and its end."""
        begins = self._places.gate.begins

        def apart() -> None:
            begins.leave(place.of_model, turn)
            place.set_apart(counts=False)

        def waited() -> None:
            turn.waited()
            apart()

        begins.enter(place.of_model, turn)
        turn.on_wait(apart)
        timer = asyncio.get_running_loop().call_later(min(SLOT_S, self._places.patience_s), waited)
        return timer, lambda: begins.leave(place.of_model, turn)

    async def _wait(self, identity: Identity, model: str, turn: Turn | None) -> Place:
        if self._ended:
            raise ClientGoneError
        waiting = self._waiting = asyncio.ensure_future(self._places.enter(self._caller, identity, model, turn))
        looked_free = turn is not None and turn.begins and not turn.waits
        if turn is not None and looked_free:
            turn.on_wait(waiting.cancel)  # it has no place then
        try:
            with self.held_up(model, turn):
                await asyncio.wait((waiting,))
            if not waiting.cancelled():
                place = waiting.result()
            elif self._ended or not looked_free:
                raise ClientGoneError
            else:
                return self._places.at_once(self._caller, identity, model, turn) or await self._wait(
                    identity, model, turn
                )
        except asyncio.CancelledError:
            if not waiting.cancel() and not waiting.cancelled() and waiting.exception() is None:
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

    def goes_on(self, model: str) -> None:
        """An answer has come that is not its message's last."""
        if not self._decoupled:
            self._decoupled = True
            self._places.knows(model, decoupled=True)
        if (found := self._of(model)) is not None and not found.begun:
            self._first_came(found)

    def answered(self, model: str, *, good: bool, at: Callable[[str], At] = _nowhere) -> None:
        """The last answer of a message has come.

        Args:
            model: that it names; "" where it names none.
            good: whether it is none of an error.
            at: where messages go that ask a model, as far as was told.
        """
        if (found := self._of(model)) is None:
            return
        if good and self._decoupled and not found.begun:
            self._first_came(found)
        self._messages.remove(found)
        seconds = time.monotonic() - found.sent
        tells = good and found.tells and not self._decoupled and self._taking_s - found.taking_s <= SLOW_PART * seconds
        self._leave(found, seconds if tells else None, at)
        if good:
            self._places.knows(found.model, decoupled=False)

    def end(self, after: asyncio.Future[int | None] | None, at: Callable[[str], At] = _nowhere) -> None:
        """The stream is over, and Triton is done with it: now, or after this.

        Args:
            after: gives None where Triton was not done in time.
            at: as of `answered`.
        """
        self._ended = True
        if self._waiting is not None:
            self._waiting.cancel()
        if after is None:
            while self._messages:
                self._leave(self._messages.popleft(), None, at)
            return
        over = []
        for message in self._messages:
            self._over_trying(message, unanswered=True)
            message.place.leaves()
            over.append(self._places.left(message.model))

        def ended(after: asyncio.Future[int | None]) -> None:
            stuck = not after.cancelled() and after.exception() is None and after.result() is None
            while self._messages:
                self._leave(self._messages.popleft(), None, at)
            for each in over:
                each(stuck)

        after.add_done_callback(ended)

    def _of(self, model: str) -> _Message | None:
        """The oldest message to this model; to any, where none is: those that name none come in order."""
        found = next((each for each in self._messages if each.model == model), None)
        return found or (self._messages[0] if self._messages else None)

    def _first_came(self, message: _Message) -> None:
        """Its first answer has come."""
        message.begun = True
        self._places.answered_first(message.model, time.monotonic() - message.sent)
        if message.trial is not None:
            message.trial.answered()
        self._over_trying(message)

    def _over_trying(self, message: _Message, *, unanswered: bool = False) -> None:
        if message.trying is not None:
            message.trying.cancel()
        if message.trial is not None:
            message.trial.over(unanswered=unanswered)
            message.trial = None

    def _leave(self, message: _Message, seconds: float | None, at: Callable[[str], At]) -> None:
        self._over_trying(message)
        if message.timer is not None:
            message.timer.cancel()
        message.over()
        message.place.leave(seconds, message.size, at(message.path))
        if message.beside is not None:
            message.beside.leave()


def _nothing() -> None:
    """Nobody is to be told."""
