"""When a request begins that is counted for no key: health, pages, and what is refused for want of a key.

A round of the event loop serves each connection that has something to say before it looks at anybody again. Where a few
hundred of them ask as often as they can, it takes so long that nobody else gets far. So few such requests begin at a
time, and a pause later the next; they wait by address in turns. Nothing is refused.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from starlette.types import Scope

from serve.gateway.access.identity import KeyRing
from serve.gateway.access.path import take_path
from serve.gateway.edge.guard import FREE, key_headers
from serve.gateway.edge.turns import Turns
from serve.gateway.errors import GatewayError

__all__ = ["MOST_BEGUN", "PAUSE_S", "Rounds"]

MOST_BEGUN = 8  # at a time; each takes about 0.25 ms
PAUSE_S = 0.004  # before the next: what is counted for no key gets a third of a core
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

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def begin(self, address: str, who: object, scope: Scope, call: Callable[[], None], *, known: bool = False) -> None:
        """Have a request begun: now, where there is room or a key pays for it, else in its address' turn.

        Args:
            address: what the client is bounded by.
            who: its connection, which has one such request at a time; `leave` takes it back.
            scope: of the request.
            call: begins it.
            known: whether the connection's last request had a key.
        """
        if self._begun < self._most:  # then nobody waits
            self._begun += 1
            self._go_on()
            call()
        elif self._is_paid_for(scope, known=known):
            call()
        else:
            self._waiting.add(address, who, call)

    def leave(self, address: str, who: object) -> None:
        """A connection has ended: what waits of it is not begun."""
        self._waiting.drop(address, who)

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

    def _is_paid_for(self, scope: Scope, *, known: bool) -> bool:
        """Whether a request will be counted for a key: by its rate, or among what that asks besides inference.

        Where no key is asked for, models are what anybody may ask: their places are what bounds that.
        """
        if (known or self._keys.open) and INFERENCE.fullmatch(scope["raw_path"]):  # as nearly all
            return True
        try:
            # Of a copy: who answers the request looks at its path as it came.
            if FREE.fullmatch(take_path({"raw_path": scope["raw_path"]})):
                return False
            self._keys.identify(key_headers(scope["headers"]))
        except GatewayError:
            return False
        return True
