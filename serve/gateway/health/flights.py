"""A request that is with the model server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from serve.gateway.health.fingerprints import Suspect
from serve.http.body import GrowingBody

__all__ = ["ABOARD", "NOWHERE", "NO_NEEDS", "At", "Came", "Flight", "Needed", "Needs", "may_be", "within"]

Needed = Sequence[tuple[str, int]]
"""What has instances of its own, each with how many one server has."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a request keeps at work at a server.

    Attributes:
        instances: models that it may be with, each with how many instances one server has of it.
        all_of_them: whether it is with one after the other; else with the one that it is sent to.
        by_version: whether each version of the model has instances of its own.
        long: whether its key's requests take longer than an answer to others may.
    """

    instances: Mapping[str, int] = field(default_factory=dict)
    all_of_them: bool = False
    by_version: bool = False
    long: bool = False

    def of(self, model: str, path: str) -> Needed:
        """What is needed by one that is sent to a model, as far as is known.

        Args:
            path: of the model, with its version where one was asked for.
        """
        if self.all_of_them:
            return [(each, instances) for each, instances in self.instances.items() if instances]
        instances = self.instances.get(model, 0)
        return [(self.place(model, path), instances)] if instances else ()

    def place(self, model: str, path: str) -> str:
        """Where one is that is sent to a model: what has instances of its own."""
        return path if self.by_version else model


NO_NEEDS = Needs()


class At(NamedTuple):
    """What a request goes to.

    Attributes:
        server: by its name.
        path: of the model that is asked there, by its name, with its version where that was asked for.
    """

    server: str = ""
    path: str = ""


NOWHERE = At()


class Came(NamedTuple):
    """What has come of a request.

    Attributes:
        answered: whether the model's process has said so, whatever it was.
        left: whether it was not waited for.
        sent: whether a server has, or may have, got it.
    """

    answered: bool
    left: bool = False
    sent: bool = True


class Flight:
    """A request that is with the model server.

    Args:
        key: the id of its key.
        model: that is asked, or that answers for it.
        body: that it sends; b"" where it is not to be told from others.

    Attributes:
        left: whether its client did not wait for it any more, or the gateway: the model may be at work on it.
        needs: what it keeps at work, as far as is known.
        server: that has it, by its name; "" where there is one only, or it is not known.
        turn: whether it has its turn.
        lends: whether that ends with another flight.
        borrowers: have its turn, too, and get it where they are under way for longer.
        own: whether the model was asked that it is known by.
        away: whether others were asked in that one's place alone: no process of that one's has it.
        reached: whether a server may have got it, by what came of that model.
        unanswered: whether that model got it and has not answered it, though another may have.
        unsent: whether it was never sent.
        at: what it goes to, as far as was told.
        gone: path of a model that goes on with it while another is asked, or "": where that goes is nothing of its own.
        going_on: each is done when that one is.
        goes_on: whether that has a flight of its own.
        request: the same for all that are of one request, where there are several.
        on_sent: is told of `at`, of the one before and of this one, each time that it goes to one; None for nobody.
    """

    __slots__ = ("__dict__", "body", "key", "left", "model", "sent", "server")  # those that most have; there are many

    behind: tuple[Flight, ...] = ()
    borrowers: tuple[Flight, ...] = ()
    counted = 0
    first = turn = lends = guest = lost = cleared = goes_on = own = away = reached = unanswered = unsent = False
    suspect: Suspect | None = None
    request: object | None = None
    needs = NO_NEEDS
    at = NOWHERE
    on_sent: Callable[[At, At], None] | None = None
    gone = ""
    going_on: tuple[asyncio.Future[Any], ...] = ()
    _owner = ""

    def __init__(self, key: str, model: str, body: bytes | GrowingBody) -> None:
        self.key = key
        self.model = model
        self.body = body
        self.sent = 0.0
        self.left = False
        self.server = ""

    def goes_to(self, at: At) -> None:
        """It goes to this server, for this model."""
        if self.on_sent is not None and at.path != self.gone:
            was, self.at = self.at, at
            self.on_sent(was, at)

    def whole(self) -> object:
        """What all flights of its request have in common."""
        if self.request is None:
            self.request = object()  # not itself, which has a body
        return self.request

    @property
    def owner(self) -> str:
        """Who takes turns with it: its key, or where that is nobody's, itself."""
        return self._owner or self.key

    @owner.setter
    def owner(self, owner: str) -> None:
        self._owner = owner


ABOARD: ContextVar[Flight | None] = ContextVar("aboard", default=None)
"""The request that a task is about."""


def within(model: str, models: Collection[str] | None) -> bool:
    """Whether the model is one of these; None stands for all."""
    return models is None or model in models


def may_be(server: str, which: str) -> bool:
    """Whether this may be that server: where one of the two is not known, it may."""
    return not server or not which or server == which
