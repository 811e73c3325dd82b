"""How long a request may take: the gateway's time-out, or less where the client says so."""

from __future__ import annotations

from serve.gateway.errors import BadRequestError, UpstreamTimeoutError

__all__ = ["SHORT_OF", "TIMEOUT_HEADER", "EarlyTimeoutError", "patience_s", "tells"]

TIMEOUT_HEADER = b"x-request-timeout-ms"
SHORTEST_MS, LONGEST_MS = 1, 10**9
SHORT_OF = 0.9


class EarlyTimeoutError(UpstreamTimeoutError):
    """The client's own deadline came before the model server had as long as it may take.

    It says nothing of the server: not to the admission limit, not to outlier detection, not to a rollout.
    """


def tells(given_s: float, timeout_s: float) -> bool:
    """Whether a time-out says something of the model server: it had the gateway's own time, but for a wait in line.

    Args:
        given_s: that the server was given.
        timeout_s: the gateway's own.
    """
    return given_s >= SHORT_OF * timeout_s


def patience_s(value: bytes | None, timeout_s: float) -> float:
    """Seconds that a request may take.

    Args:
        value: of the header X-Request-Timeout-Ms.
        timeout_s: the gateway's own.

    Raises:
        BadRequestError: it is no number of milliseconds.
    """
    if value is None:
        return timeout_s
    if not (value.isdigit() and len(value) <= 10 and SHORTEST_MS <= int(value) <= LONGEST_MS):
        raise BadRequestError(
            "X-Request-Timeout-Ms can't be read", why="it is no number of milliseconds", mend="write it as in 250"
        )
    return min(timeout_s, int(value) / 1000)
