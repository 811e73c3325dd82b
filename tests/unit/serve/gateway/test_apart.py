"""Long JSON is read by one process: each key's in turn, and nobody's that is not waited for any more."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.gateway.errors import GatewayError, OverloadedError
from serve.gateway.oip.apart import Apart
from serve.gateway.oip.contract import UnfitError
from tests.serve_http import in_loop


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
