"""Code that waits runs as fast as it computes: an event loop and `time.monotonic` on a clock that nobody waits for.

What is run must not use threads, processes or sockets: the loop looks at none of them.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar
from unittest import mock

__all__ = ["simulated"]

T = TypeVar("T")


class _Clock(selectors.DefaultSelector):
    """Moves on by as much as the loop would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def read(self) -> float:
        return self.now

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits for something that no clock brings")
        self.now += max(0.0, timeout)
        return []


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: _Clock) -> None:
        super().__init__(clock)
        self._read = clock.read

    def time(self) -> float:
        return self._read()


def simulated(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end, from second 0 of a clock that whoever asks `time.monotonic()` meanwhile reads, too."""
    clock = _Clock()
    with mock.patch.object(time, "monotonic", clock.read), asyncio.Runner(loop_factory=lambda: _Loop(clock)) as runner:
        return runner.run(main)
