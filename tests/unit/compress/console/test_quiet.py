"""Only the toolkit's own lines are shown: what libraries print, from Python or C++, is in a log; --verbose shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compress.console.quiet import quiet
from compress.errors import StageError

PROGRAM = """
import os, subprocess, sys, warnings
from pathlib import Path
from compress.errors import StageError
from compress.console.quiet import quiet

def library():
    print("python out")
    print("python err", file=sys.stderr)
    os.write(1, b"c out\\n")
    os.write(2, b"c err\\n")
    warnings.warn("a warning")
    subprocess.run([sys.executable, "-c", "print('child out')"])

how, work = sys.argv[1], Path(sys.argv[2])
with quiet(verbose=how == "verbose", keep=(work / "log.txt").write_text) as streams:
    print("own err", file=streams.err)
    library()
    print("own out", file=streams.out)
    if how == "mistake":
        raise StageError("a", why="b", mend="c")
    if how == "bug":
        1 / 0
print("after")
"""
LEAKS = ("python out", "python err", "c out", "c err", "a warning", "child out")


def run(how: str, work: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM, how, str(work)], capture_output=True, text=True)


def test_what_libraries_print_is_in_the_log_and_nowhere_else(tmp_path: Path) -> None:
    done = run("plain", tmp_path)
    assert (done.stdout, done.stderr) == ("own out\nafter\n", "own err\n")
    log = (tmp_path / "log.txt").read_text()
    assert [leak for leak in LEAKS if leak not in log] == []


def test_verbose_shows_it(tmp_path: Path) -> None:
    done = run("verbose", tmp_path)
    assert [leak for leak in LEAKS if leak not in done.stdout + done.stderr] == []
    assert not (tmp_path / "log.txt").exists()


def test_a_user_s_mistake_shows_no_more_and_keeps_the_log(tmp_path: Path) -> None:
    done = run("mistake", tmp_path)
    before = done.stderr.partition("Traceback")[0]  # of the test's own program
    assert before == "own err\n"
    assert "c err" in (tmp_path / "log.txt").read_text()


def test_a_bug_shows_the_last_lines_before_its_traceback(tmp_path: Path) -> None:
    done = run("bug", tmp_path)
    assert "  log: c err" in done.stderr.partition("Traceback")[0]
    assert "ZeroDivisionError" in done.stderr


def test_streams_are_what_they_were_afterwards(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before = sys.stdout, sys.stderr

    def failing() -> None:
        with quiet(keep=(tmp_path / "missing/log.txt").write_text):
            os.write(1, b"lost\n")
            raise StageError("a", why="b", mend="c")

    for _ in range(3):
        with pytest.raises(StageError):
            failing()
    assert (sys.stdout, sys.stderr) == before
    os.write(1, b"seen\n")
    assert capfd.readouterr().out == "seen\n"
