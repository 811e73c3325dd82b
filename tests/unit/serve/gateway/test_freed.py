"""What was freed between blocks in use goes back to the system."""

from __future__ import annotations

import ctypes
import inspect
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from serve.gateway.access.footprint import MIB
from serve.gateway.access.freed import Freed


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def between_blocks_in_use() -> None:
    freed = Freed(16 * MIB)
    freed.give_back()
    blocks = [bytearray(b"x" * 64 * 1024) for _ in range(1600)]
    del blocks[::2], blocks[:-1:4]
    before = resident()
    assert freed.give_back()
    assert resident() < before - 16 * MIB
    assert not freed.give_back()  # it is told as free still, and is not
    del blocks


def used_and_freed_again_between_two_looks() -> None:
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


def a_long_block_has_the_pages_of_the_one_before() -> None:
    watched = Freed()
    faults = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block = b"x" * (48 * MIB)
        del block
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert max(faults[1:]) < 1000, faults
    assert not watched.give_back(), "it is no more than is kept"


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="it is glibc that keeps it"
)
@pytest.mark.parametrize(
    "what",
    [between_blocks_in_use, used_and_freed_again_between_two_looks, a_long_block_has_the_pages_of_the_one_before],
)
def test_freed_memory_goes_back(what: Callable[[], None]) -> None:
    """In a process of its own: what other tests have left free in this one takes such blocks, too."""
    assert inspect.getmodule(what) is sys.modules[__name__]
    program = f"from {__name__} import {what.__name__} as look\nlook()"
    subprocess.run([sys.executable, "-c", program], check=True)
