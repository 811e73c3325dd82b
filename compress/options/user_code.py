"""What the user names as `package.module:name`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["user_code"]


@contextmanager
def user_code(source: str) -> Iterator[Any]:
    """What `package.module:name` names; modules in the current folder can be imported while the block runs.

    Raises:
        Exception: whatever the import raises.
    """
    module, _, name = source.partition(":")
    sys.path.insert(0, "")
    try:
        yield getattr(importlib.import_module(module), name)
    finally:
        sys.path.remove("")
