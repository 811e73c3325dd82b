"""What connections have brought of messages that nobody has read: gRPC's library holds it, and tells of none of it.

The system counts the bytes that each connection has brought. What calls have read is taken off, and so is what frames,
headers and windows may take; the rest is counted for whoever called last over the connection, as if it had been read.
A caller who has too much of it in the library loses the connections with the most: a call can't be ended so that the
library drops what it has. When a call ends, what the library had of it is gone; how much of its connection's that was
nobody tells, and one that brought nothing would free what others brought. So nothing is taken off before no call of
the connection is under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from serve.gateway.access.long_work import LONG_BYTES, LongWork
from serve.gateway.access.memory import SMALL_BYTES, Memory, Share
from serve.gateway.grpc.brought import Client, client_of

__all__ = ["Coming"]

# What a call brings beside its messages, on the whole: what it may bring at most, short calls would save up for others.
CALL_BYTES = 512
FRAMES, EACH_BYTES = 64, 64  # one byte for so many, and bytes for each message or answer: frames, windows, TLS records
SLACK_BYTES = 1024 * 1024  # that a caller may be counted for wrongly


class Coming:
    """Counts it, in the event loop.

    Args:
        memory: of the gateway.
        long_work: is told who has long messages, before one is whole; one of its own by default.
    """

    def __init__(self, memory: Memory, long_work: LongWork | None = None) -> None:
        self._memory = memory
        self._long_work = long_work or LongWork()
        self._of: dict[Client, _Connection] = {}  # those that have had calls
        self._seen: Mapping[Client, int] = {}
        self._under_way = 0

    @property
    def some(self) -> bool:
        """Whether there are calls."""
        return bool(self._under_way)

    def calls(self, peer: str, caller: str) -> Callable[[object], None]:
        """A call was taken up, as gRPC names its connection, of a key or an address; what this gives ends it."""
        client = client_of(peer)
        if client is None:
            return lambda _: None
        connection = self._of.get(client)
        if connection is None:
            connection = self._of[client] = _Connection(Share(self._memory, caller), self._seen.get(client, 0))
        elif not connection.under_way and connection.share.key != caller:
            connection.share = Share(self._memory, caller)
        connection.credit += CALL_BYTES
        return self._begins(connection)

    def stays(self, peer: str) -> Callable[[object], None]:
        """A call is over, and the library still has what came of its message, until what this gives is called."""
        client = client_of(peer)
        connection = None if client is None else self._of.get(client)
        return (lambda _: None) if connection is None else self._begins(connection)

    def unread(self, peer: str) -> int:
        """Bytes of a connection that nobody had read when it was last looked at."""
        client = client_of(peer)
        connection = None if client is None else self._of.get(client)
        return 0 if connection is None else connection.unread

    def _begins(self, connection: _Connection) -> Callable[[object], None]:
        connection.under_way += 1
        self._under_way += 1
        return lambda _: self._ends(connection)

    def _ends(self, connection: _Connection) -> None:
        connection.under_way -= 1
        self._under_way -= 1
        if not connection.under_way:
            connection.count(0)

    def moved(self, peer: str, message: int, answer: int = 0) -> None:
        """A message was read, or an answer goes out, of so many bytes."""
        client = client_of(peer)
        connection = None if client is None else self._of.get(client)
        if connection is not None:
            brought = min(message, connection.unread)
            connection.count(connection.unread - brought)
            connection.credit += message - brought + (message + answer) // FRAMES + EACH_BYTES

    def count(self, received: Mapping[Client, int]) -> set[Client]:
        """The connections to end.

        Args:
            received: bytes of all connections that there are, since they began.
        """
        self._seen = received
        by_caller: Counter[str] = Counter()
        under_way: Counter[str] = Counter()
        for client, connection in list(self._of.items()):
            if client in received:
                connection.has_brought(received[client])
            elif not connection.under_way:
                del self._of[client]
            by_caller[connection.share.key] += connection.unread  # it may have gone, and the library still have it
            under_way[connection.share.key] += connection.under_way
        for caller, unread in by_caller.items():
            if unread >= LONG_BYTES * max(1, under_way[caller]):  # so one of the messages is as long at least
                self._long_work.had(caller)
        return self._too_much(by_caller, received)

    def _too_much(self, by_caller: Counter[str], there: Mapping[Client, int]) -> set[Client]:
        """Those with the most, of a caller that has more than half of the bound or, where all that is held is over it,
        of the caller with the most."""
        ended: set[Client] = set()
        most, over = self._memory.bound // 2 + SLACK_BYTES, self._memory.used - self._memory.bound
        found = ((each.unread, client) for client, each in self._of.items() if each.unread and client in there)
        largest = sorted(found, reverse=True)
        for unread, client in largest:
            caller = self._of[client].share.key
            of_caller = by_caller[caller]
            if of_caller > most or (over > 0 and SMALL_BYTES < of_caller == max(by_caller.values())):
                by_caller[caller] -= unread
                over -= unread
                ended.add(client)
        return ended


class _Connection:
    """One that has calls.

    Args:
        share: counts what is unread of it, for who opened the first of the calls that are under way.
        received: bytes that it had brought before.

    Attributes:
        under_way: calls.
        credit: bytes not seen yet that are accounted for.
        unread: bytes.
    """

    __slots__ = ("_received", "credit", "share", "under_way", "unread")

    def __init__(self, share: Share, received: int) -> None:
        self.share = share
        self.under_way = self.credit = self.unread = 0
        self._received = received

    def has_brought(self, received: int) -> None:
        """So many bytes since it began."""
        new, self._received = received - self._received, received
        if new < 0:  # another one, of the same port
            new = received
        self.count(self.unread + new - self.credit if self.under_way else 0)
        self.credit = 0

    def count(self, unread: int) -> None:
        self.unread = max(0, unread)
        if self.unread > SMALL_BYTES:
            self.share.hold(self.unread)
        else:
            self.share.resize(self.unread)
