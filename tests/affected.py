"""The unit tests of what has changed since a commit, printed as arguments for pytest: `python -m tests.affected [BASE]`.

A file of PACKAGE/ROOM has those tests in tests/unit/PACKAGE/ROOM that import it, all of them where none does; one at the
top of a package has the files at the top of tests/unit/PACKAGE. A helper in tests/ has the unit tests that import it.
Who imports a changed module in turn is not looked for: that is for `make test`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

__all__ = ["affected", "changed"]

ROOT = Path(__file__).parents[1]
UNIT = PurePosixPath("tests/unit")


def changed(base: str = "HEAD", root: Path = ROOT) -> list[str]:
    """Files of the working tree that differ from a commit, and those that git does not know yet.

    Raises:
        CalledProcessError: there is no such commit.
    """
    asked = (
        ("diff", "--name-only", "--no-renames", "--end-of-options", base, "--"),
        ("ls-files", "--others", "--exclude-standard"),
    )
    told = [
        subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)  # noqa: S607
        for words in asked
    ]
    return sorted({name for each in told for name in each.stdout.splitlines()})


def affected(files: Iterable[str], root: Path = ROOT) -> list[str]:
    """Folders and files of unit tests, sorted, none within another."""
    found: set[str] = set()
    for name in files:
        found.update(each for each in _tests_of(PurePosixPath(name), root) if (root / each).exists())
    return sorted(each for each in found if found.isdisjoint(map(str, PurePosixPath(each).parents)))


def _tests_of(path: PurePosixPath, root: Path) -> Iterable[str]:
    match path.parts:
        case ("compress" | "serve" as package, room, _, *_):
            module = ".".join(path.with_suffix("").parts)
            files = (root / UNIT / package / room).rglob("test_*.py")
            found = [each for each in files if re.search(rf"\b{re.escape(module)}\b", each.read_text(encoding="utf-8"))]
            yield from _within(root, found) if found else [str(UNIT / package / room)]
        case ("compress" | "serve" as package, _):
            yield from _within(root, (root / UNIT / package).glob("test_*.py"))
        case ("tests", "unit", *_, name) if name.startswith("test_"):
            yield str(path)
        case ("tests", "unit", *_):
            yield str(path.parent)
        case ("tests", name) if name.endswith(".py"):
            helper = f"tests.{path.stem}"
            files = (root / UNIT).rglob("test_*.py")
            yield from _within(root, (each for each in files if helper in each.read_text(encoding="utf-8")))
        case ("CONTRIBUTING.md",) | ("docs", _):
            yield str(UNIT / "test_contributing.py")


def _within(root: Path, files: Iterable[Path]) -> Iterable[str]:
    return (file.relative_to(root).as_posix() for file in files)


if __name__ == "__main__":
    print(*affected(changed(sys.argv[1] if len(sys.argv) > 1 else "HEAD")))
