"""`compress cache`: what earlier runs left of their stages."""

from __future__ import annotations

from cyclopts import App

from compress.cli.printed import console_of
from compress.storage.stage_cache import StageCache

__all__ = ["cached"]

cached = App(name="cache", help="What earlier runs did of their stages, and later ones need not do again.")


@cached.command(name="list")
def list_cached() -> None:
    """Tell what is kept: each stage, what it did, its size, and when it was used last.

    What was not used for longest goes when all of it is more than COMPRESS_CACHE_GB, in gigabytes: 10 if that is not
    set; with 0 nothing is kept.
    """
    from compress.report.cached import cache_table

    cache = StageCache.of()
    cache.check()
    console_of().print(cache_table(cache))


@cached.command
def clear() -> None:
    """Remove all that is kept; a run at work goes on without."""
    from compress.console.durations import bytes_text
    from compress.console.wording import counted

    cache = StageCache.of()
    cache.check()
    count, size = cache.clear()
    print(f"removed {counted(count, 'stages')}, {bytes_text(size)}")
