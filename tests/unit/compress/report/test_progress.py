"""A run shown where there is no terminal: plain lines, now and then."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from compress.console.wording import Note
from compress.onnx_export.fold import FoldOnnx
from compress.pipeline import Outcome
from compress.report.progress import Terminal, TimeLeft
from compress.stage import Given


def test_without_a_terminal_long_work_tells_of_itself_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("compress.report.progress.time.perf_counter", lambda: clock[0])
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
    monkeypatch.setattr("compress.report.progress.time.perf_counter", lambda: clock[0])
    shown = io.StringIO()
    with Terminal(Console(file=shown, width=200)) as terminal:
        tell = terminal.started("finetune")
        for step, total, second in ((400, 500, 0.0), (500, 500, 1.0), (900, 1000, 1.0), (910, 1000, 21.0)):
            clock[0] = second
            tell(step, total, "")
    assert shown.getvalue().endswith("3:00 min left\n")


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([(0, 8, 20.0), (1, 8, 20.01)], "12%, layers tried"),  # a part that has just begun has no pace
        ([(0, 800, 20.0), (799, 800, 36.0)], "100%, layers tried, 1 s left"),  # it is not through
        ([(0, 8, 0.0), (1, 8, 0.01), (1, 8, 16.0)], "12%, layers tried, 1:52 min left"),  # the second takes long
        ([(0, 8, 0.0), (0, 8, 16.0)], "0%, layers tried"),  # the first does
    ],
)
def test_the_time_left_is_no_less_than_what_is_known(
    steps: list[tuple[int, int, float]], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("compress.report.progress.time.perf_counter", lambda: clock[0])
    shown = io.StringIO()
    with Terminal(Console(file=shown, width=200)) as terminal:
        tell = terminal.started("sensitivity")
        for done, total, clock[0] in steps:
            tell(done, total, "layers tried")
    assert shown.getvalue().splitlines()[-1].endswith(told)


@pytest.mark.parametrize(
    ("done", "second", "told"), [(1, 0.01, ""), (1, 30.0, "3:30 min left"), (7, 30.0, "4 s left"), (8, 30.0, "")]
)
def test_the_bar_counts_a_step_that_goes_on(
    done: int, second: float, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.report.progress.time.perf_counter", lambda: second)
    bar = Progress(TimeLeft(), disable=True)
    task = bar.add_task("", total=8, since=0.0, first=0)
    bar.update(task, completed=done)
    assert TimeLeft().render(bar.tasks[0]).plain == told


@pytest.mark.parametrize(
    ("stage", "total", "note", "told"),
    [
        ("memory", 1, "models loaded alone", "memory 1 model loaded alone"),
        ("compare", 2000, "samples", "compare 2,000 samples"),
        ("sensitivity", 1, "4 groups can lose channels", "sensitivity 4 groups can lose channels"),
        ("sensitivity", 1, "1 group can lose channels", "sensitivity 1 group can lose channels"),
        ("sensitivity", 12, "layers and ratios tried", "sensitivity 12 layers and ratios tried"),
    ],
)
def test_what_is_through_is_counted_once_and_agrees(stage: str, total: int, note: str, told: str) -> None:
    shown = io.StringIO()
    with Terminal(Console(file=shown, width=200)) as terminal:
        terminal.started(stage)(total, total, note)
    assert told in " ".join(shown.getvalue().split())


def test_a_note_is_not_shown_as_a_warning() -> None:
    shown = io.StringIO()
    given = Given(object(), "did it", warnings=("Mind.", Note("It is so.")))  # type: ignore[arg-type]
    with Terminal(Console(file=shown, width=200)) as terminal:
        terminal.ended(Outcome(FoldOnnx(), given, 1.0, reused=False, size_bytes=None))
    lines = [" ".join(line.split()) for line in shown.getvalue().splitlines()]
    assert lines[:2] == ["warning Mind.", "note It is so."]
