"""What the user names as `package.module:name`."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["importable", "is_code", "user_code"]

NAMED = re.compile(r"[\w.]+:\w+")


def is_code(source: str) -> bool:
    """Whether a source of data, a model or a metric is code: `package.module:name`, where no file has that name."""
    return bool(NAMED.fullmatch(source)) and not Path(source).exists()


@contextmanager
def importable() -> Iterator[None]:
    """Modules in the current folder can be imported while the block runs."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


@contextmanager
def user_code(source: str) -> Iterator[Any]:
    """What `package.module:name` names; modules in the current folder can be imported while the block runs.

    Raises:
        Exception: whatever the import raises.
    """
    module, _, name = source.partition(":")
    with importable():
        yield getattr(importlib.import_module(module), name)
