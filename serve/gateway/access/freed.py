"""Memory that was freed goes back to the system: glibc keeps what lies between blocks in use, gigabytes of it."""

from __future__ import annotations

import asyncio
import ctypes
import resource
import time
from pathlib import Path

__all__ = ["KEPT_BYTES", "Freed"]

STATM = Path("/proc/self/statm")
LOOK_S = 0.5
KEPT_BYTES = 96 * 1024 * 1024  # for the bodies that come next: each page given back costs a fault
RARELY, LATEST_S = 20, 2.0  # times as long as giving back took, until it is done again; at most so long


class _Info(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


class Freed:
    """Gives it back.

    Args:
        kept: bytes, freed and not given back, that are let be.
    """

    def __init__(self, kept: int = KEPT_BYTES) -> None:
        self._kept = kept
        library = ctypes.CDLL(None)
        self._ask = getattr(library, "mallinfo2", None)  # glibc's, since 2.33
        self._trim = getattr(library, "malloc_trim", None)
        if self._ask is not None:
            self._ask.restype = _Info
        if self._trim is not None:
            self._trim.argtypes = [ctypes.c_size_t]
        self._others = 0  # bytes of the process that are not of its allocator, or did not go back the last time

    def give_back(self) -> bool:
        """Whether there was so much that it was given back; other C libraries tell nothing, and keep less."""
        if self._ask is None or self._trim is None:
            return False
        idle = self._idle(self._ask())
        self._others = min(self._others, idle) or idle
        if idle - self._others <= self._kept:
            return False
        self._trim(0)
        self._others = self._idle(self._ask())
        return True

    def _idle(self, used: _Info) -> int:
        """Bytes that the process has, and nobody uses: what its allocator calls free may be the system's already, and
        what was used and freed since the last look is not told from that."""
        pages = int(STATM.read_text().split()[1])
        return max(1, pages * resource.getpagesize() - int(used.uordblks) - int(used.hblkhd))

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            began = time.monotonic()
            if await asyncio.to_thread(self.give_back):
                await asyncio.sleep(min(LATEST_S, RARELY * (time.monotonic() - began)))
