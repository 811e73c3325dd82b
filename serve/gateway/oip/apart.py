"""Long work in a process of its own, one piece at a time, each client's in turn.

Python's lock is held while JSON is read: a thread would not do. Pieces are not taken as they come: who sends many
would have all others wait for them. Each owner has a queue, and those that wait come round (round robin: Nagle, RFC
970); who has just had the process stands behind whoever came meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import resource
import signal
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, Unpack

from serve.gateway.errors import GatewayError, OverloadedError

__all__ = ["Apart", "NoRoomError"]

PR_SET_PDEATHSIG = 1

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class NoRoomError(GatewayError):
    """A piece of work needs more memory than the process may have."""

    status = 413

    def __init__(self) -> None:
        super().__init__(
            "the request is too large to be read as JSON",
            why="the process that reads long JSON has no memory for it",
            mend="send its tensors raw (the protocol's binary form), or in several requests",
        )


class Apart:
    """A process that is begun when there is work for it, and again where somebody has killed it.

    Args:
        memory_bytes: that the process may have, besides what it starts with; 0 for any number. Linux alone holds it
            to that.
    """

    def __init__(self, memory_bytes: int = 0) -> None:
        self._memory_bytes = memory_bytes
        self._pool: ProcessPoolExecutor | None = None
        self._taken = False
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        self._round: deque[Hashable] = deque()  # owners that wait, but for the one whose work is being done
        self._owner: Hashable = None

    async def call(self, who: Hashable, deadline: float | None, call: Callable[[Unpack[Ts]], T], *arguments: *Ts) -> T:
        """What a function of a module gives in the process; it raises what that raises.

        Who is cancelled while it waits is not waited for; what has begun goes on to its end.

        Args:
            who: owns the work.
            deadline: by which its turn has to come, on the monotonic clock; None for no such bound.

        Raises:
            OverloadedError: its turn did not come in time.
            NoRoomError: it needs more memory than there is for it.
            GatewayError: the process has ended over it twice.
        """
        for _ in range(2):
            await self._turn(who, deadline)
            work = self._begin(call, *arguments)
            try:
                return await asyncio.wrap_future(work)
            except BrokenExecutor:  # somebody killed it
                continue
            except MemoryError:
                raise NoRoomError from None
            finally:
                del work  # it may hold an error that holds this frame, and with it the arguments
        raise GatewayError(
            "the request can't be read", why="the process that reads long ones has ended over it twice",
            mend="send tensors raw, not as JSON", status=503,
        )  # fmt: skip

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    async def _turn(self, who: Hashable, deadline: float | None) -> None:
        """Wait for the process; `_next` gives it on."""
        if not self._taken:
            self._taken, self._owner = True, who
            return
        if who not in self._waiting:
            self._waiting[who] = deque()
            if who != self._owner:
                self._round.append(who)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[who].append(turn)
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                await turn
        except (asyncio.CancelledError, TimeoutError) as err:
            if not turn.cancelled():  # it came, and too late
                self._next()
            if isinstance(err, TimeoutError):
                raise OverloadedError(
                    "the request waited too long to be read", why="what takes long to read is read one at a time",
                    mend="send tensors raw, not as JSON, or try again when Retry-After says",
                ) from None  # fmt: skip
            raise

    def _begin(self, call: Callable[[Unpack[Ts]], T], *arguments: *Ts) -> Future[T]:
        """Hand work over; once it is done the process goes on, and not before, though nobody may want the result."""
        loop = asyncio.get_running_loop()

        def done(_: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._next)

        try:
            if self._pool is None:
                self._pool = self._process()
            try:
                work = self._pool.submit(call, *arguments)
            except BrokenExecutor:  # it ended over what was before
                self._pool = self._process()
                work = self._pool.submit(call, *arguments)
        except BaseException:
            self._next()
            raise
        work.add_done_callback(done)
        return work

    def _next(self) -> None:
        """The process is free: whoever is next in the round has it; its last owner comes behind those."""
        if self._owner in self._waiting:
            self._round.append(self._owner)
        self._taken = False
        while self._round and not self._taken:
            self._owner = self._round.popleft()
            queue = self._waiting[self._owner]
            while queue and not self._taken:
                turn = queue.popleft()
                if not turn.done():  # else it was given up
                    self._taken = True
                    turn.set_result(None)
            if not queue:
                del self._waiting[self._owner]

    def _process(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _started, (self._memory_bytes,))


def _started(memory_bytes: int) -> None:
    """In the process: leave Ctrl-C to the gateway, end when it ends, however that comes about, and keep to the bound.

    What reads checks what JSON may become. The bound is for what it may not have thought of: it fails here, alone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # Linux's own
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if memory_bytes and (has := _data_bytes()):
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = has + memory_bytes
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(OSError, ValueError):  # some sandboxes have none
            resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _data_bytes() -> int:
    """What this process has by now of what RLIMIT_DATA bounds, numpy's threads among it; 0 where nobody tells."""
    import numpy  # noqa: F401  what it takes does not count

    try:
        pages = Path("/proc/self/statm").read_text().split()[5]
    except (OSError, IndexError):
        return 0
    return int(pages) * resource.getpagesize()
