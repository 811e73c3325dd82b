"""What a file says is shown as it is read, wherever the commands print it: no letter of it steers the terminal."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import pytest
from rich.markup import escape
from rich.panel import Panel
from rich.progress import Progress
from rich.table import Table

import compress
from compress.cli.printed import console_of
from compress.console.plain import Console
from compress.console.quiet import quiet
from compress.console.wording import AssumedWarning

NAME = "a\x1b[2Jb\x9b31mc\u202ed\x07\re"
READ = "a [2Jb 31mc d  e"


def table() -> Table:
    found = Table(title=escape(NAME))
    found.add_column(escape(NAME), no_wrap=True)
    found.add_row(escape(NAME))
    return found


@pytest.mark.parametrize(
    "shown", [escape(NAME), table(), Panel(table(), title=escape(NAME))], ids=["text", "table", "panel"]
)
@pytest.mark.parametrize("terminal", [False, True])
def test_texts_of_files_steer_no_terminal(shown: object, *, terminal: bool) -> None:
    stream = io.StringIO()
    Console(file=stream, width=80, force_terminal=terminal, color_system=None).print(shown)
    told = stream.getvalue()
    assert not set("\x1b\x9b\u202e\x07") & set(told)
    assert "[2Jb" in told


def test_colours_and_bars_are_drawn_as_ever() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, color_system="standard")
    console.print("[red]x[/]")
    assert stream.getvalue() == "\x1b[31mx\x1b[0m\n"
    with Progress(console=console) as bar:
        bar.add_task(NAME, total=2)
    assert "\x1b[" in stream.getvalue()
    assert "\x1b[2J" not in stream.getvalue()


def test_all_that_the_commands_print_goes_through_it() -> None:
    assert isinstance(console_of(), Console)
    sources = Path(compress.__file__).parent.rglob("*.py")
    made = [
        path.name
        for path in sources
        if "rich.console import Console" in path.read_text() and "Console(" in path.read_text()
    ]
    assert made == ["plain.py"]


def test_an_arrays_name_in_a_warning_steers_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "1.npz", x=np.zeros((2, 3), np.float32))
    with quiet(verbose=False), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(f"not used: {NAME}", AssumedWarning, stacklevel=1)
    assert not set("\x1b\x9b\u202e") & set(capsys.readouterr().err)
