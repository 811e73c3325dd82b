"""A long call is told of while it goes on, and not once it is through."""

from __future__ import annotations

import threading

import pytest

from compress.console.meanwhile import told_meanwhile


def test_it_is_told_again_and_again_for_how_long_it_has_gone_on() -> None:
    told: list[str] = []
    twice = threading.Event()

    def tell(line: str) -> None:
        told.append(line)
        if len(told) > 1:
            twice.set()

    with told_meanwhile(tell, "tracing", 0.01):
        assert twice.wait(10)
    count = len(told)
    assert told[0] == "tracing (0 s so far)"
    assert not any(thread.name == "meanwhile" for thread in threading.enumerate())
    assert len(told) == count


def test_what_is_quick_is_not_told_of() -> None:
    told: list[str] = []
    with told_meanwhile(told.append, "tracing", 60.0):
        pass
    assert told == []


def test_it_ends_with_what_fails() -> None:
    with pytest.raises(ValueError, match="no"), told_meanwhile(print, "tracing", 60.0):
        raise ValueError("no")
    assert not any(thread.name == "meanwhile" for thread in threading.enumerate())


def test_what_ends_the_telling_is_raised_when_the_call_is_over() -> None:
    """Such as by a terminal that is gone."""
    tried = threading.Event()

    def tell(_: str) -> None:
        tried.set()
        raise SystemExit(1)

    done: list[str] = []

    def call() -> None:
        with told_meanwhile(tell, "tracing", 0.01):
            assert tried.wait(10)
            done.append("the call")

    with pytest.raises(SystemExit):
        call()
    assert done == ["the call"]
