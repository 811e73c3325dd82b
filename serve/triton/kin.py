"""Which processes began which: by their parents, and by marks in their environment, which outlive a parent's end.

A process that has left its parent's group and session, and whose parent has ended, has its first environment still.
What was once found stays known, as a process may write over both its command line and its environment (setproctitle,
redis, nginx). Only one that was begun with another environment (`env -i`), and whose parents ended before anybody
looked, is found by nothing.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["FAMILY", "STUB", "Process", "begun_by", "mark_of", "members_of", "processes"]

FAMILY, STUB = "SERVE_FAMILY", "SERVE_STUB"  # a word of a family's own; the id of the process that runs a model


class Process(NamedTuple):
    """One that is alive.

    Attributes:
        parent: its id; 1 or so where that has ended.
        group: its process group's id.
        began: when it began, in the kernel's ticks.
    """

    parent: int
    group: int
    began: int


def processes() -> dict[int, Process]:
    """Those of this machine that are alive, by id; zombies, which only their parents can clear away, are not.

    Raises:
        OSError: there is no file to look with.
    """
    found = {}
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):  # noqa: PTH208 - names alone
        with suppress(OSError):  # it has just ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                found[pid] = Process(int(fields[1]), int(fields[2]), int(fields[19]))
    return found


def mark_of(pid: int, name: str) -> str:
    """What a variable said in the environment that a process began with; "" where it has none, or is another user's."""
    begin = f"{name}=".encode()
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((word[len(begin) :].decode("utf-8", "replace") for word in words if word.startswith(begin)), "")


def members_of(
    first: int, began: int, word: str, found: Mapping[int, Process], known: Collection[int] = ()
) -> list[int]:
    """The processes of a family: the group of its first, what carries its word, and what any of these began.

    Args:
        first: id of the first process.
        began: when that began: all others did later.
        word: in `FAMILY` of their environment.
        found: the processes that there are.
        known: those of them that were members before.
    """
    members = {
        pid for pid, each in found.items()
        if pid in known or each.group == first or (each.began >= began and mark_of(pid, FAMILY) == word)
    }  # fmt: skip
    return [pid for pid in found if pid in members or not members.isdisjoint(_ancestors(pid, found))]


def begun_by(
    members: Collection[int], models: Collection[int], known: Mapping[int, int], found: Mapping[int, Process]
) -> dict[int, int]:
    """The processes of a family that a process of a model's began, each with that one's id, which may have ended.

    Args:
        members: of the family.
        models: of these, those that look like a model's own; a copy of one (fork) does, too.
        known: of those that were told before, by which process each was begun; a model's own by itself.
        found: as of `members_of`.
    """
    begun, owners = {}, {**known, **{pid: pid for pid in models if pid not in known}}
    for pid in members:
        if pid in known:
            owner = known[pid]
        elif (mark := mark_of(pid, STUB)).isdecimal():
            owner = int(mark)
        else:  # it was begun with another environment, or nothing marks models' processes here
            line = [pid, *_ancestors(pid, found)]
            owner = next((owners[each] for each in reversed(line) if each in owners), pid)
        if owner != pid:
            begun[pid] = owner
    return begun


def _ancestors(pid: int, found: Mapping[int, Process]) -> list[int]:
    line: list[int] = []
    while pid in found and (pid := found[pid].parent) and pid not in line:
        line.append(pid)
    return line
