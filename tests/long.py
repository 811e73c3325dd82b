"""Tests that take long, and how many of their cases `make test` tries; `make test-all` tries all of them.

In `long.txt`, a line for each: its file and name, and how many, spread over all of them, the first among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["LISTED", "left_out", "listed"]

LISTED = Path(__file__).with_suffix(".txt")
GOLDEN = 0.6180339887498949


def listed(text: str) -> dict[str, int]:
    """Cases to try, by test.

    Raises:
        ValueError: a line that is no test and a number, or a test that comes twice.
    """
    found: dict[str, int] = {}
    for line in text.splitlines():
        if words := line.partition("#")[0].split():
            test, cases = words
            if test in found:
                raise ValueError(f"{test} comes twice")
            found[test] = int(cases)
    return found


def left_out(tests: Iterable[str], cases: Mapping[str, int]) -> set[str]:
    """Of tests by their node ids, in their order, those that are not tried."""
    by_function: dict[str, list[str]] = {}
    for test in tests:
        by_function.setdefault(test.partition("[")[0], []).append(test)
    out: set[str] = set()
    for function, all_of_it in by_function.items():
        count = len(all_of_it)
        few = min(cases.get(function, count), count)
        out |= set(all_of_it) - {all_of_it[number] for number in _spread(few, count)}
    return out


def _spread(few: int, count: int) -> set[int]:
    """Some numbers below a count, 0 first: at even steps, all would be of one value of the parameters that turn fast."""
    found: set[int] = set()
    number = 0
    while len(found) < few:
        found.add(int(number * GOLDEN % 1 * count))
        number += 1
    return found
