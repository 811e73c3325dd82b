"""What meets a candidate besides the requests of its release: those that ask it by another name, its own or one whose
release is another.

How long it takes while such a request is with it tells of that one, too: any key could make it look slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from serve.gateway.access.left_behind import once_through

__all__ = ["Beside", "Besides", "Met"]


@dataclass(slots=True)
class Met:
    """Whether a request of the release met one; `key` is the id of one of their keys."""

    any: bool = False
    key: str = ""


class Beside:
    """Those of one candidate.

    Attributes:
        now: number of them that are with it.
        key: the id of the key of the last one.
    """

    def __init__(self) -> None:
        self.now = 0
        self._began = 0
        self.key = ""

    def enter(self, key: str) -> None:
        """One is sent, of the key with this id; to be told of its end with `leave`."""
        self.now += 1
        self._began += 1
        self.key = key

    def leave(self, ended: Sequence[asyncio.Future[Any]] = ()) -> None:
        """It is over, or its client has left, and it is over once the server is through with what it was sent.

        Args:
            ended: each is done when the server is.
        """

        def over() -> None:
            self.now -= 1

        if ended:
            once_through(ended, over)
        else:
            over()

    @contextmanager
    def watched(self, met: Met) -> Iterator[None]:
        """Tell of a request of the release, once it is over, whether it met any."""
        met.any, began = self.now > 0, self._began
        try:
            yield
        finally:
            met.any = met.any or self._began > began
            met.key = self.key


@dataclass(frozen=True)
class Besides:
    """Those of each candidate that a request may be with."""

    each: tuple[Beside, ...]

    def enter(self, key: str) -> None:
        """It is sent, of the key with this id; to be told of its end with `leave`."""
        for one in self.each:
            one.enter(key)

    def leave(self, ended: Sequence[asyncio.Future[Any]] = ()) -> None:
        """It is over, or will be once these are done; see `Beside.leave`."""
        for one in self.each:
            one.leave(ended)
