"""Who is told how the reading of someone's data goes on: it is asked for deep inside, and shown far from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["Heard", "heard", "listener", "unheard"]

Heard = Callable[[int, int, str], None]
"""How much is done, of how much, and of what; with nothing done something else begins."""


def unheard(_done: int, _total: int, _what: str) -> None:
    """Of whom nobody wants to hear."""


_listener: ContextVar[Heard] = ContextVar("listener", default=unheard)


@contextmanager
def heard(listener: Heard) -> Iterator[None]:
    """Within it, a listener is told of what is read, and how much there is."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def listener() -> Heard:
    """Who is told; where nobody listens, one that does nothing."""
    return _listener.get()
