"""Values of exact, plain types: what a file may say of a layer, and what an error may show of a file."""

from __future__ import annotations

from typing import Any

__all__ = ["plain", "shown"]


def plain(value: Any, depth: int = 0) -> bool:
    """Whether a value is None, a bool, int, float or short str, or a short list or tuple of these; none a subclass."""
    if type(value) in (list, tuple):
        return depth < 3 and len(value) <= 100 and all(plain(item, depth + 1) for item in value)
    if type(value) is int:
        return abs(value) < 1 << 40
    if type(value) is str:
        return len(value) <= 100 and value.isprintable()
    return value is None or type(value) in (bool, float)


def shown(value: Any) -> str:
    """A value in an error: whatever it is, its repr is not run unless it is plain."""
    if plain(value):
        return ascii(value)[:100]
    return f"a {type(value).__name__}" if not isinstance(value, str) else ascii(str(value[:80]))
