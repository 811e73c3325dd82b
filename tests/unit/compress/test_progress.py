"""A run shown where there is no terminal: plain lines, now and then."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from compress.progress import Terminal


def test_without_a_terminal_long_work_tells_of_itself_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("compress.progress.time.perf_counter", lambda: clock[0])
    shown = io.StringIO()
    with Terminal(Console(file=shown, width=200)) as terminal:
        tell = terminal.started("finetune")
        for step in range(1, 101):
            clock[0] = float(step)
            tell(step, 100, f"epoch 1/1, loss {1 / step:.2f}")
    lines = shown.getvalue().splitlines()
    assert len(lines) == 6
    assert lines[0].split() == ["…", "finetune", "15%,", "epoch", "1/1,", "loss", "0.07,", "1:25", "min", "left"]
    assert lines[-1].endswith("10 s left")


def test_what_an_earlier_run_had_done_does_not_count_as_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("compress.progress.time.perf_counter", lambda: clock[0])
    shown = io.StringIO()
    with Terminal(Console(file=shown, width=200)) as terminal:
        tell = terminal.started("finetune")
        for step, total, second in ((400, 500, 0.0), (500, 500, 1.0), (900, 1000, 1.0), (910, 1000, 21.0)):
            clock[0] = second
            tell(step, total, "")
    assert shown.getvalue().endswith("3:00 min left\n")
