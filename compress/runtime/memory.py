"""Memory that is free is given back to the system, before more is asked for."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["give_back", "standing"]


@contextmanager
def standing() -> Iterator[None]:
    """Within it, no collection looks through what is there when it begins, such as torch's modules.

    Some 400,000 objects, which took each collection of a run a third of a second and held nothing to free. What is made
    within is collected as ever, and afterwards all is. Where somebody has frozen objects already, nothing is done.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()  # what is garbage by now would stay
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def give_back() -> None:
    """Collect what only cycles hold (exported programs do), and return the heap's free pages to the system.

    glibc keeps what lies between blocks in use: after an export that is more than the model. Elsewhere only the first
    is done.
    """
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library has no such function
            ctypes.CDLL(None).malloc_trim(0)
