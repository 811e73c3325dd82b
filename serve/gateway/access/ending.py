"""What a gateway that ends waits for, in words."""

from __future__ import annotations

import asyncio
import logging
import time

from serve.gateway.access.gate import OTHERS, Gate

__all__ = ["Ending", "by_model"]

QUIET_S = 1.5  # most ends are over by then
MOST_NAMED = 8  # models
UNANSWERED = "models that have answered nothing yet"
logger = logging.getLogger(__name__)


def by_model(gate: Gate) -> str:
    """The requests that have a place or wait for one, as " (digits: 3, counts: 1)"; "" where there are none."""
    counts = {each.model: sum(own.in_flight + own.waiting for own in each.kinds) for each in gate}
    most = sorted((model for model, count in counts.items() if count), key=lambda model: -counts[model])
    told = [f"{UNANSWERED if model == OTHERS else model}: {counts[model]}" for model in most[:MOST_NAMED]]
    if more := sum(counts[model] for model in most[MOST_NAMED:]):
        told.append(f"others: {more}")
    return f" ({', '.join(told)})" if told else ""


class Ending:
    """Tells, from when a gateway takes no new requests until it has ended, what it waits for, if it does for long.

    Args:
        gate: has the requests of each model.
        seconds: that it waits at most.
    """

    def __init__(self, gate: Gate, seconds: float) -> None:
        self._gate = gate
        self._seconds = seconds
        self._began = time.monotonic()
        self._told = False
        self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        await asyncio.sleep(min(QUIET_S, self._seconds / 2))
        self._told = True
        logger.warning(
            "the gateway waits for requests in flight%s, for at most %g s; told once more, it ends at once",
            by_model(self._gate),
            self._seconds,
        )

    def over(self) -> None:
        """The gateway has ended."""
        self._telling.cancel()
        if self._told:
            logger.warning("the gateway has ended, after %.0f s", time.monotonic() - self._began)
