"""A token bucket: so many requests a second over any longer time, and so many at once.

Told to clients in the fields of the IETF's "RateLimit header fields for HTTP" (draft-ietf-httpapi-ratelimit-headers).
"""

from __future__ import annotations

import math

__all__ = ["TokenBucket"]

_STATE = b'"key";r=%d;t=%d'


class TokenBucket:
    """Full at first; refilled continuously.

    Args:
        rate: tokens a second.
        burst: tokens that it holds; None takes a second's worth, at least one.
        now: the time, in seconds of a clock that never goes back.
    """

    __slots__ = ("_at", "_lines", "_tokens", "burst", "policy", "rate")

    def __init__(self, rate: float, burst: int | None, now: float) -> None:
        self.rate = rate
        self.burst = burst or max(1, math.ceil(rate))
        self._tokens = float(self.burst)
        self._at = now
        self.policy = b'"key";q=%d;w=%d' % (self.burst, max(1, math.ceil(self.burst / rate)))
        self._lines = b"ratelimit-policy: %b\r\nratelimit: %b\r\n" % (self.policy, _STATE)

    def take(self, now: float, cost: float = 1.0) -> float:
        """Take tokens; 0, or the seconds after which there will be as many.

        Args:
            now: as above.
            cost: how many, at most `burst`.
        """
        tokens = self._tokens + max(0.0, now - self._at) * self.rate
        if tokens > self.burst:
            tokens = float(self.burst)
        self._at = now
        if tokens < cost:
            self._tokens = tokens
            return (cost - tokens) / self.rate
        self._tokens = tokens - cost
        return 0.0

    def give_back(self, count: int) -> None:
        """Tokens that were taken for what was not done; fewer than 0 are owed, beyond what there is."""
        self._tokens = min(float(self.burst), self._tokens + count)

    def left(self, now: float) -> tuple[int, float]:
        """What is left now, below 0 what is owed, and the seconds until all of it is back."""
        self.take(now, 0.0)
        return math.floor(self._tokens), (self.burst - self._tokens) / self.rate

    def state(self) -> bytes:
        """The value of the field RateLimit: what is left, and the seconds until all of it is back."""
        return _STATE % self._left()

    def lines(self) -> bytes:
        """The lines of both fields in an answer's head."""
        return self._lines % self._left()

    def _left(self) -> tuple[int, int]:
        return int(self._tokens), math.ceil((self.burst - self._tokens) / self.rate)
