"""Suspects of one key for one model go one at a time, so that a death tells which of them did it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from serve.gateway.errors import OverloadedError

__all__ = ["MOST_WAITING", "OneAtATime"]

MOST_WAITING = 16  # suspects of one key for one model


@dataclass
class _Queue:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    there: int = 0


class OneAtATime:
    """The queues, by key and model."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, str], _Queue] = {}

    def __len__(self) -> int:
        return len(self._queues)

    async def enter(self, key: str, model: str, patience_s: float) -> None:
        """Wait until no other suspect of the key is with the model; `leave` must follow.

        Raises:
            OverloadedError: it did not come to that in time, or too many wait.
        """
        queue = self._queues.setdefault((key, model), _Queue())
        if queue.there > MOST_WAITING:
            raise _refusal(model)
        queue.there += 1
        try:
            async with asyncio.timeout(patience_s):
                await queue.lock.acquire()
        except BaseException as err:
            self._gone(key, model)
            if isinstance(err, TimeoutError):
                raise _refusal(model) from None
            raise

    def leave(self, key: str, model: str) -> None:
        """It is over: the next one goes."""
        self._queues[key, model].lock.release()
        self._gone(key, model)

    def _gone(self, key: str, model: str) -> None:
        queue = self._queues[key, model]
        queue.there -= 1
        if not queue.there:
            del self._queues[key, model]


def _refusal(model: str) -> OverloadedError:
    return OverloadedError(
        f"the model {model!r} is asked this one at a time",
        why="such a request was in flight when the model's process ended",
        mend="try again when Retry-After says",
    )
