"""Whose process is ended for what a model says, and what a broken folder does to healing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from compress.errors import ToolkitError
from serve.gateway.health.outages import Outages
from serve.gateway.health.suspects import Suspects
from serve.triton import heal
from serve.triton.causes import AT_ONCE, CLIENT, KEY, SERVER
from serve.triton.heal import Healer, kept
from serve.triton.stubs import Stub, is_stopped
from tests.serve_http import in_loop

pytestmark = pytest.mark.clock

USERS = {"net": frozenset(("net", "ensemble")), "other": frozenset(("other",))}


class Running:
    """Stands for a Triton with a process of its own for the model "net"."""

    running, http_address, grpc_address = True, "", ""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.control: dict[str, str] = {}
        self.ended: set[int] = set()
        self.wedged: set[str] = set()

    def stubs(self) -> list[Stub]:
        return [Stub(self.pid, "net", "net_0_0")]

    def end_left(self) -> list[int]:
        """Nor has its process begun others."""
        return []

    def close_regions(self) -> None:
        """It has none."""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


later = process
"""Another one."""


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about")


def healer(process: subprocess.Popen[bytes], uses: Any, events: list[str]) -> Healer:
    triton: Any = Running(process.pid)
    return Healer(triton, uses, Outages(), Suspects(), events.append)


@pytest.mark.parametrize("on_purpose", [True, False])
@in_loop
async def test_a_process_whose_load_was_given_up_has_not_died(
    process: subprocess.Popen[bytes], on_purpose: bool
) -> None:
    one = healer(process, lambda: USERS, [])
    await one._look()
    if on_purpose:
        one._triton.ended.add(process.pid)
    process.kill()
    await until(lambda: process.pid not in one._watched)
    assert bool(one._outages.deaths["net"]) is not on_purpose
    assert not one._triton.ended
    for task in one._tasks:
        task.cancel()
    await asyncio.gather(*one._tasks, return_exceptions=True)


@pytest.mark.parametrize("watched", [True, False])
@in_loop
async def test_one_that_is_ended_while_processes_are_looked_for_has_not_died(
    process: subprocess.Popen[bytes], watched: bool
) -> None:
    one = healer(process, lambda: USERS, [])
    if watched:
        await one._look()
    loop, listed = asyncio.get_running_loop(), one._triton.stubs()

    def stubs() -> list[Stub]:
        one._triton.ended.add(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # Triton has not cleared it away
        if watched:
            asyncio.run_coroutine_threadsafe(until(lambda: process.pid not in one._watched), loop).result()
        return listed

    one._triton.stubs = stubs  # type: ignore[method-assign]
    assert await one._look() == {}
    await asyncio.sleep(0.1)
    assert not one._outages.deaths
    assert not one._watched
    assert not one._triton.ended


@in_loop
async def test_a_process_that_does_not_stand_still_is_not_ended_for_what_is_said(
    process: subprocess.Popen[bytes],
) -> None:
    one = healer(process, lambda: USERS, [])
    await one._look()
    one._seen[process.pid] = time.monotonic() - 60
    one._stopped[process.pid] = time.monotonic() - 40  # before the request that is told so
    one._reported("net_0_0", time.monotonic() - 30, "net")
    await asyncio.gather(*one._tasks)
    assert process.poll() is None
    one._leave(process.pid)


@in_loop
async def test_one_that_goes_on_after_it_stood_still_is_ended(process: subprocess.Popen[bytes]) -> None:
    one = healer(process, lambda: USERS, [])
    await one._look()
    one._seen[process.pid] = time.monotonic() - 60
    process.send_signal(signal.SIGSTOP)
    await until(lambda: is_stopped(process.pid))
    one._probe()
    process.send_signal(signal.SIGCONT)
    one._reported("net_0_0", time.monotonic() - 30, "net")
    await until(lambda: process.pid not in one._watched)
    assert await asyncio.to_thread(process.wait, 60) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("instance", "asked", "others", "lost"),
    [
        ("net_0_0", "net", False, ["net"]),
        ("net_0_0", "ensemble", False, ["net"]),
        ("net_0_0", "other", False, []),
        ("net_0_0", "net", True, []),
        ("named by its configuration", "net", False, []),
        ("ensemble_0_0", "net", False, []),
    ],
)
@in_loop
async def test_one_that_died_before_any_was_seen_is_found_by_what_triton_says(
    monkeypatch: pytest.MonkeyPatch,
    process: subprocess.Popen[bytes],
    instance: str,
    asked: str,
    others: bool,
    lost: list[str],
) -> None:
    """Unless the model has a process that lives: the words may be a client's."""
    monkeypatch.setattr(Running, "stubs", lambda _: [Stub(process.pid, "net", "net_0_1")] if others else [])
    one = healer(process, lambda: USERS, [])
    found: list[str] = []
    monkeypatch.setattr(one, "_lost", lambda model, _why: found.append(model))
    await one._look()
    one._reported(instance, time.monotonic() - 30, asked)
    await asyncio.gather(*one._tasks)
    assert found == lost
    for pid in list(one._watched):
        one._leave(pid)


@in_loop
async def test_one_that_dies_before_the_first_look_is_told_as_any(
    monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    one = healer(process, lambda: USERS, [])
    lost: list[str] = []
    monkeypatch.setattr(one, "_lost", lambda _, why: lost.append(why))
    process.kill()
    await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # Triton has not cleared it away
    one._triton.stubs = list  # type: ignore[method-assign]
    running = asyncio.ensure_future(one.run())
    await until(lambda: bool(lost))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert lost == ["its process net_0_0 was ended by SIGKILL"]


@in_loop
async def test_one_that_died_before_its_watch_began_is_known(
    monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    one = healer(process, lambda: USERS, [])
    found: list[str] = []
    monkeypatch.setattr(one, "_lost", lambda model, _why: found.append(model))
    one._triton.stubs = list  # type: ignore[method-assign]
    one._reported("net_0_0", time.monotonic() - 30, "net")
    await asyncio.gather(*one._tasks)
    assert found == ["net"]


@pytest.mark.parametrize(("asked", "ended"), [("net", True), ("ensemble", True), ("other", False), ("gone", False)])
@in_loop
async def test_only_a_model_that_is_made_of_it_can_say_that_it_is_unhealthy(
    process: subprocess.Popen[bytes], asked: str, ended: bool
) -> None:
    events: list[str] = []
    process.send_signal(signal.SIGSTOP)
    await until(lambda: is_stopped(process.pid))
    one = healer(process, lambda: USERS, events)
    await one._look()
    one._seen[process.pid] = time.monotonic() - 60
    one._reported("net_0_0", time.monotonic() - 30, asked)
    assert bool(one._tasks) is ended
    for pid in list(one._watched):
        await asyncio.gather(*one._tasks)
        if pid in one._watched:
            one._leave(pid)
    if ended:
        assert await asyncio.to_thread(process.wait, 60) == -signal.SIGKILL
    else:
        assert process.poll() is None
        os.kill(process.pid, 0)


@in_loop
async def test_a_broken_folder_does_not_break_the_end_of_healing(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = False

    def uses() -> dict[str, frozenset[str]]:
        if broken:
            raise ToolkitError("a folder can't be read", why="it is broken", mend="mend it")
        return USERS

    async def reload_alone(*_: Any) -> None: ...

    async def served(*_: Any) -> bool:
        return True

    events: list[str] = []
    one = healer(process, uses, events)
    monkeypatch.setattr(heal, "reload_alone", reload_alone)
    monkeypatch.setattr(one, "_served", served)
    broken = True
    one._lost("net", "it died")
    await asyncio.gather(*one._tasks)
    assert "it is broken" in events[-2]
    assert "net is served again" in events[-1]
    assert one._users == USERS
    for pid in list(one._watched):
        one._leave(pid)


def test_what_one_key_did_alone_is_waited_for_by_nobody_up_to_a_bound(process: subprocess.Popen[bytes]) -> None:
    one = healer(process, lambda: USERS, [])
    assert [one._wait_s("net", 0.1 * turn, KEY) for turn in range(AT_ONCE)] == [0.0] * AT_ONCE
    waits = [one._wait_s("net", 5.0, cause) for cause in (CLIENT, KEY, SERVER, KEY, CLIENT, CLIENT, CLIENT)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert one._wait_s("other", 5.0, CLIENT) == 0.0
    assert [one._wait_s("net", 100.0, cause) for cause in (CLIENT, KEY, CLIENT)] == [0.0, 0.0, 0.5]


def test_a_model_that_dies_without_end_is_loaded_again_without_end(process: subprocess.Popen[bytes]) -> None:
    one = healer(process, dict, [])
    waits = [one._wait_s("net", 10.0 * turn, SERVER) for turn in range(1100)]  # 2.0 ** 1024 is no number
    assert waits[:6] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0]
    assert set(waits[6:]) == {10.0}


OLD, NEW = Stub(1, "net", "net_0_0", "1"), Stub(2, "net", "net_0_0", "1")


@pytest.mark.parametrize(
    ("stubs", "seen", "found"),
    [
        ([OLD], {1: 0.0}, []),
        ([OLD, NEW], {1: 0.0, 2: 50.0}, [OLD]),
        ([NEW, OLD], {1: 0.0, 2: 50.0}, [OLD]),
        ([OLD, NEW], {1: 0.0}, []),  # the other is not watched yet
        ([OLD, NEW], {1: 0.0, 2: 90.0}, []),  # Triton may be at it
        ([OLD, NEW], {1: 50.0, 2: 50.1}, []),  # of one load, with instances of the same name
        ([OLD, Stub(2, "net", "net_0_1", "1")], {1: 0.0, 2: 50.0}, []),  # an instance more
        ([OLD, Stub(2, "net", "net_0_0", "2")], {1: 0.0, 2: 50.0}, []),  # a version more
        ([OLD, Stub(2, "other", "net_0_0", "1")], {1: 0.0, 2: 50.0}, []),
    ],
)
def test_a_process_is_kept_where_a_later_load_of_its_instance_has_had_another(
    stubs: list[Stub], seen: dict[int, float], found: list[Stub]
) -> None:
    assert kept(stubs, seen, 100.0) == found


@in_loop
async def test_a_process_that_triton_keeps_is_told_of_once_and_left_alone(
    process: subprocess.Popen[bytes], later: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be at work for who did not ask through this gateway."""
    monkeypatch.setattr(heal, "KEPT_S", 0.05)
    events: list[str] = []
    one = healer(process, lambda: USERS, events)
    await one._look()
    await asyncio.sleep(0.1)
    one._triton.stubs = lambda: [Stub(each.pid, "net", "net_0_0") for each in (process, later)]  # type: ignore[method-assign]
    await one._look()
    await asyncio.sleep(0.1)
    for _ in range(3):
        await one._look()
    assert [str(process.pid) in each for each in events] == [True]
    assert process.poll() is None
    assert later.poll() is None


@in_loop
async def test_what_asks_a_model_is_read_anew_when_something_is_loaded(process: subprocess.Popen[bytes]) -> None:
    """A pipeline that was added later is down with its step, and who asks it is blamed for what it does there."""
    users = {"net": frozenset({"net"})}
    one = healer(process, lambda: dict(users), [])
    users["net"] = frozenset({"net", "added"})
    await one._look()
    one._lost("net", "it died")
    assert "added" in one._outages
    for task in one._tasks:
        task.cancel()
    await asyncio.gather(*one._tasks, return_exceptions=True)
