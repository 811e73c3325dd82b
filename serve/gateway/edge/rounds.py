"""When a request begins that goes the long way.

A round of the event loop serves each connection that has something to say before it looks at anybody again. Where a few
hundred of them ask as often as they can, it takes so long that nobody else gets far. Of what is counted for no key
(health, pages, what is refused for want of a key) few requests begin at a time, and a pause later the next; they wait
by address in turns. Of each key a few begin in a round, and what is more in the rounds that follow, with no pause: what
a key asks, and be it refused, takes its share of each round, and no more. Nothing is refused here.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from itertools import islice

from starlette.types import Scope

from serve.gateway.access.identity import KeyRing
from serve.gateway.access.path import take_path
from serve.gateway.edge.guard import FREE, key_headers
from serve.gateway.edge.turns import Turns
from serve.gateway.errors import GatewayError

__all__ = ["MOST_BEGUN", "OF_A_KEY", "PAUSE_S", "Rounds"]

MOST_BEGUN = 8  # at a time; each takes about 0.25 ms
PAUSE_S = 0.004  # before the next: what is counted for no key gets a third of a core
OF_A_KEY = 3  # in a round of the loop; each takes from 0.25 ms to 1 ms
INFERENCE = re.compile(
    rb"/v2/models/[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/versions/[0-9]+)?/infer|/predict/[A-Za-z0-9_][A-Za-z0-9_.-]*|/v1/(?:embeddings|rerank)"
)


class Rounds:
    """The rounds of one gateway.

    Args:
        keys: those that requests are counted for.
        most: that begin at a time.
    """

    def __init__(self, keys: KeyRing, most: int = MOST_BEGUN) -> None:
        self._keys = keys
        self._most = most
        self._begun = 0
        self._turning = False
        self._waiting = Turns()
        self._of_key: Counter[str] = Counter()  # begun in this round of the loop
        self._queues: dict[str, OrderedDict[object, Callable[[], None]]] = {}
        self._payers: dict[object, str] = {}  # of whom something waits in a key's queue

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting) + len(self._payers)

    def begin(self, address: str, who: object, scope: Scope, call: Callable[[], None]) -> None:
        """Have a request begun: now, where there is room, else in its key's turn, or its address' where no key pays.

        Args:
            address: what the client is bounded by.
            who: its connection, which has one such request at a time; `leave` takes it back.
            scope: of the request.
            call: begins it.
        """
        if (payer := self._payer(address, scope)) is not None:
            self._begin_paid(payer, who, call)
        elif self._begun < self._most:  # then nobody waits
            self._begun += 1
            self._go_on()
            call()
        else:
            self._waiting.add(address, who, call)

    def leave(self, address: str, who: object) -> None:
        """A connection has ended: what waits of it is not begun."""
        if (payer := self._payers.pop(who, None)) is not None:
            self._drop_from(payer, who)
        self._waiting.drop(address, who)

    def _begin_paid(self, payer: str, who: object, call: Callable[[], None]) -> None:
        if not self._of_key:
            asyncio.get_running_loop().call_soon(self._next_round)
        if self._of_key[payer] < OF_A_KEY:
            self._of_key[payer] += 1
            call()
        else:
            self._queues.setdefault(payer, OrderedDict())[who] = call
            self._payers[who] = payer

    def _next_round(self) -> None:
        """Those that wait begin before what has just come, some of each key."""
        self._of_key.clear()
        for payer, calls in list(self._queues.items()):
            for who in list(islice(calls, OF_A_KEY)):
                call = calls[who]
                del self._payers[who]
                self._drop_from(payer, who)
                self._of_key[payer] += 1
                call()
        if self._of_key:
            asyncio.get_running_loop().call_soon(self._next_round)

    def _drop_from(self, payer: str, who: object) -> None:
        calls = self._queues[payer]
        del calls[who]
        if not calls:
            del self._queues[payer]

    def _go_on(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_later(PAUSE_S, self._turn)

    def _turn(self) -> None:
        self._turning, self._begun = False, 0
        while self._waiting and self._begun < self._most:
            self._begun += 1
            self._waiting.next()()
        if self._begun:
            self._go_on()

    def _payer(self, address: str, scope: Scope) -> str | None:
        """For whom a request will be counted: a key's id, by its rate or among what it asks besides inference.

        Where no key is asked for, models are what anybody may ask, each address for itself. None for nobody.
        """
        inference = INFERENCE.fullmatch(scope["raw_path"]) is not None  # as nearly all
        try:
            # Of a copy: who answers the request looks at its path as it came.
            if not inference and FREE.fullmatch(take_path({"raw_path": scope["raw_path"]})):
                return None
            identity = self._keys.identify(key_headers(scope["headers"]))
        except GatewayError:
            return None
        return address if self._keys.open else identity.id
