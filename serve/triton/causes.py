"""What a death is counted for, which decides how long a new start is waited for."""

from __future__ import annotations

from collections.abc import Sequence

from serve.gateway.health.barred import DEATHS_OF_KEY
from serve.gateway.health.fingerprints import Suspect

__all__ = ["AT_ONCE", "CLIENT", "KEY", "SCARCE", "SERVER", "START", "cause_of", "wait_of"]

SERVER, START, CLIENT, KEY, SCARCE = "server", "start", "client", "key", "scarce"
# Starts in a row without a wait: enough for several keys, each of which is refused after its share. A server that dies
# more often so is not ended by these keys, or by too many of them.
AT_ONCE = 4 * DEATHS_OF_KEY


def cause_of(suspects: Sequence[Suspect], *, asked: bool = False) -> str:
    """What a death is counted for: a key, where all that was in flight is of one; else clients, where any request was,
    or had been answered; else the server itself.

    A hostile client has neighbours in flight whenever it likes, so that a death which several share says no more about
    the server than one of a single client. Who has no key can't be refused, and is no known one. A request may also be
    answered first and end the process a moment later, when nobody's is in flight.

    Args:
        suspects: that were in flight.
        asked: whether the process that died had answered any request.
    """
    keys = {suspect.key for suspect in suspects}
    if len(keys) == 1 and "" not in keys:
        return KEY
    return CLIENT if keys or asked else SERVER


def wait_of(nth: int, first_s: float, longest_s: float) -> float:
    """Seconds before the nth start in a row: each is twice the one before; none before the 0th."""
    return min(first_s * 2.0 ** min(nth - 1, 30), longest_s) if nth > 0 else 0.0  # a power of thousands overflows
