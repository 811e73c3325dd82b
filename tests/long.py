"""Tests that take long, and how many of their cases `make test` tries; `make test-all` tries all of them.

In `long.txt`, a line for each: its file and name, and how many, from the first on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["LISTED", "left_out", "listed"]

LISTED = Path(__file__).with_suffix(".txt")


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
    seen: Counter[str] = Counter()
    out = set()
    for test in tests:
        function = test.partition("[")[0]
        seen[function] += 1
        if seen[function] > cases.get(function, seen[function]):
            out.add(test)
    return out
