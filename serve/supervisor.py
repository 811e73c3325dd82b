"""Keeping a Triton alive: when it dies it is started again, after a wait that grows with each death."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from compress.errors import ToolkitError
from serve.triton.launch import TritonServer

__all__ = ["Backoff", "supervise"]

# Triton is asked this often whether it still lives, in seconds.
WATCH_S = 0.25


@dataclass
class Backoff:
    """How long to wait before the next start, and when to give up.

    Attributes:
        restarts: how many in a row; a server that lived for `steady_s` begins a new row.
        first_s, longest_s: the first wait, and the longest; each is twice the one before.
        steady_s: how long a server must live to be taken for sound.
    """

    restarts: int
    first_s: float = 0.5
    longest_s: float = 30.0
    steady_s: float = 60.0
    _done: int = 0

    def after(self, lived_s: float) -> float | None:
        """The seconds to wait after a server that lived so long; None when it is enough."""
        if lived_s >= self.steady_s:
            self._done = 0
        if self._done >= self.restarts:
            return None
        self._done += 1
        return min(self.first_s * 2.0 ** (self._done - 1), self.longest_s)


async def supervise(triton: TritonServer, backoff: Backoff, on_event: Callable[[str], None]) -> None:
    """Watch a started Triton, and start it again when it dies; returns when it is not to be started any more.

    Cancelling it ends a start that is under way, and leaves the server as it then is to the caller.

    Args:
        triton: that runs.
        backoff: when to start it again.
        on_event: is told what happens, a line each.
    """
    started = time.monotonic()
    while True:
        while triton.running:  # noqa: ASYNC110  a process that ends sets no event
            await asyncio.sleep(WATCH_S)
        wait_s = backoff.after(time.monotonic() - started)
        if wait_s is None:
            return
        on_event(f"Triton has died; it is started again in {wait_s:g} s")
        await asyncio.sleep(wait_s)
        started = time.monotonic()
        starting = asyncio.ensure_future(asyncio.to_thread(triton.restart))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            triton.give_up()
            await asyncio.gather(starting, return_exceptions=True)
            raise
        except ToolkitError as err:
            on_event(f"Triton did not start: {err.why}")
        else:
            on_event(f"Triton is ready again after {time.monotonic() - started:.1f} s")
