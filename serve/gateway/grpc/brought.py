"""What connections over gRPC bring besides calls: the library reads frames of none for as long as they come.

Headers that never end, pings, windows, kinds that nobody knows: a socket without a key kept a core busy with them. The
library tells of none, but the system counts the bytes that a connection has brought. What calls account for is taken
off; a connection that brings much more is ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from urllib.parse import unquote

from serve.gateway.access.addresses import plain

__all__ = ["Brought", "Client", "client_of"]

CALL_BYTES = 128 * 1024  # that a call may bring: its headers, and what it sends that nobody reads
AHEAD_BYTES = 16 * 1024 * 1024  # of messages that the library has, and nobody has read
SPARE_BYTES = 32 * 1024 * 1024  # that a connection may bring beyond its calls
SPARE_EACH_S = 1024 * 1024  # and in each second
Client = tuple[str, int]


class Brought:
    """Counts it; `begins` and `message` are of the event loop, `over` may be of another thread.

    Args:
        longest: message of a call, in bytes, which may be on its way.
    """

    def __init__(self, longest: int) -> None:
        self._of_call = longest + AHEAD_BYTES
        self._calls: Counter[Client] = Counter()  # under way
        self._accounted: Counter[Client] = Counter()  # bytes, ever
        self._unseen: frozenset[Client] = frozenset()
        self._seen: dict[Client, tuple[int, int, int]] = {}  # received, accounted, and what was too much

    def begins(self, peer: str) -> Client | None:
        """A call was taken up, as gRPC names its connection; `ends` must follow with what this gives."""
        client = client_of(peer)
        if client is not None:
            self._calls[client] += 1
            self._accounted[client] += CALL_BYTES
        return client

    def ends(self, client: Client | None) -> None:
        """A call is over."""
        if client is not None:
            self._calls[client] -= 1
            if not self._calls[client]:
                del self._calls[client]

    def message(self, peer: str, size: int) -> None:
        """A message of a call was read, of so many bytes."""
        client = client_of(peer)
        if client is not None:
            self._accounted[client] += size

    def over(self, received: Mapping[Client, int], seconds: float) -> set[Client]:
        """Connections that have brought too much.

        Args:
            received: bytes of all that there are, since they began.
            seconds: since the last look.
        """
        found, seen = set(), {}
        for client, size in received.items():
            accounted = self._accounted.get(client, 0)
            size_before, accounted_before, more = self._seen.get(client, (0, 0, 0))
            if size < size_before or accounted < accounted_before:  # another one, of the same port
                size_before = accounted_before = more = 0
            more += size - size_before - (accounted - accounted_before) - int(seconds * SPARE_EACH_S)
            seen[client] = size, accounted, max(0, more)
            if more > SPARE_BYTES + self._calls.get(client, 0) * self._of_call:
                found.add(client)
        self._seen = seen
        return found

    def forget(self) -> None:
        """Those that were not there twice have gone."""
        unseen = frozenset(each for each in self._accounted if each not in self._seen and each not in self._calls)
        for client in unseen & self._unseen:
            del self._accounted[client]
        self._unseen = unseen


def client_of(peer: str) -> Client | None:
    """Address and port of what gRPC names, as in ipv4:10.0.0.1:4711 and ipv6:%5B::1%5D:4711; None for other kinds."""
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return plain(host.strip("[]")), int(port)
