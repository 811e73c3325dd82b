"""Who may serve a repository, and whom nobody else keeps from it."""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compress.errors import ServerError
from serve.up import claim
from serve.up.claim import claimed, served_by


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(claim, "_candidates", lambda: [tmp_path / "cache", tmp_path / "tmp"])
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def test_one_process_serves_a_repository_and_the_next_is_told_which(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with claimed(repository), claimed(tmp_path / "other"):
        with pytest.raises(ServerError) as caught, claimed(repository):
            pass
        assert f"the process {os.getpid()} serves it already" in caught.value.why
        (lock, _) = (tmp_path / "cache").iterdir()
        assert lock.parent.stat().st_mode & 0o777 == 0o700
        for each in (*lock.parent.iterdir(), *(tmp_path / "tmp").iterdir()):
            each.write_text(f"{os.getpid()} pid:[1]")
        with pytest.raises(ServerError) as caught, claimed(repository):
            pass
        assert "a process of another container serves it already" in caught.value.why
    with claimed(repository):
        pass
    assert not [*(tmp_path / "cache").iterdir()]


def test_who_comes_second_learns_where_it_is_served(repository: Path) -> None:
    with claimed(repository, "http://127.0.0.1:8080"):
        with pytest.raises(ServerError) as caught, claimed(repository):
            pass
        assert caught.value.why == f"the process {os.getpid()} (at http://127.0.0.1:8080) serves it already"


def test_what_a_killed_process_left_keeps_nobody_out(repository: Path, tmp_path: Path) -> None:
    with claimed(repository):
        (lock,) = (tmp_path / "cache").iterdir()
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
    folder = tmp_path / "cache"
    with claimed(repository):
        (lock,) = folder.iterdir()
    lock.touch()
    folder.chmod(0o777)
    with flock(lock), claimed(repository):
        (own,) = (tmp_path / "tmp").iterdir()
        assert own.name == lock.name


def test_without_a_folder_of_its_own_it_serves_all_the_same(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    (tmp_path / "tmp").touch()
    with claimed(repository), claimed(repository):
        pass


def test_the_environment_has_no_say_in_where_the_lock_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = claim._candidates()
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "USER", "LOGNAME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert claim._candidates() == before
    assert Path(pwd.getpwuid(os.geteuid()).pw_dir) / ".cache/compress-serve/served" in before


@pytest.mark.parametrize("lost", ["cache", "tmp"])
def test_two_that_have_but_one_folder_in_common_meet_there(repository: Path, tmp_path: Path, lost: str) -> None:
    with claimed(repository):
        for each in (tmp_path / lost).iterdir():
            each.unlink()
        with pytest.raises(ServerError, match="serves it already"), claimed(repository):
            pass
    assert not [*(tmp_path / "cache").iterdir(), *(tmp_path / "tmp").iterdir()], "nor does who was refused keep one"
    with claimed(repository):
        pass


def test_on_a_full_disk_the_lock_holds_without_a_word(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with claimed(repository), pytest.raises(ServerError, match="another process serves it"), claimed(repository):
        pass


def test_whether_somebody_serves_it_can_be_asked_without_being_in_the_way(repository: Path) -> None:
    assert not served_by(repository)
    with claimed(repository, "http://127.0.0.1:8080"):
        assert served_by(repository) == f"the process {os.getpid()} (at http://127.0.0.1:8080)"
        assert not served_by(repository.parent)
    assert not served_by(repository)
    assert not served_by(repository / "missing")
