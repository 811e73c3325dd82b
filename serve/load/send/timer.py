"""A timer that wakes an event loop within some ten microseconds, where the loop's own timers count milliseconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable

from compress.errors import ServerError

__all__ = ["PreciseTimer"]

_CLOCK_MONOTONIC = 1  # the clock of time.perf_counter_ns on Linux
_TFD_TIMER_ABSTIME = 1
_Times = ctypes.c_long * 4  # seconds and nanoseconds of the interval, then of the time


def check_timer() -> None:
    """Raise ServerError where the system has no such timer: what is sent late would count as the server's latency."""
    if not hasattr(ctypes.CDLL(None), "timerfd_create"):
        raise ServerError(
            "can't send load at exact times",
            why="it takes Linux's timerfd, and this system has none",
            mend="run `serve load` on Linux, or in a Linux container",
        )


class PreciseTimer:
    """A Linux timerfd that the event loop watches.

    Args:
        wake: called in the event loop when the time has come.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        check_timer()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._times = _Times()
        self._pointer = ctypes.byref(self._times)
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._ready)

    def at(self, due_ns: int) -> None:
        """Wake at this time of `perf_counter_ns`, at once when it is past; replaces the time set before."""
        self._times[2], self._times[3] = divmod(max(due_ns, 1), 1_000_000_000)
        self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, self._pointer, None)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ready(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # set anew since
        self._wake()
