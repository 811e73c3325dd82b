"""How many tokens of texts a key may have read in a minute, told as OpenAI's API tells it.

How many a text is, its model says with the answer. Until then it counts for an estimate: by its bytes, and what the
key's texts came to before. What was estimated too low is owed: nothing more goes until a minute's rate has paid for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from serve.gateway.access.rate_limit import TokenBucket

__all__ = ["TokenRate"]

OF_A_BYTE = 1 / 4  # tokens at least: English has some four letters to one
ADDED = 2  # to each text, for its beginning and end
FADES = 8


class TokenRate:
    """Of one key.

    Args:
        per_minute: tokens; as many may be asked for at once.
        now: the time, in seconds of a clock that never goes back.
    """

    __slots__ = ("_bucket", "_of_a_byte", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._bucket = TokenBucket(per_minute / 60, per_minute, now)
        self._of_a_byte = OF_A_BYTE

    def estimate(self, sizes: Sequence[int]) -> int:
        """Tokens of texts of so many bytes."""
        return ADDED * len(sizes) + math.ceil(self._of_a_byte * sum(sizes))

    def take(self, count: int, now: float) -> float:
        """Take as many, at most `per_minute`; 0, or the seconds after which there will be as many."""
        return self._bucket.take(now, count)

    def give_back(self, count: int) -> None:
        """Of those that were taken, what was not asked for."""
        self._bucket.give_back(count)

    def settle(self, taken: int, read: int, sizes: Sequence[int]) -> None:
        """A request was answered: count what its model has read in place of what was taken."""
        self._bucket.give_back(taken - read)
        if size := sum(sizes):
            seen, known = max(0, read - ADDED * len(sizes)) / size, self._of_a_byte
            self._of_a_byte = max(OF_A_BYTE, seen if seen > known else known - (known - seen) / FADES)

    def fields(self, now: float) -> list[tuple[bytes, bytes]]:
        """The header fields of an answer, with OpenAI's names and units."""
        left, reset_s = self._bucket.left(now)
        return [
            (b"x-ratelimit-limit-tokens", b"%d" % self.per_minute),
            (b"x-ratelimit-remaining-tokens", b"%d" % max(0, left)),
            (b"x-ratelimit-reset-tokens", _duration(reset_s)),
        ]


def _duration(seconds: float) -> bytes:
    """As Go writes durations, and OpenAI's API: 12ms, 1.5s, 6m0s."""
    if seconds < 1:
        return b"%dms" % math.ceil(1000 * seconds)
    minutes, rest = divmod(math.ceil(10 * seconds), 600)
    told = f"{rest / 10:g}s"
    return (f"{minutes}m{told}" if minutes else told).encode()
