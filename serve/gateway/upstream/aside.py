"""An exchange with the model server whose place is not kept when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from serve.gateway.access.asides import Asides
from serve.gateway.errors import UpstreamTimeoutError
from serve.gateway.upstream.deadline import EarlyTimeoutError
from serve.http.connection import LEFT, Leaving

__all__ = ["exchange"]


@contextmanager
def exchange(
    asides: Asides, asked: str, who: str, size: int, *, waits: bool = False, lingers: bool = False
) -> Iterator[None]:
    """Around it: what the server is at work on still is kept there.

    Args:
        asides: of the gateway.
        asked, who, size, waits: as of `Asides.keep`.
        lingers: whether what is not answered in time goes on to count for its key; else a model that hangs would keep
            it from the other one that answers for the same name.
    """
    leaving = Leaving()
    above = LEFT.set(leaving)
    given_up = late = False
    try:
        yield
    except (asyncio.CancelledError, EarlyTimeoutError):
        given_up = True
        raise
    except UpstreamTimeoutError:
        late = lingers
        raise
    finally:
        leaving.over = True
        LEFT.reset(above)
        above_it = LEFT.get()
        if given_up:
            asides.keep(asked, who, leaving.ended, size, waits=waits)
            if above_it is not None:
                above_it.aside += leaving.through if lingers else leaving.ended
        elif late and above_it is not None:
            leaving.linger()
            above_it.aside += leaving.through
        else:
            leaving.close()
