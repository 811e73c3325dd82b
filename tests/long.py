"""Tests that take long, and how many of their cases `make test` tries; `make test-all` tries all of them.

In `long.txt`, a line for each: its file and name, and how many, spread over all of them, the first among them.

And the files that take longest, which come first: one that begins last keeps one worker busy when the others are through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["LISTED", "LONGEST", "left_out", "listed", "place"]

LISTED = Path(__file__).with_suffix(".txt")
# Over a minute each, the longest first, as `make test` has them with --durations.
LONGEST = (
    "e2e/test_demo.py",
    "integration/test_on_demand.py",
    "integration/test_search_on_ray.py",
    "integration/test_sharded_training.py",
    "integration/test_upstream_deaths.py",
    "integration/test_rollout.py",
    "integration/test_gateway_sequences.py",
    "integration/test_gateway_heavy.py",
    "e2e/test_begin.py",
    "integration/test_isolation.py",
    "integration/test_gateway_memory.py",
    "integration/test_training.py",
    "integration/test_ending.py",
    "integration/test_gateway_grpc_clients.py",
    "integration/test_up.py",
    "integration/test_elastic_training.py",
    "integration/test_starting_hooks.py",
)


def place(file: Path) -> int:
    """Where a file's tests come: in the order of `LONGEST`, and then, as they were, those that it doesn't have."""
    name = file.relative_to(LISTED.parent).as_posix()
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


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
        tried = {all_of_it[number * count // few] for number in range(few)}
        out |= set(all_of_it) - tried
    return out
