"""What files from elsewhere may hold: each format is read by an allow-list, before a library sees it."""

from __future__ import annotations

__all__: list[str] = []
