"""A disk that takes no more, in Python and in C++, without one: files that can't grow beyond a size."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["full_disk"]


@contextmanager
def full_disk(size: int = 0) -> Iterator[None]:
    """No file can be made larger than so many bytes, as by a quota."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
