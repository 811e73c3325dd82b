"""What files from elsewhere may hold: each format is read by an allow-list, before a library sees it.

And how a file is written where others may write, too.
"""

from __future__ import annotations

__all__: list[str] = []
