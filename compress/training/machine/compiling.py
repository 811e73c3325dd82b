"""torch.compile where it pays: timed against the plain forward in the first steps of a training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from compress.errors import first_line

__all__ = ["Compiling"]

# Seconds of plain training that must lie ahead: compiling takes up to a minute on a CPU.
WORTH = 300.0
COLD, TIMED = 2, 5
GAIN = 0.95  # of the plain step's time, at most


class Compiling:
    """Decides, step by step, which of two callables trains.

    Args:
        asked: "auto", "on" or "off".
        plain: the module as it is.
        compiled: makes the compiled one, which shares its parameters.
    """

    def __init__(self, asked: str, plain: Any, compiled: Callable[[], Any]) -> None:
        self._asked = asked
        self._plain = plain
        self._make = compiled
        self._fast: Any = None
        self._times: dict[bool, list[float]] = {False: [], True: []}
        self._spent = 0.0
        self.note: str | None = None
        self.decided = asked == "off"
        self.on = asked == "on"

    def decide(self, on: bool) -> None:
        """Take up what the training had found before; what was asked for stays."""
        if self._asked == "auto":
            self.on, self.decided = on, True

    @property
    def current(self) -> Any:
        """What is to be called in the next step."""
        if not self.on:
            return self._plain
        if self._fast is None:
            start = time.perf_counter()
            self._fast = self._make()
            self._spent += time.perf_counter() - start
        return self._fast

    def failed(self, error: Exception) -> bool:
        """Whether the step is to be tried again without, as the compiler can't."""
        if not self.on or self._asked == "on":
            return False
        self.note = f"not compiled: torch.compile can't ({type(error).__name__}: {first_line(error)[:120]})"
        self.on, self.decided = False, True
        return True

    def took(self, seconds: float, left: int) -> None:
        """A step is through.

        Args:
            seconds: that it took.
            left: steps ahead.
        """
        if self.decided:
            return
        times = self._times[self.on]
        times.append(seconds)
        if len(times) < COLD + TIMED:
            return
        step = statistics.median(times[COLD:])
        if not self.on and self._asked == "auto":
            self.on = step * left > WORTH
            self.decided = not self.on
            return
        if self.on and self._asked == "auto":
            plain = statistics.median(self._times[False][COLD:])
            pays = step < GAIN * plain
            spent = sum(times[:COLD]) + self._spent
            saves = "saves" if pays else "does not save enough"
            told = f"{1e3 * step:.1f} ms a step, {1e3 * plain:.1f} ms without, {spent:.0f} s to compile"
            self.note = f"torch.compile {saves}: {told}"
            self.on = pays
        self.decided = True
