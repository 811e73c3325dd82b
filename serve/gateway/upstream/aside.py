"""An exchange with the model server whose place is not kept when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from serve.gateway.access.asides import Asides
from serve.gateway.upstream.deadline import EarlyTimeoutError
from serve.http.connection import LEFT, Leaving

__all__ = ["exchange"]


@contextmanager
def exchange(asides: Asides, asked: str, who: str, size: int, *, waits: bool = False) -> Iterator[None]:
    """Around it: what the server is at work on still is kept there.

    Args:
        asides: of the gateway.
        asked, who, size, waits: as of `Asides.keep`.
    """
    leaving = Leaving()
    above = LEFT.set(leaving)
    given_up = False
    try:
        yield
    except (asyncio.CancelledError, EarlyTimeoutError):
        given_up = True
        raise
    finally:
        leaving.over = True
        LEFT.reset(above)
        above_it = LEFT.get()
        if given_up:
            ended = [one.ended for one in leaving.connections if one.ended is not None]
            asides.keep(asked, who, ended, size, waits=waits)
            if above_it is not None:
                above_it.aside += ended
        else:
            for connection in leaving.connections:
                connection.close()
