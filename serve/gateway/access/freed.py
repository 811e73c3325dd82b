"""Memory that was freed goes back to the system: glibc keeps what lies between blocks in use, gigabytes of it.

But not each block at once: the next long message would fault all its pages in anew, which takes several times as long
as its copy, in the event loop. glibc maps blocks of over 32 MiB one by one, and unmaps them as they are freed, unless
it is told otherwise.
"""

from __future__ import annotations

import asyncio
import ctypes
import resource
import time
from pathlib import Path

from serve.gateway.access.footprint import KEPT_BYTES

__all__ = ["Freed"]

STATM = Path("/proc/self/statm")
LOOK_S = 0.5
QUIET_BYTES = 1024 * 1024  # that less came or went since the last look: no bodies come
WORTH = 16  # a part of that, which is worth giving back what lies free
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
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
        if self._ask is not None and self._trim is not None:  # else nobody would give back what is kept so
            library.mallopt(M_MMAP_MAX, 0)
            library.mallopt(M_TRIM_THRESHOLD, kept)
        self._others = 0  # bytes of the process that are not of its allocator
        self._stayed = 0  # that did not go back the last time
        self._used = 0  # by the last look

    def give_back(self) -> bool:
        """Whether there was so much that it was given back; other C libraries tell nothing, and keep less."""
        if self._ask is None or self._trim is None:
            return False
        used, idle = self._look(self._ask())
        self._others, self._stayed = min(self._others or idle, idle), min(self._stayed, idle)
        quiet, self._used = abs(used - self._used) < QUIET_BYTES, used
        kept = self._kept // 4 if quiet else self._kept
        if idle - self._others <= kept or idle - self._stayed <= self._kept // WORTH:
            return False
        self._trim(0)
        _, self._stayed = self._look(self._ask())
        return True

    @staticmethod
    def _look(told: _Info) -> tuple[int, int]:
        """Bytes in use, and those that the process has beside them: what its allocator calls free may be the system's
        already, and what was used and freed since the last look is not told from that."""
        used = int(told.uordblks) + int(told.hblkhd)
        return used, max(1, int(STATM.read_text().split()[1]) * resource.getpagesize() - used)

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            began = time.monotonic()
            if await asyncio.to_thread(self.give_back):
                await asyncio.sleep(min(LATEST_S, RARELY * (time.monotonic() - began)))
