"""Ctrl-C at any time: no traceback, wherever it strikes.

Python's own handler runs between two of Python's instructions: a kernel of a library that never comes back, a loop in
an ONNX file, say, would hold it off for ever. A thread that the signal itself wakes waits for it, and ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["heed", "interrupted", "interruptible"]

GRACE = 5.0
"""Seconds that a library may take to come back: a large model is loaded in one call."""

_seen, _watched = threading.Event(), threading.Event()


def interrupted() -> bool:
    """Whether there was a Ctrl-C. Whatever error comes after it is its consequence: a child that it ended, too, say."""
    return _seen.is_set()


def heed() -> None:
    """Raise KeyboardInterrupt after all, where a library has swallowed it."""
    if _seen.is_set():
        raise KeyboardInterrupt


def _handle(_number: int, _frame: FrameType | None) -> None:
    _seen.set()
    raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """Within it, a Ctrl-C is remembered; behind it, one ends the process without a word."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _seen.clear()
    before = signal.signal(signal.SIGINT, _handle)
    try:
        with _awaited():
            yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN if _seen.is_set() else before)


@contextmanager
def _awaited() -> Iterator[None]:
    """Within it, the process ends some seconds after a Ctrl-C that Python's handler did not get to."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    told = os.dup(2)  # what is printed meanwhile may be kept aside
    former = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(reading, told), name="interrupts", daemon=True)
    watcher.start()
    _watched.set()
    try:
        yield
    finally:
        _watched.clear()
        signal.set_wakeup_fd(former)
        os.close(writing)  # the end of what it reads; a forked process may hold it open, too
        watcher.join(0.1)


def _watch(reading: int, told: int) -> None:
    while signals := os.read(reading, 64):
        if signal.SIGINT in signals and not _seen.wait(GRACE):
            with contextlib.suppress(OSError):
                os.write(told, b"interrupted\n")
            os._exit(130)
    os.close(reading)
    os.close(told)


def _apart() -> None:
    """A forked process shares the pipe, and its signals are not its parent's."""
    if _watched.is_set():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_apart)
