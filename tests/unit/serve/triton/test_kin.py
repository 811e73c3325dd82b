"""Whose a process is: of which family, and which model's process began it, whatever it does to leave them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serve.triton.find import MARKS, STUB
from serve.triton.kin import processes
from serve.triton.processes import Family
from serve.triton.stubs import Relatives, kill, relatives_in

pytestmark = pytest.mark.clock

OTHER = "subprocess.Popen(['/bin/sleep', '600'], start_new_session=True{})"
ORPHAN = "if os.fork() == 0:\n    {}\n    os._exit(0)\nos.wait()\n"
WAYS = {
    "a child in a session of its own": f"{OTHER.format('')}\n",
    "an orphan in a session of its own": ORPHAN.format(OTHER.format("")),
    "a copy of itself": "if os.fork() == 0:\n    time.sleep(600)\n",
    "a child with another environment": f"{OTHER.format(', env={}')}\n",
}


@pytest.fixture(params=WAYS)
def family(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Family]:
    """Stands for a Triton that runs a model, whose code begins a process."""
    program, code = tmp_path / "stub" / STUB, tmp_path / "models" / "m" / "1" / "model.py"
    for each in (program, code):
        each.parent.mkdir(parents=True)
    program.symlink_to(sys.executable)
    (tmp_path / STUB).write_text(MARKS)
    (tmp_path / STUB).chmod(0o700)
    code.write_text(f"import os, subprocess, time\n{WAYS[request.param]}time.sleep(600)\n")
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


def begun(family: Family, folder: Path) -> Relatives:
    """Whose each is, once the model's process has begun another."""

    def look() -> Relatives:
        return relatives_in(family.members(), str(folder / "models"))

    until(lambda: bool(look().begun))
    time.sleep(0.2)  # what was in between has ended
    return look()


def test_what_a_models_process_begins_is_that_models(family: Family, tmp_path: Path) -> None:
    found = begun(family, tmp_path)
    (stub,) = found.stubs
    assert stub.model == "m"
    assert list(found.begun.values()) == [stub.pid]
    assert found.own == [family.pid]
    assert not found.left


def test_it_ends_with_the_family(family: Family, tmp_path: Path) -> None:
    found = begun(family, tmp_path)
    family.end(0.1)
    until(lambda: processes().keys().isdisjoint(found.begun))


def test_it_is_left_once_the_models_process_has_ended(
    family: Family, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    found = begun(family, tmp_path)
    kill([found.stubs[0].pid])
    until(lambda: found.stubs[0].pid not in processes())
    after = relatives_in(family.members(), str(tmp_path / "models"))
    kill(found.begun)
    if "another environment" not in request.node.callspec.id:  # nothing says whose that was
        assert after.left == list(found.begun)
    assert not after.stubs
