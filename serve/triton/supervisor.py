"""Keeping a Triton alive: when it dies it is started again, after a wait that grows with each death.

Where one key alone did it there is no wait, which all the others would share: that key is refused before long.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from compress.errors import ToolkitError
from serve.gateway.health.outages import Outages
from serve.gateway.health.suspects import Suspects
from serve.triton.causes import AT_ONCE, CLIENT, KEY, SCARCE, SERVER, START, cause_of, wait_of
from serve.triton.heal import told
from serve.triton.launch import TritonServer
from serve.triton.stubs import signal_name

__all__ = ["AT_ONCE", "CLIENT", "KEY", "SCARCE", "SERVER", "START", "Backoff", "cause_of", "supervise"]

# Triton is asked this often whether it still lives, in seconds.
WATCH_S = 0.05
# Clients can use these up: that a start fails for want of them says nothing about the server.
WANTING = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS))


@dataclass
class Backoff:
    """How long to wait before the next start, and when to give up.

    Deaths in a row are counted by their cause. Those after clients' requests are never enough: one client would end
    the service for all others. Nor are starts for which the process had no files or memory. After a death of
    one key's requests alone there is no wait, `AT_ONCE` times in a row; then it is as any other client's.

    Attributes:
        restarts: how many in a row for one cause; a server that lived for `steady_s` begins a new row. 0 for never.
        first_s, longest_s: the first wait, and the longest; each is twice the one before.
        steady_s: how long a server must live to be taken for sound.
    """

    restarts: int
    first_s: float = 0.5
    longest_s: float = 30.0
    steady_s: float = 60.0
    _done: Counter[str] = field(default_factory=Counter)

    def after(self, lived_s: float, cause: str = SERVER) -> float | None:
        """The seconds to wait after a server that lived so long; None when it is enough.

        Args:
            lived_s: seconds for which it was ready; 0 where it never was.
            cause: SERVER, START, SCARCE, CLIENT or KEY.
        """
        if lived_s >= self.steady_s:
            self._done.clear()
        if cause == KEY and self.restarts:
            self._done[KEY] += 1
            if self._done[KEY] <= AT_ONCE:
                return 0.0
            cause = CLIENT
        endless = cause in (SCARCE, CLIENT)
        if not self.restarts or (self._done[cause] >= self.restarts and not endless):
            return None
        self._done[cause] += 1
        return wait_of(self._done[cause], self.first_s, self.longest_s)


async def supervise(
    triton: TritonServer,
    backoff: Backoff,
    outages: Outages,
    suspects: Suspects,
    on_event: Callable[[str], None],
    on_death: Callable[[], None] = lambda: None,
) -> None:
    """Watch a started Triton, and start it again when it dies; returns when it is not to be started any more.

    Cancelling it ends a start that is under way, and leaves the server as it then is to the caller.

    Args:
        triton: that runs.
        backoff: when to start it again.
        outages: are told.
        suspects: are asked who was in flight.
        on_event: is told what happens, a line each.
        on_death: is called once it has died, before it is started again.
    """
    ready = began = time.monotonic()
    while True:
        while triton.running:  # noqa: ASYNC110  a process that ends sets no event
            await asyncio.sleep(WATCH_S)
        on_death()
        lived_s = time.monotonic() - ready
        how = signal_name(triton.returncode or 0)
        guilty = await suspects.died(None)
        outages.deaths[""] += 1
        wait_s = backoff.after(lived_s, cause_of(guilty, asked=suspects.answered_at >= began))
        on_event(f"Triton has died: it {how}; {told(guilty)}; {_next(wait_s)}")
        while wait_s is not None:
            await asyncio.sleep(wait_s)
            began = time.monotonic()
            failed = await _started(triton, on_event)
            if failed is None:
                break
            wait_s = backoff.after(0.0, failed)
            on_event(_next(wait_s))
        if wait_s is None:
            return
        ready = time.monotonic()
        outages.clear()
        suspects.began(None, began)


def _next(wait_s: float | None) -> str:
    if wait_s is None:
        return "that is enough"
    return f"it is started again in {wait_s:g} s" if wait_s else "it is started again at once"


async def _started(triton: TritonServer, on_event: Callable[[str], None]) -> str | None:
    """Start it again, if it can be; else the cause that it is counted for."""
    began = time.monotonic()
    starting = asyncio.ensure_future(asyncio.to_thread(triton.restart))
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        triton.give_up()
        await asyncio.gather(starting, return_exceptions=True)
        raise
    except Exception as err:  # whatever it is, the gateway and the other models go on
        on_event(f"Triton did not start: {f'{err.why} ({err.what})' if isinstance(err, ToolkitError) else err}")
        return SCARCE if _scarce(err) else START
    on_event(f"Triton is ready again after {time.monotonic() - began:.1f} s")
    return None


def _scarce(err: BaseException | None) -> bool:
    """Whether an error, or what it came of, is for want of files or memory."""
    while err is not None:
        if isinstance(err, OSError) and err.errno in WANTING:
            return True
        err = err.__cause__ or err.__context__
    return False
