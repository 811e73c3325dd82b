"""Long answers over gRPC: what nobody has read yet is not here yet, and one key's wait for each other, no other's."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from serve.gateway.access.memory import Memory, MemoryFullError, Share
from serve.gateway.grpc.arriving import UNREAD_STAYS, Arriving
from tests.serve_http import in_loop

pytestmark = pytest.mark.clock

MIB = 1 << 20
CALLS, ANSWER = 24, 7 * MIB
METHOD = "/inference.GRPCInferenceService/ModelInfer"
# In a process of its own, whose memory is not this one's: it answers with so many bytes as it is asked for.
SERVER = """
import sys
from concurrent import futures
import grpc

class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: bytes(int(request)))

options = [("grpc.max_send_message_length", -1)]
server = grpc.server(futures.ThreadPoolExecutor(32), handlers=[Handler()], options=options)
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f"127.0.0.1:{process.stdout.readline().strip()}"
        process.stdin.close()


def resident() -> int:
    """Bytes that this process has."""
    match = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=(("grpc.max_receive_message_length", -1), UNREAD_STAYS))


@in_loop
async def test_what_is_not_read_stays_at_triton_and_keeps_no_other_key_waiting(address: str) -> None:
    memory = Memory(1 << 30)
    arriving = Arriving()
    async with channel(address) as to_triton:

        async def ask(size: int, share: Share) -> int:
            return len(await arriving.answer(to_triton.unary_stream(METHOD)(b"%d" % size, timeout=60), share))

        assert await ask(ANSWER, Share(memory, "bob")) == ANSWER
        before = resident()
        arriving._turns["alice"] = turn = asyncio.Lock()
        await turn.acquire()  # as one of hers that comes slowly
        shares = [Share(memory, "alice") for _ in range(CALLS)]
        asking = [asyncio.ensure_future(ask(ANSWER, share)) for share in shares]
        await asyncio.sleep(2)
        assert len(turn._waiters or ()) == CALLS, "all of them have begun to come"
        assert resident() - before < CALLS * MIB
        assert await ask(MIB, Share(memory, "bob")) == MIB
        turn.release()
        assert await asyncio.gather(*asking) == [ANSWER] * CALLS
        assert {share.size for share in shares} == {ANSWER}
    assert not arriving._turns


@in_loop
async def test_what_there_is_no_room_for_is_told_and_the_next_is_read(address: str) -> None:
    arriving, memory = Arriving(), Memory(8 * MIB)
    async with channel(address) as to_triton:
        with pytest.raises(MemoryFullError):
            await arriving.answer(to_triton.unary_stream(METHOD)(b"%d" % (5 * MIB)), Share(memory, "alice"))
        share = Share(memory, "alice")
        assert len(await arriving.answer(to_triton.unary_stream(METHOD)(b"%d" % MIB), share)) == MIB
        assert (memory.used, share.size) == (MIB, MIB)
    assert not arriving._turns


@in_loop
async def test_an_error_comes_as_it_is_and_who_leaves_holds_nobody_up(address: str) -> None:
    arriving, memory = Arriving(), Memory(1 << 30)
    async with channel(address) as to_triton:
        with pytest.raises(grpc.aio.AioRpcError, match="invalid literal"):
            await arriving.answer(to_triton.unary_stream(METHOD)(b"no number"), Share(memory, "alice"))
        arriving._turns["alice"] = turn = asyncio.Lock()
        await turn.acquire()
        share = Share(memory, "alice")
        leaves = asyncio.ensure_future(arriving.answer(to_triton.unary_stream(METHOD)(b"10"), share))
        await asyncio.sleep(0.2)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        turn.release()
        assert len(await arriving.answer(to_triton.unary_stream(METHOD)(b"10"), share)) == 10
    assert not arriving._turns
