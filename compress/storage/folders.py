"""Folders that take the place of older ones whole or not at all.

What is made beside an output, and what is set aside meanwhile, has a name that nobody can have by chance: a folder of
the user's beside it, whatever it is called, is neither filled nor removed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["put_back", "replacing"]

LETTERS = 8  # of the random part


@contextmanager
def replacing(output: Path) -> Iterator[Path]:
    """An empty folder beside the output, to be filled; at the end it is swapped for what was there.

    If anything fails, it is gone, and what was there stays. What killed runs have left beside the output goes, too: the
    caller holds the output (`compress.storage.files.locked`).
    """
    output = Path(os.path.realpath(output))
    for _, left in _left(output, "part"):
        shutil.rmtree(left, ignore_errors=True)
    mark = secrets.token_hex(LETTERS // 2)
    beside, old = _named(output, mark, "part"), _named(output, mark, "old")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        beside.mkdir()
        yield beside
        _swap(beside, output, old)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    for _, path in _left(output, "old"):
        shutil.rmtree(path, ignore_errors=True)


def put_back(output: Path) -> None:
    """Put back what a swap that was cut short had set aside."""
    output = Path(os.path.realpath(output))
    if output.name and not os.path.lexists(output):
        halves = {mark for mark, _ in _left(output, "part")}
        aside = [path for mark, path in _left(output, "old") if mark in halves]
        if len(aside) == 1:
            aside[0].rename(output)


def _named(output: Path, mark: str, ending: str) -> Path:
    return output.with_name(f".{output.name}.{mark}.{ending}")


def _left(output: Path, ending: str) -> list[tuple[str, Path]]:
    """Folders that runs which were killed have left of an output, each with its random part."""
    pattern = re.compile(rf"\.{re.escape(output.name)}\.([0-9a-f]{{{LETTERS}}})\.{ending}")
    try:
        names = [path.name for path in output.parent.iterdir()]
    except OSError:  # not there, or not to be read
        return []
    return [(found[1], output.with_name(name)) for name in names if (found := pattern.fullmatch(name))]


def _swap(beside: Path, output: Path, old: Path) -> None:
    try:
        if output.exists():
            output.rename(old)
        beside.rename(output)
    except BaseException:
        if old.exists() and not output.exists():
            old.rename(output)
        raise
