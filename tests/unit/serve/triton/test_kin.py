"""Whose a process is: of which family, and which model's process began it, whatever it does to leave them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serve.triton import stubs
from serve.triton.find import MARKS, STUB
from serve.triton.kin import Process, processes
from serve.triton.processes import Family
from serve.triton.stubs import Kinship, Relatives, Stub, kill

pytestmark = pytest.mark.clock

OTHER = "subprocess.Popen(['/bin/sleep', '600'], start_new_session=True{})"
ORPHAN = "if os.fork() == 0:\n    {}\n    os._exit(0)\nos.wait()\n"
WAYS = {
    "a child in a session of its own": f"{OTHER.format('')}\n",
    "an orphan in a session of its own": ORPHAN.format(OTHER.format("")),
    "a copy of itself": "if os.fork() == 0:\n    time.sleep(600)\n",
    "a child with another environment": f"{OTHER.format(', env={}')}\n",
}


# As setproctitle, redis and nginx do: the kernel reads both from the process's own memory.
WRITES_OVER = """
import ctypes, os, pathlib, time
def write_over():
    while not pathlib.Path({folder!r}, "now").exists():
        time.sleep(0.01)
    at = list(map(int, open("/proc/self/stat").read().rpartition(")")[2].split()[45:49]))
    for first, last in zip(at[::2], at[1::2]):
        ctypes.memset(first, 120, last - first)
    pathlib.Path({folder!r}, str(os.getpid())).touch()
    time.sleep(600)
"""


@pytest.fixture(params=WAYS)
def family(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Family]:
    """Stands for a Triton that runs a model, whose code begins a process."""
    with running(tmp_path, f"import os, subprocess, time\n{WAYS[request.param]}time.sleep(600)\n") as family:
        yield family


@contextmanager
def running(tmp_path: Path, model: str) -> Iterator[Family]:
    """A family whose first process runs the code of a model."""
    program, code = tmp_path / "stub" / STUB, tmp_path / "models" / "m" / "1" / "model.py"
    for each in (program, code):
        each.parent.mkdir(parents=True)
    program.symlink_to(sys.executable)
    (tmp_path / STUB).write_text(MARKS)
    (tmp_path / STUB).chmod(0o700)
    code.write_text(model)
    triton = f"'{tmp_path}/{STUB}' '{code}' 1 2 3 4 5 6 m_0_0 & wait"
    family = Family(["/bin/sh", "-c", triton], environ=os.environ, log=tmp_path / "log", folder=tmp_path)
    yield family
    kill(family.members())
    family.end(10.0)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come about")


@pytest.fixture
def kinship(tmp_path: Path) -> Kinship:
    return Kinship(str(tmp_path / "models"))


def begun(family: Family, kinship: Kinship) -> Relatives:
    """Whose each is, once the model's process has begun another."""
    until(lambda: bool(kinship.relatives(family.members()).begun))
    time.sleep(0.2)  # what was in between has ended
    return kinship.relatives(family.members())


def test_what_a_models_process_begins_is_that_models(family: Family, kinship: Kinship) -> None:
    found = begun(family, kinship)
    (stub,) = found.stubs
    assert stub.model == "m"
    assert list(found.begun.values()) == [stub.pid]
    assert found.own == [family.pid]
    assert not found.left


def test_it_ends_with_the_family(family: Family, kinship: Kinship) -> None:
    found = begun(family, kinship)
    family.end(0.1)
    until(lambda: processes().keys().isdisjoint(found.begun))


def test_it_is_left_once_the_models_process_has_ended(family: Family, kinship: Kinship) -> None:
    found = begun(family, kinship)
    kill([found.stubs[0].pid])
    until(lambda: found.stubs[0].pid not in processes())
    after = kinship.relatives(family.members())
    kill(found.begun)
    assert after.left == list(found.begun)
    assert not after.stubs


def test_what_writes_over_its_command_line_and_its_environment_stays_what_it_was(
    tmp_path: Path, kinship: Kinship
) -> None:
    code = WRITES_OVER.format(folder=str(tmp_path))
    with running(tmp_path, f"{code}\nif os.fork() == 0:\n    os.setsid()\nwrite_over()\n") as family:
        before = begun(family, kinship)
        (stub,), (child,) = before.stubs, before.begun
        (tmp_path / "now").touch()
        until(lambda: all((tmp_path / str(pid)).exists() for pid in (stub.pid, child)))
        assert b"SERVE_" not in Path(f"/proc/{child}/environ").read_bytes()
        assert kinship.relatives(family.members()) == before
        kill([stub.pid])
        until(lambda: stub.pid not in processes())
        assert kinship.relatives(family.members()).left == [child]
        family.end(0.1)
        until(lambda: child not in processes())


def test_an_id_that_another_process_has_by_now_is_not_taken_for_the_one_before(
    monkeypatch: pytest.MonkeyPatch, kinship: Kinship
) -> None:
    first, later = ({7: Process(1, 7, began)} for began in (100, 200))
    monkeypatch.setattr(stubs, "stubs_in", lambda pids, _: [Stub(7, "m", "m_0_0")] if 7 in pids else [])
    monkeypatch.setattr(stubs, "processes", lambda: first)
    assert [stub.pid for stub in kinship.relatives([7]).stubs] == [7]
    monkeypatch.setattr(stubs, "stubs_in", lambda _pids, _: [])
    assert [stub.pid for stub in kinship.relatives([7]).stubs] == [7]
    monkeypatch.setattr(stubs, "processes", lambda: later)
    assert kinship.relatives([7]).own == [7]
