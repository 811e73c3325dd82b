"""What was freed between blocks in use goes back to the system."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from serve.gateway.access.footprint import MIB
from serve.gateway.access.freed import Freed


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="it is glibc that keeps it"
)
def test_freed_memory_between_blocks_in_use_goes_back() -> None:
    freed = Freed(16 * MIB)
    freed.give_back()
    blocks = [bytearray(b"x" * 64 * 1024) for _ in range(1600)]
    del blocks[::2], blocks[:-1:4]
    before = resident()
    assert freed.give_back()
    assert resident() < before - 16 * MIB
    assert not freed.give_back()  # it is told as free still, and is not
    del blocks


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="it is glibc that keeps it"
)
def test_what_was_used_and_freed_again_between_two_looks_goes_back_too() -> None:
    freed = Freed(16 * MIB)
    freed.give_back()
    for _ in range(2):  # what the first time leaves free is used again the second time
        blocks = [bytearray(b"x" * 64 * 1024) for _ in range(1600)]
        kept = blocks[::100]
        del blocks
        before = resident()
        assert freed.give_back()
        assert resident() < before - 16 * MIB
        del kept
