"""The processes that run a Triton's Python models: which model each is for, and what ended one.

Triton never notices that such a process (a "stub") has ended: the model stays READY, and each request for it fails
after a second. The kernel tells at once, by a file descriptor of the process (pidfd).
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Stub", "death_of", "is_stopped", "signal_name", "stubs_in"]

PROGRAM = b"triton_python_backend_stub"
INSTANCE = re.compile(r"[\w.+:@=~-]{1,300}")
PATH_AT, INSTANCE_AT = 1, 8  # of its arguments


@dataclass(frozen=True)
class Stub:
    """One such process.

    Attributes:
        pid: its id.
        model: whose instance it runs.
        instance: the name that Triton gives the instance, "MODEL_0_1" where the model's configuration gives none.
    """

    pid: int
    model: str
    instance: str


def stubs_in(pids: list[int], repository: str) -> list[Stub]:
    """Those of the processes that are stubs of models in a repository.

    Args:
        pids: of a Triton's family.
        repository: as the Triton was told it.
    """
    found = []
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if len(words) <= INSTANCE_AT or not words[0].endswith(PROGRAM):
            continue
        path, instance = words[PATH_AT].decode("utf-8", "replace"), words[INSTANCE_AT].decode("utf-8", "replace")
        if path.startswith(f"{repository}/") and INSTANCE.fullmatch(instance):
            found.append(Stub(pid, path[len(repository) + 1 :].partition("/")[0], instance))
    return found


def is_stopped(pid: int) -> bool:
    """Whether a process stands still (SIGSTOP, a debugger), by what the kernel says."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def death_of(pid: int) -> str | None:
    """What ended a process that nobody has waited for yet; None where it lives, or has been cleared away in order.

    An exit with status 0 counts: Triton clears those away that it has asked to end.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] not in "ZX":
        return None
    try:
        code = int(fields[49])
    except (IndexError, ValueError):
        return "it ended"
    return signal_name(-os.WTERMSIG(code) if os.WIFSIGNALED(code) else os.WEXITSTATUS(code))


def signal_name(returncode: int) -> str:
    """How a process ended, in words.

    Args:
        returncode: as subprocess has it: negative for a signal.
    """
    if returncode >= 0:
        return f"ended by itself with code {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was ended by signal {-returncode}"
