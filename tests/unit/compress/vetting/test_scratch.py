"""Folders of processes that were killed are removed by the next one; everybody else's stay."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compress.vetting.scratch import is_held, scratch, sweep

HOLD = """
import sys, time
from compress.vetting.scratch import scratch
with scratch("kept-", "about") as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@contextmanager
def held() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with a folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_one_of_a_killed_process_is_removed_and_told_of() -> None:
    told: list[tuple[Path, str]] = []
    with held() as (process, folder):
        assert sweep("kept-") == []
        assert folder.is_dir()

        process.send_signal(signal.SIGKILL)
        process.wait()

        assert sweep("kept-", lambda *each: told.append(each)) == [folder]
        assert told == [(folder, "about")]
        assert not folder.exists()


def test_one_s_own_stays_until_its_block_ends() -> None:
    with scratch("kept-") as mine:
        assert sweep("kept-") == []
        assert mine.is_dir()
    assert not mine.exists()


def made(folder: Path, kind: str) -> Path:
    path = folder / "kept-x"
    if kind == "a link":
        other = folder / "other"
        other.mkdir()
        (other / "owner").write_text("-")
        path.symlink_to(other)
        return path
    if kind == "a file":
        path.write_text("-")
        return path
    path.mkdir()
    owner = path / "owner"
    if kind == "without an owner":
        (path / "file").touch()
    elif kind == "not locked yet":
        owner.touch()
    elif kind == "with a link for its owner":
        (folder / "elsewhere").write_text("-")
        owner.symlink_to(folder / "elsewhere")
    elif kind == "with a pipe for its owner":
        os.mkfifo(owner)
    else:
        owner.write_text("-")
        path.chmod(0o777)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "a link", "a file", "without an owner", "not locked yet", "with a link for its owner",
        "with a pipe for its owner", "that others may write to",
    ],
)  # fmt: skip
def test_what_may_be_somebody_else_s_stays(folder: Path, kind: str) -> None:
    path = made(folder, kind)

    assert sweep("kept-") == []

    assert path.exists()


def test_a_folder_is_held_while_its_process_lives_and_no_other_is(tmp_path: Path) -> None:
    with scratch("held-") as folder:
        assert is_held(folder, "held-")
        assert not is_held(folder, "other-")
        (tmp_path / "held-a").mkdir()
        (tmp_path / "held-a/owner").write_text("-")
        assert not is_held(tmp_path / "held-a", "held-")
        copy = folder.with_name(f"{folder.name}-copy")
        shutil.copytree(folder, copy)
        try:
            assert not is_held(copy, "held-")
        finally:
            shutil.rmtree(copy)
    assert not is_held(folder, "held-")


def test_one_that_was_never_locked_goes_after_an_hour_unless_it_holds_something(folder: Path) -> None:
    """Its process was killed between the two; else it would lie there for good."""
    path = made(folder, "not locked yet")
    os.utime(path / "owner", (time.time() - 3700,) * 2)
    (path / "file").touch()
    assert sweep("kept-") == []
    (path / "file").unlink()
    assert sweep("kept-") == [path]
