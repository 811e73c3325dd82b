"""A checkout of its own for a test, with this environment in its place, and shells that have a network of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import ROOT

__all__ = ["can_be_alone", "checked_out", "environ", "pasted", "pasted_beside"]

# Ports of loopback are free in a new network namespace, once its loopback is up (SIOCSIFFLAGS, IFF_UP | IFF_RUNNING).
LOOPBACK = "import fcntl,socket,struct;fcntl.ioctl(socket.socket(),0x8914,struct.pack('16sh14x',b'lo',0x41))"
OLD = 946_684_800  # files of the year 2000: make finds the environment newer, and installs nothing into it


def checked_out(folder: Path) -> Path:
    """What git knows of this checkout, as it stands, and a link to this environment as .venv."""
    listed = subprocess.run(
        [str(shutil.which("git")), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
            shutil.copymode(ROOT / name, folder / name)
            os.utime(folder / name, (OLD, OLD))
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def environ() -> dict[str, str]:
    """Of a shell that nobody has prepared: no environment is active."""
    not_theirs = ("VIRTUAL_ENV", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name not in not_theirs}
    inside = str(Path(sys.prefix) / "bin")
    paths = [path for path in kept["PATH"].split(os.pathsep) if path != inside]
    return {**kept, "PATH": os.pathsep.join(paths), "COLUMNS": "140"}


def can_be_alone() -> bool:
    """Whether this machine gives a process a network of its own."""
    return shutil.which("unshare") is not None and not subprocess.run([*ALONE, "true"], check=False).returncode


ALONE = ["unshare", "--net", "--map-root-user"]


def pasted(text: str, folder: Path, *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Lines given to a new bash, one after the other; the first that fails ends it."""
    return subprocess.run(
        [str(shutil.which("bash")), "-e"], input=text, cwd=folder, capture_output=True, text=True, timeout=timeout_s, check=False,
        env=environ(),
    )  # fmt: skip


def pasted_beside(first: Path, second: Path, folder: Path, *, ready: str) -> subprocess.CompletedProcess[str]:
    """Two shells in one network of their own: the second once what the first has started is ready; both end with it.

    Args:
        first, second: scripts; the first one's output goes to a .log beside it.
        folder: that both are in.
        ready: an address that answers 200 then.
    """
    asked = f"import urllib.request as r;r.urlopen({ready!r})"
    lines = f"""
        {sys.executable} -c "{LOOPBACK}"
        set -m
        bash -e {first} >{first.with_suffix(".log")} 2>&1 &
        until {sys.executable} -c "{asked}" 2>/dev/null; do kill -0 $! || exit 9; sleep 0.5; done
        bash -e {second} </dev/null
        code=$?
        kill -TERM -- -$!
        wait
        exit $code
    """
    return subprocess.run(
        [*ALONE, "bash", "-c", lines], cwd=folder, capture_output=True, text=True, timeout=3600, check=False,
        env=environ(),
    )  # fmt: skip
