"""Requests begin in turns, by address and by key, and none is lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from serve.gateway.access.identity import KeyRing
from serve.gateway.access.keys import add_key
from serve.gateway.access.loop_time import ROUND_S, LoopTime
from serve.gateway.edge.connections import MOST_PIPELINED
from serve.gateway.edge.rounds import MOST_BEGUN, OF_A_KEY, Rounds
from serve.gateway.errors import BadRequestError
from serve.gateway.settings import Settings
from tests.serve_http import gateway, in_loop
from tests.unit.serve.gateway.test_accepting import clients, connect
from tests.unit.serve.gateway.test_connections import noting_connections, until

__all__ = ["clients"]

HEALTH = b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n"


def scope(path: str = "/healthz", key: str | None = None) -> dict[str, Any]:
    return {"raw_path": path.encode(), "headers": [] if key is None else [(b"x-api-key", key.encode())]}


@in_loop
async def test_few_begin_at_a_time_and_an_address_waits_for_no_other() -> None:
    rounds, begun = Rounds(KeyRing(None)), list[str]()
    for at in range(100):
        rounds.begin("many", at, scope(), lambda: begun.append("many"))
    rounds.begin("one", 0, scope(), lambda: begun.append("one"))
    assert len(begun) == MOST_BEGUN
    await until(lambda: len(begun) == 101)
    assert "one" in begun[MOST_BEGUN : MOST_BEGUN + 2]
    assert not rounds.waiting


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    return path, add_key(path, "one")[0]


PAID = {"/v2/models/m/infer": True, "/v2/models/%6d": True, "/healthz": False, "/healthz/": False, "/%68ealthz": False}


@pytest.mark.parametrize(("path", "paid"), [*PAID.items(), ("/a//b", False), ("/docs", False)])
@pytest.mark.parametrize("who", ["valid", "wrong", "nobody", "open"])
@in_loop
async def test_only_what_a_key_pays_for_goes_first(keys: tuple[Path, str], path: str, paid: bool, who: str) -> None:
    """Where no key is asked for, a model's places bound what is asked of it."""
    rounds = Rounds(KeyRing(None if who == "open" else keys[0]), most=1)
    asked = scope(path, {"valid": keys[1], "wrong": "x"}.get(who))
    begun: list[int] = []
    for at in range(3):
        rounds.begin("a", at, asked, lambda at=at: begun.append(at))  # type: ignore[misc]
    assert begun == ([0, 1, 2] if paid and who in ("valid", "open") else [0])
    assert asked == scope(path, {"valid": keys[1], "wrong": "x"}.get(who)), "who answers sees the path as it came"


@in_loop
async def test_of_a_connection_that_ends_nothing_is_begun() -> None:
    rounds, begun = Rounds(KeyRing(None), most=1), list[int]()
    for at in range(4):
        rounds.begin("a", at, scope(), lambda at=at: begun.append(at))  # type: ignore[misc]
    rounds.leave("a", 2)
    rounds.leave("b", 2)
    rounds.leave("a", 9)
    await until(lambda: len(begun) == 3)
    assert begun == [0, 1, 3]
    rounds.begin("a", 5, scope(), lambda: None)
    rounds.begin("a", 6, scope(), lambda: None)
    rounds.leave("a", 5)
    rounds.leave("a", 6)
    assert not rounds.waiting


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 10))
def test_each_begins_once_and_between_two_of_an_address_one_of_each_that_waits(counts: list[int], most: int) -> None:
    async def main() -> None:
        rounds, begun = Rounds(KeyRing(None), most), list[tuple[int, int]]()

        def call(which: int, at: int) -> Callable[[], None]:
            return lambda: begun.append((which, at))

        for which, count in enumerate(counts):
            for at in range(count):
                rounds.begin(str(which), at, scope(), call(which, at))
        at_once = len(begun)
        while rounds.waiting:
            rounds._turn()
        assert sorted(begun) == [(which, at) for which, count in enumerate(counts) for at in range(count)]
        waited = [which for which, _ in begun[at_once:]]
        for which in set(waited):
            places = [place for place, each in enumerate(waited) if each == which]
            for earlier, later in itertools.pairwise(places):
                between = waited[earlier + 1 : later]
                assert len(between) == len(set(between)), "an address had two turns while another waited"

    uvloop.run(main())


@in_loop
async def test_a_stranger_who_pipelines_on_many_connections_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, clients: ExitStack
) -> None:
    """Fifty connections ask for 64 answers each; one that comes after them has its own before a sixteenth of these."""
    answered: list[str] = []
    noting_connections(monkeypatch, on_response_complete=lambda connection: answered.append(connection.address))
    async with gateway(Settings(upstream=("http://127.0.0.1:1",), port=0)) as address:
        for each in connect(clients, address, "127.0.0.2", 50):
            each.sendall(HEALTH * MOST_PIPELINED)
        [one] = connect(clients, address, "127.0.0.3", 1)
        one.sendall(HEALTH)
        await until(lambda: "127.0.0.3" in answered)
        assert len(answered) < 50 * MOST_PIPELINED // 16
        await until(lambda: len(answered) == 50 * MOST_PIPELINED + 1)


@in_loop
async def test_of_a_key_few_begin_in_a_round_and_another_key_waits_for_none_of_them(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    many, one = (add_key(path, name)[0] for name in ("many", "one"))
    rounds, begun = Rounds(KeyRing(path)), list[str]()
    for at in range(50):
        rounds.begin("a", at, scope("/v2/models/m/infer", many), lambda: begun.append("many"))
    assert (begun, rounds.waiting) == (["many"] * OF_A_KEY, 50 - OF_A_KEY)
    rounds.begin("a", "one", scope("/v2/models/m/infer", one), lambda: begun.append("one"))
    assert begun[-1] == "one"
    rounds.leave("a", 49)
    rounds.leave("a", 0)  # has begun
    await until(lambda: not rounds.waiting)
    assert begun.count("many") == 49
    rounds.begin("a", 0, scope("/v2/models/m/infer", many), lambda: begun.append("late"))
    await until(lambda: begun[-1] == "late")


@in_loop
async def test_a_key_has_its_time_of_each_round() -> None:
    time = LoopTime()
    time.use("a", ROUND_S / 2)
    assert not time.is_up("a")
    time.use("a", ROUND_S / 2)
    assert time.is_up("a")
    assert not time.is_up("b")
    await until(lambda: not time.is_up("a"))


@in_loop
async def test_beyond_its_time_one_json_of_a_key_is_read_in_a_round_and_another_key_waits_for_none_of_it() -> None:
    """However much waits; nothing is read for who has left."""
    time, done = LoopTime(), list[str]()

    def read(name: str) -> None:
        time.use("many", ROUND_S)
        done.append(name)

    tasks = [asyncio.create_task(time.call("many", partial(read, str(at)))) for at in range(6)]
    await asyncio.sleep(0)
    assert done == ["0"]
    await time.call("one", partial(done.append, "one"))
    assert done == ["0", "one"]
    tasks[1].cancel()
    rounds = 0
    while not all(task.done() for task in tasks):
        before = len(done)
        await asyncio.sleep(0)
        rounds += 1
        assert len(done) <= before + 1
    assert done == ["0", "one", "2", "3", "4", "5"]
    assert rounds >= 4
    await time.call("many", partial(read, "last"))
    assert done[-1] == "last"


@in_loop
async def test_what_is_refused_is_counted_like_what_is_read() -> None:
    time = LoopTime()

    def refused() -> None:
        until = perf_counter() + ROUND_S
        while perf_counter() < until:
            pass
        raise BadRequestError("it is none")

    with pytest.raises(BadRequestError):
        await time.call("a", refused)
    assert time.is_up("a")
