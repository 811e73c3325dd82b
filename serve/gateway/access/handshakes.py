"""How many TLS handshakes an address may begin: each costs a signature, which nobody else waits for.

Whoever replays one recorded greeting pays nothing. What one costs here depends on the certificate's key, and is
measured at the start.
"""

from __future__ import annotations

import ssl
import time
from collections import OrderedDict

from serve.gateway.access.addresses import bounded_by

__all__ = ["Handshakes", "handshake_s"]

SHARE = 0.25  # of a core, for one address
AT_ONCE_S = 4.0  # whose handshakes an address may begin at once
AROUND_S = 0.0003  # that a connection takes besides its handshake
TRIES = 3
UNKNOWN_S = 0.005
MOST_ADDRESSES = 65_536


class Handshakes:
    """The handshakes of one gateway, by address (of IPv6: by network of 64 bits).

    Args:
        cost_s: of one, in seconds of a core.
        bounded: whether addresses are bounded; behind a proxy, all clients have the same.

    Attributes:
        rate, burst: that an address may begin in a second, and at once.
        cost_s: of one, with what a connection takes besides.
        refused: how many were.
    """

    def __init__(self, cost_s: float, *, bounded: bool = True) -> None:
        each = cost_s + AROUND_S
        self.rate = SHARE / each
        self.burst = max(1.0, AT_ONCE_S * self.rate)
        self.cost_s = each
        self.refused = 0
        self._bounded = bounded
        # Tokens and the time that they were counted at; the latest last. What is not there has all of them.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._left)

    def may(self, host: str) -> bool:
        """Whether an address may begin one now, which is counted."""
        if not self._bounded:
            return True
        now = time.monotonic()
        address = bounded_by(host)
        tokens, at = self._left.pop(address, (self.burst, now))
        tokens = min(self.burst, tokens + (now - at) * self.rate)
        may = tokens >= 1
        self._left[address] = (tokens - 1 if may else tokens, now)
        self._forget(now)
        self.refused += not may
        return may

    def _forget(self, now: float) -> None:
        """Those that have all of their tokens again."""
        while self._left:
            address, (_, at) = next(iter(self._left.items()))
            if now - at < AT_ONCE_S and len(self._left) <= MOST_ADDRESSES:
                return
            del self._left[address]


def handshake_s(context: ssl.SSLContext) -> float:
    """What a server's half of a handshake takes, in seconds of a core: the least of a few."""
    try:
        return min(_one(context) for _ in range(TRIES))
    except ssl.SSLError:  # a context that no client of ours agrees with
        return UNKNOWN_S


def _one(context: ssl.SSLContext) -> float:
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = asking.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    took = 0.0
    for _ in range(4):  # flights
        if _is_done(client) and took:
            begun = time.thread_time()
            _is_done(server)
            return took + time.thread_time() - begun
        begun = time.thread_time()
        _is_done(server)
        took += time.thread_time() - begun
    return took


def _is_done(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
