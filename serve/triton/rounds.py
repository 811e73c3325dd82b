"""Work in rounds, of which a bad one ends nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Rounds"]


class Rounds:
    """Tells of rounds that failed: the first of a row, and nothing until one went well.

    What clients do can make any of them fail, by using up the process's files for one; whoever works beside the
    gateway goes on then, because its end would be the end of the service for everybody.

    Args:
        what: can't be done then, in words.
        on_event: is told, a line each.
    """

    def __init__(self, what: str, on_event: Callable[[str], None]) -> None:
        self._what = what
        self._on_event = on_event
        self._failed = False

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around one round; its error, whatever it is, goes no further. Cancelling does."""
        try:
            yield
        except Exception as err:
            if not self._failed:
                self._on_event(f"{self._what}: {err or type(err).__name__}; it is tried again")
            self._failed = True
        else:
            self._failed = False
