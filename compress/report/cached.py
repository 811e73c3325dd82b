"""The cache of stages told: a table for the terminal."""

from __future__ import annotations

import time

from rich.markup import escape
from rich.table import Table

from compress.console.durations import bytes_text, duration
from compress.console.wording import counted
from compress.storage.stage_cache import StageCache

__all__ = ["cache_table"]

DAY = 86400


def cache_table(cache: StageCache) -> Table:
    """What is kept, the last used first."""
    found = cache.entries()
    table = Table(title=escape(str(cache.folder)), title_justify="left")
    for column in ("stage", "what it did", "size", "used"):
        table.add_column(column, justify="left" if column in ("stage", "what it did") else "right", overflow="fold")
    for entry in found:
        name, did = (escape(text) for text in (entry.stage, entry.did))
        table.add_row(name, did, bytes_text(entry.size_bytes), f"{_ago(time.time() - entry.used)} ago")
    size = bytes_text(sum(entry.size_bytes for entry in found))
    table.add_row(counted(len(found), "stages"), "", f"{size} of {bytes_text(cache.most_bytes)}", "", style="bold")
    return table


def _ago(seconds: float) -> str:
    return counted(int(seconds // DAY), "days") if seconds >= DAY else duration(max(0.0, seconds))
