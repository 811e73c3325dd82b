"""Files that attack whoever opens them, written by functions: each tries to leave a canary, or to take the memory.

`python -m tests.hostile.build FOLDER` writes them all, for a look by hand; their canaries then go to FOLDER/canaries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["ATTACKS", "Attack", "attack", "build"]

Kind = Literal["model", "onnx", "artifact", "data"]


@dataclass(frozen=True)
class Attack:
    """One file or folder.

    Attributes:
        name: also the file's, before its suffix.
        suffix: of the file; none is a folder.
        kind: which commands open it.
        write: writes it to a path; its second argument is the canary, a path that must not come to be.
        harmless: what it tries is left out rather than refused, so that it may load.
    """

    name: str
    suffix: str
    kind: Kind
    write: Callable[[Path, Path], None]
    harmless: bool


ATTACKS: list[Attack] = []


def attack(
    suffix: str, kind: Kind, *, harmless: bool = False
) -> Callable[[Callable[[Path, Path], None]], Callable[[Path, Path], None]]:
    """Add a function that writes an attack; it is called as its file is."""

    def add(write: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        ATTACKS.append(Attack(write.__name__, suffix, kind, write, harmless))
        return write

    return add


def build(folder: Path, *only: str) -> dict[str, Path]:
    """Write every attack, or those of some names; gives the paths by name. Canaries would stand in `folder`/canaries."""
    from tests.hostile import data_files, exported_programs, onnx_files, pickles  # noqa: F401  each adds its own

    (folder / "canaries").mkdir(parents=True)
    (folder / "files").mkdir()
    found = {}
    for each in (each for each in ATTACKS if not only or each.name in only):
        path = folder / "files" / (each.name + each.suffix)
        each.write(path, folder / "canaries" / each.name)
        found[each.name] = path
    return found


if __name__ == "__main__":
    for path in build(Path(sys.argv[1])).values():
        print(path)
