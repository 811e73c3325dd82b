"""When a dead server is started again, and what a watcher makes of a changed repository."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import pytest

from serve.gateway.health.fingerprints import Suspect
from serve.gateway.health.flights import Flight
from serve.gateway.health.outages import Outages
from serve.gateway.health.suspects import Suspects
from serve.gateway.server import SPARE_FILES, _clients, _with_files
from serve.gateway.settings import Settings
from serve.triton.heal import Healer
from serve.triton.processes import Family
from serve.triton.stubs import Stub, stubs_in
from serve.triton.supervisor import AT_ONCE, CLIENT, KEY, SERVER, START, Backoff, cause_of, supervise
from serve.up.options import cpus_of
from serve.up.watch import Fingerprint, TellTriton, fingerprints, follow, plan

pytestmark = pytest.mark.clock

P = ParamSpec("P")


def test_the_wait_doubles_up_to_a_longest_one_and_then_it_is_enough() -> None:
    backoff = Backoff(5, first_s=1.0, longest_s=5.0)
    assert [backoff.after(0.1) for _ in range(6)] == [1.0, 2.0, 4.0, 5.0, 5.0, None]


def test_a_server_that_lived_long_begins_a_new_row() -> None:
    backoff = Backoff(1)
    assert [backoff.after(lived) for lived in (1.0, 100.0, 100.0, 1.0)] == [0.5, 0.5, 0.5, None]


def test_never_means_never() -> None:
    assert Backoff(0).after(1000.0) is None


def test_deaths_are_counted_by_their_cause() -> None:
    backoff = Backoff(2)
    assert [backoff.after(1.0, SERVER), backoff.after(1.0, START)] == [0.5, 0.5]
    assert [backoff.after(1.0, SERVER), backoff.after(0.0, START)] == [1.0, 1.0]
    assert [backoff.after(1.0, SERVER), backoff.after(0.0, START)] == [None, None]


@pytest.mark.parametrize("flying", [["a", "b"], [""], ["", "a"]])
def test_clients_never_end_it_alone_or_together(flying: list[str]) -> None:
    cause = cause_of([Suspect(key, "m", str(number)) for number, key in enumerate(flying)])
    assert cause == CLIENT
    backoff = Backoff(1)
    waits = [backoff.after(1.0, cause) for _ in range(50)]
    assert waits[:3] == [0.5, 1.0, 2.0]
    assert waits[-1] == 30.0
    assert backoff.after(1.0, cause_of([])) == 0.5, "their deaths are not the server's"
    assert backoff.after(1.0, cause_of([])) is None
    assert Backoff(0).after(1.0, cause) is None


def test_what_one_key_did_alone_is_waited_for_by_nobody_up_to_a_bound() -> None:
    assert cause_of([Suspect("a", "m", "1"), Suspect("a", "m", "2"), Suspect("a", "n", "")]) == KEY
    backoff = Backoff(1)
    assert [backoff.after(1.0, KEY) for _ in range(AT_ONCE)] == [0.0] * AT_ONCE
    assert backoff.after(1.0, SERVER) == 0.5, "their deaths are not the server's"
    waits = [backoff.after(1.0, KEY) for _ in range(50)]
    assert waits[:3] == [0.5, 1.0, 2.0], "so many deaths are not of one key that is refused"
    assert waits[-1] == 30.0
    assert backoff.after(100.0, KEY) == 0.0
    assert Backoff(0).after(1.0, KEY) is None


def test_a_death_after_an_answer_may_be_of_what_was_answered() -> None:
    assert cause_of([]) == SERVER
    assert cause_of([], asked=True) == CLIENT
    assert cause_of([Suspect("a", "m", "1")], asked=True) == KEY


@pytest.mark.parametrize(("text", "cores"), [(None, ()), ("0", (0,)), ("0-2,5, 1", (0, 1, 2, 5))])
def test_cores_are_lists_of_numbers_and_ranges(text: str | None, cores: tuple[int, ...]) -> None:
    assert cpus_of(text) == cores


def test_parts_are_loaded_before_their_ensemble_and_unloaded_after_it() -> None:
    file = frozenset({("config.pbtxt", 1, 1)})
    before = {"a": file, "gone": file, "gone_network": file}
    now = {"a": frozenset({("config.pbtxt", 1, 2)}), "a_network": file, "empty": frozenset()}
    assert plan(before, now, {"a", "gone"}) == (["a_network", "a"], ["gone", "gone_network"])


def test_a_fingerprint_sees_files_but_not_what_python_and_pack_leave_behind(tmp_path: Path) -> None:
    (tmp_path / "a/1/__pycache__").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a/config.pbtxt").write_text("x")
    before = fingerprints(tmp_path)
    assert before is not None
    assert [name for name, _, _ in before["a"]] == ["config.pbtxt"]
    (tmp_path / "a/1/__pycache__/model.pyc").write_text("y")
    (tmp_path / "a/.packed.pbtxt").write_text("y")
    assert fingerprints(tmp_path) == before
    (tmp_path / "a/1/model.onnx").write_text("y")
    assert fingerprints(tmp_path) != before


def test_nothing_is_seen_while_somebody_writes(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        assert fingerprints(tmp_path) is None
    finally:
        os.close(folder)
    assert fingerprints(tmp_path) == {}


def in_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@contextmanager
def without_files() -> Iterator[None]:
    """Nothing can be opened, as when clients' connections have used up what the process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it did not come about")


class Processes:
    """As much of a Triton as its processes: those of one program."""

    running = True

    def __init__(self, family: Family) -> None:
        self._family = family
        self.looks = 0

    def stubs(self) -> list[Stub]:
        self.looks += 1
        return stubs_in(self._family.members(), "/models")

    def end_left(self) -> list[int]:
        return []

    def restart(self) -> None:
        self._family.members()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    family = Family(["/bin/sleep", "600"], environ=os.environ, log=tmp_path / "log", folder=tmp_path)
    yield Processes(family)
    family.end(10.0)


@in_a_loop
async def test_a_healer_without_files_tells_once_and_goes_on(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.triton.heal.LOOK_S", 0.01)
    events: list[str] = []
    triton: Any = processes
    healing = asyncio.ensure_future(Healer(triton, dict, Outages(), Suspects(), events.append).run())
    await until(lambda: processes.looks > 2)
    with without_files():
        await until(lambda: processes.looks > 20 or healing.done())
    looks = processes.looks
    await until(lambda: processes.looks > looks + 2 or healing.done())
    assert not healing.done()
    assert len(events) == 1
    assert "Too many open files" in events[0]
    healing.cancel()
    await asyncio.gather(healing, return_exceptions=True)


@in_a_loop
async def test_a_supervisor_without_files_starts_triton_once_it_has_some(processes: Processes) -> None:
    events: list[str] = []
    processes.running = False
    triton: Any = processes
    triton.returncode = -9
    backoff = Backoff(1, first_s=0.01, longest_s=0.05)
    with without_files():
        watching = asyncio.ensure_future(supervise(triton, backoff, Outages(), Suspects(), events.append))
        await until(lambda: len(events) > 9 or watching.done())
        assert not watching.done()
        processes.running = True
    await until(lambda: "ready again" in events[-1])
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.parametrize("answered", [False, True])
@in_a_loop
async def test_a_triton_that_dies_after_its_answers_is_started_for_ever(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    monkeypatch.setattr("serve.triton.supervisor.WATCH_S", 0.001)
    events: list[str] = []
    suspects = Suspects()
    processes.running = False
    triton: Any = processes
    triton.returncode = -11

    def restart() -> None:
        if answered:
            flight = Flight("key", "net", b"{}")
            suspects.take_off(flight)
            suspects.land(flight, answered=True)

    triton.restart = restart
    backoff = Backoff(2, first_s=0.001, longest_s=0.002)
    watching = asyncio.ensure_future(supervise(triton, backoff, Outages(), suspects, events.append))
    await until(lambda: len(events) > 20 or watching.done())
    assert watching.done() is not answered
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


@in_a_loop
async def test_a_bad_round_of_following_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Path] = []

    def look(repository: Path) -> dict[str, Fingerprint] | None:
        looks.append(repository)
        if 2 < len(looks) < 6:
            raise ValueError("not to be looked at")
        return {}

    monkeypatch.setattr("serve.up.watch.fingerprints", look)
    events: list[str] = []
    following = asyncio.ensure_future(follow(tmp_path, TellTriton("127.0.0.1:1", {}, None), events.append, look_s=0.01))
    await until(lambda: len(looks) > 9 or following.done())
    assert not following.done()
    assert events == ["can't follow the repository: not to be looked at; it is tried again"]
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


def test_a_family_is_ended_where_there_is_no_file_to_look_with(tmp_path: Path) -> None:
    command = ["/bin/sh", "-c", "trap '' TERM; sleep 600 & echo started; wait; sleep 600"]
    family = Family(command, environ=os.environ, log=tmp_path / "log", folder=tmp_path)
    while "started" not in (tmp_path / "log").read_text():
        time.sleep(0.05)
    with without_files():
        family.end(0.1)
    deadline = time.monotonic() + 30
    while family.members() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert family.members() == []


def test_connections_leave_files_for_what_works_beside_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = Settings(max_clients=20_000, grpc_port=1, grpc_upstream=("127.0.0.1:2",))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    clients, grpc_clients = _clients(*_with_files(asked))
    assert limits == [(4096, 4096)]
    assert clients + grpc_clients <= 4096 - SPARE_FILES
    assert min(clients, grpc_clients) > 1000
    assert "max_clients 20000" in caplog.text
    caplog.clear()
    assert _clients(*_with_files(Settings(max_clients=100))) == (100, 1)
    assert caplog.text == ""
