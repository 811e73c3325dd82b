"""Who may serve a repository, and whom nobody else keeps from it."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compress.errors import ServerError
from serve.up.claim import claimed


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def test_one_process_serves_a_repository_and_the_next_is_told_which(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with claimed(repository), claimed(tmp_path / "other"):
        with pytest.raises(ServerError) as caught, claimed(repository):
            pass
        assert f"the process {os.getpid()} serves it already" in caught.value.why
        (lock, _) = (tmp_path / "cache/compress-serve/served").iterdir()
        assert lock.parent.stat().st_mode & 0o777 == 0o700
        for each in lock.parent.iterdir():
            each.write_text(f"{os.getpid()} pid:[1]")
        with pytest.raises(ServerError) as caught, claimed(repository):
            pass
        assert "a process of another container serves it already" in caught.value.why
    with claimed(repository):
        pass
    assert not [*(tmp_path / "cache/compress-serve/served").iterdir()]


def test_what_a_killed_process_left_keeps_nobody_out(repository: Path, tmp_path: Path) -> None:
    with claimed(repository):
        (lock,) = (tmp_path / "cache/compress-serve/served").iterdir()
    lock.write_text("1 pid:[1]")
    with claimed(repository):
        pass


def test_names_that_every_user_can_take_are_no_lock(repository: Path) -> None:
    """An abstract socket has no owner, and what it would be called can be computed."""
    told = repository.stat()
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(f"\0serve-up-{told.st_dev:x}-{told.st_ino:x}")
        squatter.listen()
        with claimed(repository):
            pass


@contextmanager
def flock(path: Path) -> Iterator[None]:
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_a_folder_that_others_may_enter_holds_no_lock(repository: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache/compress-serve/served"
    with claimed(repository):
        (lock,) = folder.iterdir()
    lock.touch()
    folder.chmod(0o777)
    with flock(lock), claimed(repository):
        (own,) = (tmp_path / f"tmp/compress-served-{os.geteuid()}").iterdir()
        assert own.name == lock.name


def test_without_a_folder_of_its_own_it_serves_all_the_same(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    (tmp_path / "tmp").touch()
    with claimed(repository), claimed(repository):
        pass
