"""A real control group with a quota, where this machine lets one be made."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")
ENTER = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execv(sys.argv[2], sys.argv[2:])"


@contextmanager
def quota_of_one() -> Iterator[list[str]]:
    """The words before a command that has it run in a group with the time of one CPU; the test is skipped where none
    can be made. All that it started has to have ended when this ends."""
    first = (ROOT / "cpu/cpu.cfs_quota_us").exists()
    group = ROOT / ("cpu" if first else "") / f"compress-serve-test-{os.getpid()}"
    try:
        group.mkdir()
        if first:
            (group / "cpu.cfs_quota_us").write_text("100000")
        else:
            (group / "cpu.max").write_text("100000 100000")
    except OSError as err:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {err}")
    try:
        yield [sys.executable, "-I", "-S", "-c", ENTER, str(group / "cgroup.procs")]
    finally:
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:  # the kernel has not let go of what ended yet
                time.sleep(0.1)
