"""How the commands print: to a terminal as wide as it is, elsewhere as wide as a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.markup import escape

from compress.console.plain import Console

__all__ = ["console_of", "tell", "tell_next"]


def console_of() -> Console:
    """Of standard output."""
    return Console() if sys.stdout.isatty() else Console(width=140)


def tell_next(lines: Sequence[str]) -> None:
    """Commands and files to go on with."""
    print("\n".join(f"{'next' if not at else '':<8} {line}" for at, line in enumerate(lines)))


def tell(console: Console, words: str, *, warns: bool) -> None:
    """A line of what a run found."""
    console.print(f"{'[yellow]![/]' if warns else '[blue]·[/]'} {escape(words)}", highlight=False, soft_wrap=True)
