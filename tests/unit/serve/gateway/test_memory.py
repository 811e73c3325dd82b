"""What is counted, for whom there is room, and that all of it is given back."""

from __future__ import annotations

import asyncio
import pickle
from functools import partial

import pytest

from serve.gateway.access.footprint import MIB, footprint_bytes
from serve.gateway.access.memory import CONNECTION_BYTES, SMALL_BYTES, LastingShare, Memory, MemoryFullError, Share
from serve.gateway.errors import BodyTooLargeError, GatewayError, TooManyElementsError
from serve.gateway.grpc.crowded import Crowded
from serve.gateway.oip.contract import UnfitError
from serve.gateway.oip.request import check_json_bytes
from serve.http.client import Address, Pool, Response
from tests.serve_http import Received, in_loop, scripted_server


def test_small_requests_have_room_where_large_ones_have_none() -> None:
    memory = Memory(8 * MIB)
    large = Share(memory)
    large.take(7 * MIB)
    with pytest.raises(MemoryFullError):
        large.take(1)
    with Share(memory) as small:
        small.take(SMALL_BYTES)
        with pytest.raises(MemoryFullError):
            small.take(1)  # that makes it a large one
    large.close()
    assert memory.used == 0
    assert memory.refused == 2


def test_what_is_there_before_it_could_be_asked_for_leaves_short_requests_their_room() -> None:
    memory = Memory(8 * MIB)
    shares = [Share(memory, key) for key in "ab"]
    for share in shares:  # as what connections have brought, and nobody has read
        share.hold(6 * MIB)
    assert memory.used > memory.bound
    with Share(memory) as small:
        small.take(SMALL_BYTES)
        assert memory.try_small(MIB // 2)
        memory.give_small(MIB // 2)
        assert not memory.try_small(MIB)
    shares[0].resize(SMALL_BYTES)
    with Share(memory, "c") as large:
        large.take(MIB // 2)
        assert memory.long == 6 * MIB + MIB // 2
    for share in shares:
        share.close()
    assert (memory.used, memory.long) == (0, 0)


def test_no_key_has_more_than_half_of_it() -> None:
    memory = Memory(8 * MIB)
    shares = [Share(memory, "a"), Share(memory, "a"), Share(memory, "b")]
    shares[0].take(3 * MIB)
    with pytest.raises(MemoryFullError):
        shares[1].take(2 * MIB)
    shares[2].take(2 * MIB)
    with pytest.raises(MemoryFullError):
        shares[2].check(3 * MIB)
    shares[2].check(MIB)
    assert memory.used == 5 * MIB
    shares[0].close()
    shares[1].take(4 * MIB)
    for share in shares:
        share.close()
    assert memory.used == 0
    LastingShare(memory, "a").take(4 * MIB)  # and what nobody knows of any more is given back
    assert memory.used == 0
    LastingShare(memory, "a").take(4 * MIB)


def test_what_waits_for_its_reader_counts_for_its_key() -> None:
    memory = Memory(8 * MIB)
    waiting = Share(memory, "a")
    memory.check_for("a", 3 * MIB)
    waiting.hold(3 * MIB)
    for key, size in (("a", SMALL_BYTES), ("a", MIB), ("b", 4 * MIB), ("", 8 * MIB)):
        memory.check_for(key, size)
    for key, size in (("a", MIB + 1), ("b", 4 * MIB + 1)):
        with pytest.raises(MemoryFullError):
            memory.check_for(key, size)
    waiting.hold(5 * MIB)  # it is there, whatever the bound
    with pytest.raises(MemoryFullError):
        Share(memory, "a").take(MIB)
    assert memory.used == 5 * MIB
    waiting.close()
    assert memory.used == 0
    memory.check_for("a", 4 * MIB)


def test_a_refused_take_holds_nothing() -> None:
    memory = Memory(8 * MIB)
    full = Share(memory)
    full.take(6 * MIB)
    share = Share(memory, "a")
    with pytest.raises(MemoryFullError):
        share.take(2 * MIB)
    full.close()
    share.close()
    assert memory.used == 0
    LastingShare(memory, "a").take(4 * MIB)


def test_connections_have_a_quarter() -> None:
    memory = Memory(8 * CONNECTION_BYTES)
    assert [memory.connect() for _ in range(3)] == [True, True, False]
    memory.disconnect()
    assert memory.connect()


def test_a_pod_has_room_for_all_of_it() -> None:
    assert footprint_bytes(256 * MIB, 64 * MIB) > 256 * MIB + 4 * 64 * MIB


@pytest.mark.parametrize(
    "error", [TooManyElementsError("x", 2, 1), BodyTooLargeError(5), UnfitError("why"), MemoryFullError(5),
              GatewayError("a", why="b", mend="c", status=418, headers=[(b"d", b"e")])],
)  # fmt: skip
def test_an_error_comes_whole_from_another_process(error: GatewayError) -> None:
    there = pickle.loads(pickle.dumps(error))  # noqa: S301  our own
    assert type(there) is type(error)
    assert (there.status, there.body, there.headers) == (error.status, error.body, error.headers)


def test_json_is_measured_by_what_it_becomes() -> None:
    check_json_bytes(b"[1,2,3]", 1000)
    with pytest.raises(GatewayError) as caught:
        check_json_bytes(b"[" + b"[]," * 1000 + b"1]", 50_000)
    assert caught.value.status == 413


@in_loop
async def test_an_answer_counts_for_the_key_that_asked_while_it_comes() -> None:
    """Of each answer most has come, and the rest does not: what is there counts all the same."""
    going_on = asyncio.Event()

    async def respond(request: Received, writer: asyncio.StreamWriter) -> None:
        size = int(request.target.rpartition("/")[2])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + bytes(size - 1))
        await writer.drain()
        if size > MIB:
            await going_on.wait()
        writer.write(b"0")

    memory = Memory(16 * MIB)
    async with scripted_server(respond) as server:
        pool = Pool(Address.parse(server.url), hold=partial(LastingShare, memory))

        def ask(who: str, size: int) -> asyncio.Task[Response]:
            return asyncio.create_task(pool.request(b"GET", b"/%d" % size, whose=("", who)))

        waiting = ask("alice", 6 * MIB)
        await asyncio.sleep(0.5)
        assert memory.used == 6 * MIB - 1
        with pytest.raises(MemoryFullError):
            await asyncio.wait_for(ask("alice", 3 * MIB), 10)
        assert len((await ask("alice", MIB)).body) == MIB, "what was refused is held no more"
        other = ask("bob", 5 * MIB)
        await asyncio.sleep(0.5)
        assert memory.used == 11 * MIB - 2
        going_on.set()
        answers = [await waiting, await other]
        assert [len(answer.body) for answer in answers] == [6 * MIB, 5 * MIB]
        for answer in answers:
            assert answer.held is not None
            answer.held.close()
        assert memory.used == 0
        await pool.close()


def test_who_has_room_waits_a_while_for_what_others_hold_for_moments() -> None:
    async def run() -> tuple[int, int]:
        memory = Memory(32 * MIB)
        crowded, others = Crowded(memory), [Share(memory, key) for key in ("a", "")]
        others[0].hold(16 * MIB)
        others[1].take(8 * MIB)  # a copy on its way
        with Share(memory, "b") as share, Share(memory, "c") as further, Share(memory, "a") as over:
            waiting = asyncio.ensure_future(crowded.take(share, 8 * MIB))
            await asyncio.sleep(0)
            assert share.size == 8 * MIB  # it is there, and counted
            for refused in (further, over):  # one of them waits at a time, and none whose own key has too much
                with pytest.raises(MemoryFullError):
                    await crowded.take(refused, 8 * MIB)
            others[1].close()
            await waiting
            held = memory.used
        others[0].close()
        return held, memory.used

    assert asyncio.run(run()) == (24 * MIB, 0)


@pytest.mark.parametrize("left", [False, True])
def test_who_waits_in_vain_or_leaves_holds_nothing(left: bool) -> None:
    async def run() -> int:
        memory = Memory(32 * MIB)
        with Share(memory) as others, Share(memory, "b") as share:
            others.take(28 * MIB)
            waiting = asyncio.ensure_future(Crowded(memory).take(share, 8 * MIB))
            await asyncio.sleep(0)
            if left:
                waiting.cancel()
            with pytest.raises(asyncio.CancelledError if left else MemoryFullError):
                await waiting
            assert share.size == 0
        return memory.used

    assert asyncio.run(run()) == 0
