"""Long JSON is read by one process: each key's in turn, and nobody's that is not waited for any more."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import orjson
import pytest

from serve.gateway.access.footprint import MIB
from serve.gateway.access.keys import add_key
from serve.gateway.errors import GatewayError, OverloadedError
from serve.gateway.oip.apart import Apart, NoRoomError
from serve.gateway.oip.contract import UnfitError
from serve.gateway.oip.request import loaded
from serve.gateway.settings import Settings
from tests.serve_http import Received, answer, gateway, in_loop, scripted_server


def noted(log: Path, who: str, seconds: float = 0.01) -> str:
    """Slow work that leaves a line."""
    with log.open("a") as file:
        file.write(who)
    time.sleep(seconds)
    return who


def fails() -> None:
    raise UnfitError("what it says")


def ends_once(log: Path) -> str:
    if not log.exists():
        log.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def ends() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def takes(size: int) -> int:
    return len(bytearray(size)) // size


def reads(size: int) -> int:
    return len(loaded(b"[" + b"[]," * size + b"1]"))


def begun(log: Path) -> None:
    """Wait until the work that notes itself there has begun."""
    while not log.exists():
        time.sleep(0.01)


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    apart = Apart()
    yield apart
    apart.close()


async def turns(apart: Apart, log: Path, asked: str, late: str) -> str:
    """In which order work is done that comes in this one; `late` comes while the first is being done."""
    done = []

    async def ask(who: str, seconds: float) -> None:
        done.append(await apart.call(who, None, noted, log, who, seconds))

    tasks = [asyncio.create_task(ask(who, 0.0 if number else 0.3)) for number, who in enumerate(asked)]
    await asyncio.to_thread(begun, log)
    await asyncio.gather(*tasks, *(ask(who, 0.0) for who in late))
    return "".join(done)


@pytest.mark.parametrize(
    ("asked", "late", "done"),
    [
        ("aaaaaab", "", "abaaaaa"),
        ("aaaa", "bb", "ababaa"),
        ("aaaabbc", "", "abcabaa"),
        ("abab", "c", "abcab"),
        ("aaa", "", "aaa"),
    ],
)
@in_loop
async def test_no_key_has_more_than_one_of_its_own_before_another_s(
    apart: Apart, tmp_path: Path, asked: str, late: str, done: str
) -> None:
    assert await turns(apart, tmp_path / "log", asked, late) == done


@in_loop
async def test_who_has_left_is_not_read_and_who_left_while_read_is_not_overtaken(apart: Apart, tmp_path: Path) -> None:
    log = tmp_path / "log"
    tasks = [asyncio.create_task(apart.call("a", None, noted, log, each, 0.2)) for each in "abcd"]
    await asyncio.to_thread(begun, log)
    tasks[0].cancel()
    tasks[2].cancel()
    await asyncio.sleep(0.05)
    assert log.read_text() == "a", "what has begun has the process until it ends"
    assert await tasks[1] + await tasks[3] == "bd"
    assert log.read_text() == "abd"
    tasks = [asyncio.create_task(apart.call(who, None, noted, log, who)) for who in "ef"]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await apart.call("g", time.monotonic() + 5, noted, log, "g") == "g"


@in_loop
async def test_whose_time_has_passed_is_told_so_and_is_not_read(apart: Apart, tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = asyncio.create_task(apart.call("a", None, noted, log, "a", 0.3))
    await asyncio.to_thread(begun, log)
    with pytest.raises(OverloadedError, match="waited too long to be read") as caught:
        await apart.call("b", time.monotonic() + 0.05, noted, log, "b")
    assert b"retry-after" in dict(caught.value.headers)
    assert not first.done()
    await first
    assert await apart.call("b", time.monotonic() + 5, noted, log, "c") == "c"
    assert log.read_text() == "ac"


@in_loop
async def test_what_fails_fails_alone_and_a_process_that_was_killed_is_begun_again(
    apart: Apart, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    found = await asyncio.gather(
        apart.call("a", None, fails),
        apart.call("b", None, ends_once, tmp_path / "ended"),
        apart.call("c", None, ends),
        apart.call("d", None, noted, log, "d"),
        return_exceptions=True,
    )
    assert isinstance(found[0], UnfitError)
    assert found[0].why == "what it says"
    assert isinstance(found[2], GatewayError)
    assert "ended over it twice" in found[2].why
    assert (found[1], found[3]) == ("done", "d")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux holds a process to what it may have")
@in_loop
async def test_what_needs_more_memory_than_there_is_is_told_so_and_others_are_read_all_the_same() -> None:
    apart = Apart(256 * MIB)
    try:
        first = await apart.call("a", None, os.getpid)
        found = await asyncio.gather(
            apart.call("a", None, takes, 1024 * MIB),
            apart.call("b", None, takes, MIB),
            apart.call("a", None, reads, 4_000_000),
            apart.call("c", None, reads, 1000),
            apart.call("a", None, bytes, 200 * MIB),  # which it has, and has no room to send
            apart.call("b", None, takes, 2 * MIB),
            return_exceptions=True,
        )
        for refused in (found[0], found[2], found[4]):
            assert isinstance(refused, NoRoomError), refused
            assert refused.status == 413
            assert "raw" in refused.mend
        assert [found[1], found[3], found[5]] == [1, 1001, 1]
        assert await apart.call("c", None, os.getpid) == first, "it went on"
    finally:
        apart.close()


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/predict/m"])
@in_loop
async def test_a_client_that_leaves_is_not_waited_for_by_the_reader(tmp_path: Path, path: str) -> None:
    asked: list[tuple[object, float]] = []
    left = asyncio.Event()

    async def waits(_: Apart, who: object, deadline: float, *_arguments: object) -> None:
        asked.append((who, deadline - time.monotonic()))
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            left.set()
            raise

    async def respond(request: Received, writer: asyncio.StreamWriter) -> None:
        known = {"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}], "outputs": []}
        writer.write(answer(orjson.dumps({"max_batch_size": 8} if request.target.endswith("/config") else known)))

    keys = tmp_path / "keys.json"
    secret = add_key(keys, "one")[0]
    body = b'{"inputs": [], "note": "%b"}' % (b"x" * 100_000)
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nX-Api-Key: {secret}\r\nX-Request-Timeout-Ms: 20000\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    async with scripted_server(respond) as server:
        settings = Settings(upstream=(server.url,), port=0, keys=keys, state=tmp_path / "none.db")
        with patch.object(Apart, "call", waits):
            async with gateway(settings, validate=True) as address:
                _, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(head.encode() + body)
                async with asyncio.timeout(10):
                    while not asked:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    writer.close()
                    await left.wait()
    ((who, seconds),) = asked
    assert who == hashlib.sha256(secret.encode()).hexdigest()
    assert 10 < seconds <= 20
