"""How much of the event loop clients' frames may have: what is cheap to send, and dear to parse.

One read brings 256 KiB, and may be followed by others in the same round. As chunks of one byte that is 40,000 calls
from the parser for each read; so are the fields of heads, trailers, and pipelined requests. So a connection is read
on only as far as it has been parsed; it is parsed in slices of a few lines, as each such call needs a line; and beyond
a request's first few calls, the slices of all connections have so many calls in a time, by address in turns. What a
body of known length brings is one call, however long it is, and waits for nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

from serve.gateway.access.memory import Memory
from serve.gateway.edge.turns import Turns

__all__ = ["FREE_CALLS", "MOST_CALLS", "SLICE_LINES", "Flow", "Parsing", "slice_end"]

SLICE_LINES = 64
FREE_CALLS = 64  # of a request that nothing waits before: those of nearly all requests
MOST_CALLS = 1024  # from the parser, in a pause; each takes half a microsecond, and more where a request begins
PAUSE_S = 0.004
BEGINNING = 16  # calls that the beginning of a request is worth
SLICE = re.compile(rb"(?:[^\n]*+\n){%d}" % SLICE_LINES)


def slice_end(data: bytes, begin: int) -> int:
    """Where the parser, given `data` from `begin`, has made at most SLICE_LINES calls for lines."""
    found = SLICE.match(data, begin)
    return len(data) if found is None else found.end()


class Flow(FlowControl):
    """uvicorn's, that reads no further, either, while something that was read is not parsed."""

    held = False

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            if not self.held:
                self._transport.resume_reading()

    def hold(self) -> None:
        if not self.held:
            self.held = True
            self._transport.pause_reading()

    def go_on(self) -> None:
        if self.held:
            self.held = False
            if not self.read_paused:
                self._transport.resume_reading()


class Parsing:
    """The turns of one gateway's connections at their parsers, or at what decrypts for them.

    Args:
        memory: counts what waits, of which there is an eighth of its bound at most, half of that of one address.
        most: calls from parsers in a pause, or what is counted in their place.
    """

    def __init__(self, memory: Memory, most: int = MOST_CALLS) -> None:
        self._memory = memory
        self._most = most
        self._spent = 0
        self._turning = False
        self._waiting = Turns()
        self._sizes: dict[object, int] = {}
        self._of_address: Counter[str] = Counter()
        self._held = 0

    @property
    def waiting(self) -> int:
        """Connections that wait."""
        return len(self._waiting)

    @property
    def free(self) -> bool:
        """Whether a slice may be parsed now."""
        return self._spent < self._most and not self._waiting

    def spend(self, calls: int) -> None:
        """So many were made."""
        self._spent += calls
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_later(PAUSE_S, self._turn)

    def wait(self, address: str, who: object, size: int, call: Callable[[], None]) -> bool:
        """Have the next slice parsed in its turn; False where too much waits already.

        Args:
            address: what the client is bounded by.
            who: its connection.
            size: bytes that wait.
            call: parses one slice at least, and may wait anew.
        """
        self._count(address, who, size)
        bound = self._memory.bound // 8
        if self._held > bound or self._of_address[address] > bound // 2 or not self._memory.has_small(0):
            self._memory.refused_frames += 1
            self.leave(address, who)
            return False
        self._waiting.add(address, who, call)
        self.spend(0)
        return True

    def refuse(self) -> None:
        """A connection ends for what it sent; it is counted."""
        self._memory.refused_frames += 1

    def leave(self, address: str, who: object) -> None:
        """Nothing of a connection waits any more: it is parsed, or has ended."""
        self._waiting.drop(address, who)
        self._count(address, who, 0)

    def _count(self, address: str, who: object, size: int) -> None:
        more = size - self._sizes.pop(who, 0)
        if size:
            self._sizes[who] = size
        self._held += more
        self._memory.used += more
        self._of_address[address] += more
        if not self._of_address[address]:
            del self._of_address[address]

    def _turn(self) -> None:
        self._turning = False
        self._spent = max(0, self._spent - self._most)
        while self._waiting and self._spent < self._most:
            self._waiting.next()()
        if self._spent or self._waiting:
            self.spend(0)
