"""What other users of this machine could see of a Triton that runs: words on its command line, and its shared memory.

The first is open to them for a moment as it starts. The second is closed from the start by `child.py`, where the kernel
takes its filter.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from serve.triton.memory import FOLDER

__all__ = ["close_regions", "hide"]

ARGUMENTS = 45, 46  # of /proc/PID/stat, counted from its state: where they begin and end in the process's memory


def hide(pid: int, word: str) -> bool:
    """Write over a word on a process's command line, once it has read it; whether that could be done."""
    secret = word.encode()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        begin, end = (int(fields[at]) for at in ARGUMENTS)
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:  # noqa: PTH123 - unbuffered
            memory.seek(begin)
            for found in re.finditer(re.escape(secret), memory.read(end - begin)):
                memory.seek(begin + found.start())
                memory.write(b"*" * len(secret))
        return secret not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError, IndexError):
        return False


def close_regions(prefix: str) -> None:
    """Leave the regions of shared memory to this user, where the library that makes them could open them for all."""
    for region in FOLDER.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            region.chmod(0o600)
