"""Memory that is free is given back to the system, before more is asked for."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys

__all__ = ["give_back"]


def give_back() -> None:
    """Collect what only cycles hold (exported programs do), and return the heap's free pages to the system.

    glibc keeps what lies between blocks in use: after an export that is more than the model. Elsewhere only the first
    is done.
    """
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library has no such function
            ctypes.CDLL(None).malloc_trim(0)
