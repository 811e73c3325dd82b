"""One bound for all that clients make a gateway hold: bodies, answers, connections, streams.

Bytes are counted as they come, not as they are announced: who announces much and sends nothing takes no room from
others; who has announced more than there is room for is refused before it is read. What would go over the bound is
refused with 503 (RESOURCE_EXHAUSTED over gRPC), and everybody else goes on.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.gateway.access.handshakes import Handshakes
from serve.gateway.errors import OverloadedError

__all__ = ["CONNECTION_BYTES", "SMALL_BYTES", "LastingShare", "Memory", "MemoryFullError", "Share"]

CONNECTION_BYTES = 16 * 1024
SMALL_BYTES = 64 * 1024


class MemoryFullError(OverloadedError):
    """The gateway holds as much as it may; of what was sent, there was no room for the answer."""

    closes = True
    sent = True

    def __init__(self, bound: int) -> None:
        super().__init__(
            "the gateway holds as much as it may",
            why=f"bodies and answers on their way are bounded to {bound} bytes together",
            mend="try again when Retry-After says, or send less at a time",
        )


class Memory(Collector):
    """The bound of one gateway.

    Args:
        bound: bytes.

    Attributes:
        used: bytes that are held now.
        long: of these, of long requests. Some are there before they can be asked for, and may be more than there is
            room for: short ones have what is theirs all the same.
        connections: those of clients, of which a quarter of the bound may be made.
        most_connections: that there may be, however much room there is.
        most_of_address: that one address may have of them.
        refused: how often there was no room; refused_connections: of these, for a connection.
        refused_addresses: how often one address had as many connections as it may.
        refused_frames: connections closed for what they sent: it took too long to parse, brought nothing, or too much
            of it waited.
        handshakes: bounds those of TLS, if there are any.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.used = self.long = 0
        self.connections = 0
        self.most_connections = sys.maxsize
        self.most_of_address = sys.maxsize
        self.refused = self.refused_connections = self.refused_addresses = self.refused_frames = 0
        self.handshakes: Handshakes | None = None
        self._by_key: Counter[str] = Counter()
        self._by_address: Counter[str] = Counter()

    @property
    def most_long(self) -> int:
        """Bytes that long requests may have."""
        return self.bound - self.bound // 8

    @property
    def most_of_one(self) -> int:
        """Bytes that one answer may have: as many as its key may hold."""
        return self.bound // 2

    def take(self, size: int, *, small: bool) -> None:
        """Hold so many bytes more; raises MemoryFullError.

        Args:
            size: bytes.
            small: whether it is for a short request: those have the last eighth of the bound for themselves.
        """
        if not (self.has_small(size) if small else self.used + size <= self.most_long):
            self.refused += 1
            raise MemoryFullError(self.bound)
        self.used += size
        if not small:
            self.long += size

    def has_small(self, size: int) -> bool:
        """Whether there is room for so many bytes of a short request."""
        return self.used - max(0, self.long - self.most_long) + size <= self.bound

    def has_long(self, key: str, size: int) -> bool:
        """The same, of a long one of a key."""
        return self.used + size <= self.most_long and self.may_have(key, size)

    def may_have(self, key: str, size: int) -> bool:
        """Whether a key would have no more than it may, whatever others have."""
        return self._by_key[key] + size <= self.bound // 2

    def try_small(self, size: int) -> bool:
        """Hold so many bytes of a short request, if there is room; to be given back by `give_small`."""
        if self.used + size > self.bound and not self.has_small(size):
            return False
        self.used += size
        return True

    def give_small(self, size: int) -> None:
        """As above."""
        self.used -= size

    def take_for(self, key: str, size: int) -> None:
        """Count it for a key, of long requests; no key may have more than half of the bound. Raises MemoryFullError."""
        if self._by_key[key] + size > self.bound // 2:
            self.refused += 1
            raise MemoryFullError(self.bound // 2)
        self._by_key[key] += size

    def check_for(self, key: str, size: int) -> None:
        """Whether a key may have so many bytes of a long answer wait for its reader; raises MemoryFullError."""
        if key and size > SMALL_BYTES and self._by_key[key] + size > self.bound // 2:
            self.refused += 1
            raise MemoryFullError(self.bound // 2)

    def hold_for(self, key: str, size: int) -> None:
        """Count for a key what is there already."""
        self._by_key[key] += size

    def give_for(self, key: str, size: int) -> None:
        """What was counted for a key is no longer held."""
        self._by_key[key] -= size
        if not self._by_key[key]:
            del self._by_key[key]

    def connect(self) -> bool:
        """Whether there is room for one more connection; `disconnect` gives it back."""
        if self.connections >= self.most_connections or (self.connections + 1) * CONNECTION_BYTES > self.bound // 4:
            self.refused += 1
            self.refused_connections += 1
            return False
        self.connections += 1
        self.used += CONNECTION_BYTES
        return True

    def disconnect(self) -> None:
        self.connections -= 1
        self.used -= CONNECTION_BYTES

    def connect_from(self, address: str) -> bool:
        """Whether an address may have one more connection; `disconnect_from` gives it back.

        Args:
            address: or network of such; "" is nobody's, and not bounded.
        """
        if address and self._by_address[address] >= self.most_of_address:
            self.refused_addresses += 1
            return False
        self._by_address[address] += 1
        return True

    def disconnect_from(self, address: str) -> None:
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def collect(self) -> Iterator[Metric]:
        """Prometheus metrics."""
        yield GaugeMetricFamily("gateway_memory_bytes", "Bytes held for requests and answers.", self.used)
        yield GaugeMetricFamily("gateway_memory_bound_bytes", "Most of them.", self.bound)
        yield CounterMetricFamily("gateway_memory_refused", "Refusals for want of room.", self.refused)
        refused = CounterMetricFamily(
            "gateway_connections_refused",
            "Connections refused: there were too many in all, or of one address, or TLS handshakes of one.",
            labels=["why"],
        )  # fmt: skip
        refused.add_metric(["all"], self.refused_connections)
        refused.add_metric(["address"], self.refused_addresses)
        refused.add_metric(["handshakes"], 0 if self.handshakes is None else self.handshakes.refused)
        yield refused
        yield CounterMetricFamily(
            "gateway_connections_cut",
            "Connections closed for what they sent: tiny chunks, TLS records of nothing, or too much that waits.",
            self.refused_frames,
        )


class Share:
    """What one request holds; given back by `close`, which must follow, and after which nothing counts any more.

    Args:
        memory: of which it is a share.
        key: the id of its key, "" for none.
    """

    __slots__ = ("_closed", "_key", "_memory", "_of_key", "_over", "size")

    def __init__(self, memory: Memory, key: str = "") -> None:
        self._memory = memory
        self._key = key
        self._of_key = 0
        self._closed = False
        self._over: Callable[[], object] | None = None
        self.size = 0

    @property
    def key(self) -> str:
        """For whom it counts."""
        return self._key

    def take(self, size: int) -> None:
        """Hold so many bytes more; raises MemoryFullError."""
        if self._closed:  # what still comes of a request that is over is not kept
            return
        memory = self._memory
        held = self.size + size
        small = held <= SMALL_BYTES
        if small and memory.used + size <= memory.bound:  # as nearly all are
            memory.used += size
            self.size = held
            return
        if self._key and not small:
            memory.take_for(self._key, size)
            self._of_key += size
        memory.take(size, small=small)
        if not small and self.size <= SMALL_BYTES:
            memory.long += self.size
        self.size = held

    def fits(self, size: int) -> bool:
        """Whether there is room for so many bytes more."""
        return self._closed or size <= SMALL_BYTES or self._memory.has_long(self._key, size)

    def crowded(self, size: int) -> bool:
        """Whether others have the room for so many bytes more, which its key might have."""
        if self._closed or not self._key or size <= SMALL_BYTES:
            return False
        return self._memory.used + size > self._memory.most_long and self._memory.may_have(self._key, size)

    def at_close(self, call: Callable[[], object]) -> None:
        """Have something called then: what was counted, and is still coming, has to end with it."""
        self._over = call

    def beside(self) -> Share:
        """Another one, which counts for no key."""
        return Share(self._memory)

    def check(self, size: int) -> None:
        """Whether there is room for so many bytes, now; raises MemoryFullError."""
        before, counted = self.size, self._of_key
        self.take(size)
        self.resize(before)
        if self._key and self._of_key > counted:
            self._memory.give_for(self._key, self._of_key - counted)
            self._of_key = counted

    def resize(self, size: int) -> None:
        """Hold so many bytes in all, which are there already; a key is never counted for more than these."""
        if self._closed:
            return
        if self._of_key > size:
            self._memory.give_for(self._key, self._of_key - size)
            self._of_key = size
        self._memory.used += size - self.size
        self._memory.long += (size if size > SMALL_BYTES else 0) - (self.size if self.size > SMALL_BYTES else 0)
        self.size = size

    def hold(self, size: int) -> None:
        """Hold so many bytes in all, which are there already and all count for the key."""
        self.resize(size)
        if self._key and size > self._of_key and not self._closed:
            self._memory.hold_for(self._key, size - self._of_key)
            self._of_key = size

    def close(self) -> None:
        """Give it all back."""
        self._closed = True
        if self._over is not None:
            call, self._over = self._over, None
            call()
        if self.size:
            self._memory.used -= self.size
            if self.size > SMALL_BYTES:
                self._memory.long -= self.size
            self.size = 0
        if self._of_key:
            self._memory.give_for(self._key, self._of_key)
            self._of_key = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LastingShare(Share):
    """One that is given back when nobody has it any more."""

    __slots__ = ()

    def __del__(self) -> None:
        self.close()
