"""What a Triton left whose `serve` was killed: its processes, its shared memory and its folder."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

from compress.vetting.scratch import sweep
from serve.triton.memory import remove_regions

__all__ = ["RUN", "sweep_tritons"]

RUN = "triton-run-"
PREFIX = re.compile(r"triton-[0-9a-f]{16}-")


def sweep_tritons() -> None:
    """End and remove it. A server that was loading its models then does not end them when it ends."""
    sweep(RUN, _end)


def _end(folder: Path, memory_prefix: str) -> None:
    mark = os.fsencode(f"{folder}/")
    for each in Path("/proc").iterdir():
        if each.name.isdecimal() and int(each.name) != os.getpid():
            with contextlib.suppress(OSError):
                if each.stat().st_uid == os.geteuid() and mark in (each / "cmdline").read_bytes():
                    os.kill(int(each.name), signal.SIGKILL)
    if PREFIX.fullmatch(memory_prefix):
        remove_regions(memory_prefix)
