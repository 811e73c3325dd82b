"""Ctrl-C at any time: no traceback, wherever it strikes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["heed", "interrupted", "interruptible"]

_seen = threading.Event()


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
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN if _seen.is_set() else before)
