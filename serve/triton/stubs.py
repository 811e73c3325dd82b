"""The processes that run a Triton's Python models: which model each is for, and what ended one.

Triton never notices that such a process (a "stub") has ended: the model stays READY, and each request for it fails
after a second. The kernel tells at once, by a file descriptor of the process (pidfd).
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from serve.triton.kin import begun_by, processes

__all__ = ["Kinship", "Relatives", "Stub", "death_of", "is_stopped", "kill", "signal_name", "stubs_in"]

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
        version: of the model.
    """

    pid: int
    model: str
    instance: str
    version: str = ""


def stubs_in(pids: Collection[int], repository: str) -> list[Stub]:
    """Those of the processes that look like stubs of models in a repository: copies that one makes of itself do, too.

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
            model, _, rest = path[len(repository) + 1 :].partition("/")
            found.append(Stub(pid, model, instance, rest.partition("/")[0]))
    return found


@dataclass(frozen=True)
class Relatives:
    """The processes of a Triton.

    Attributes:
        own: its own, and what of others no model's process began.
        stubs: those that run its models.
        begun: what these have begun, each with the id of its stub.
        left: what stubs have begun that are gone.
    """

    own: list[int]
    stubs: list[Stub]
    begun: dict[int, int]
    left: list[int]


class Kinship:
    """Whose the processes of a Triton's family are: what was once found of one stays, for as long as it lives.

    Args:
        repository: as of `stubs_in`.
    """

    def __init__(self, repository: str) -> None:
        self._repository = repository
        self._known: dict[tuple[int, int], Stub | int] = {}  # by id and begin: a stub, or the id of whose it is
        self._lock = threading.Lock()

    def relatives(self, members: Collection[int]) -> Relatives:
        """Which is whose, now; it may be asked by several threads.

        Args:
            members: of the family.
        """
        found = processes()
        with self._lock:
            at = {pid: (pid, found[pid].began) for pid in members if pid in found}
            known = {pid: self._known[key] for pid, key in at.items() if key in self._known}
            look = {pid: told for pid, told in known.items() if isinstance(told, Stub)}
            look |= {
                stub.pid: stub for stub in stubs_in([pid for pid in members if pid not in known], self._repository)
            }
            owners = {pid: told.pid if isinstance(told, Stub) else told for pid, told in known.items()}
            begun = begun_by(members, look, owners, found)
            stubs = [stub for pid, stub in look.items() if pid not in begun]
            told = {stub.pid: stub for stub in stubs} | begun
            self._known = {key: told[pid] for pid, key in at.items() if pid in told}
        ours = {stub.pid for stub in stubs}
        kept = {pid: stub for pid, stub in begun.items() if stub in ours}
        left = [pid for pid, stub in begun.items() if stub not in members]
        own = [pid for pid in members if pid not in ours and pid not in kept and pid not in left]
        return Relatives(own, stubs, kept, left)


def kill(pids: Collection[int]) -> list[int]:
    """Kill processes, as far as they are there; the same ids."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return list(pids)


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
