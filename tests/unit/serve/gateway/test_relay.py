"""The relay of a stream with long answers: where messages begin, and whose connection it takes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import grpc
import pytest

from serve.gateway.access.memory import Memory, MemoryFullError, Share
from serve.gateway.grpc.channels import GrpcChannels
from serve.gateway.grpc.clients import TooManyCallsError
from serve.gateway.grpc.parcel import Parcel
from serve.gateway.grpc.relay import RELAY_BYTES, Begun, Relays, _frames
from serve.gateway.upstream.balancer import Balancer
from serve.http.message import Address
from tests.serve_http import in_loop

MIB = 1 << 20
SIZES = [0, 1, 70_000, 0, 5, 16_384]


@pytest.mark.parametrize("step", [1, 2, 5, 7, 16_384, 1 << 20])
def test_each_message_is_seen_where_its_length_is_whole(step: int) -> None:
    data = b"".join(b"\0" + size.to_bytes(4, "big") + b"\xff" * size for size in SIZES)
    begun = Begun()
    found = [size for at in range(0, len(data), step) for size in begun.read(data[at : at + step])]
    assert found == SIZES


@pytest.mark.parametrize("step", [1, 8, 9, 10, 16_384, 1 << 20])
def test_frames_are_told_apart_wherever_what_came_ends(step: int) -> None:
    frames = [size.to_bytes(3, "big") + b"\0" * 6 + b"\xff" * size for size in (0, 1, 16_384, 0, 5)]
    data, part, found = b"".join(frames), b"", []
    for at in range(0, len(data), step):
        whole, part = _frames(part + data[at : at + step])
        found += whole
    assert (found, part) == (frames, b"")


class Sized(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers each message of a stream with so many bytes as it says."""

    def service(self, details: object) -> object:
        async def answer(requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
            async for request in requests:
                yield bytes(int(request))

        return grpc.stream_stream_rpc_method_handler(answer)


@in_loop
async def test_an_answer_is_counted_before_it_is_there_and_what_is_left_is_thrown_away() -> None:
    server = grpc.aio.server(handlers=[Sized()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        await _counted_and_thrown_away(port)
    finally:  # a loop can't be closed around one that runs
        await server.stop(None)


async def _counted_and_thrown_away(port: int) -> None:
    memory = Memory(16 * MIB)
    balancer = Balancer([Address("127.0.0.1", port)], max_connections=4, timeout_s=10.0)
    calls = GrpcChannels(balancer, [f"127.0.0.1:{port}"], [], Relays(8, 8 * MIB))
    left: list[asyncio.Task[int | None]] = []

    async def asked(*sizes: int) -> AsyncIterator[Parcel]:
        for size in sizes:
            yield Parcel(b"%d" % size)

    def stream(*sizes: int) -> AsyncIterator[bytes]:
        return calls.stream(b"/v2/models/m", None, asked(*sizes), on_left=left.append, share=Share(memory, "alice"))

    assert [len(answer) async for answer in stream(3 * MIB, 0, 5)] == [3 * MIB, 0, 5]
    answers = stream(2 * MIB, 9 * 1024, 5 * MIB)
    assert len(await anext(answers)) == 2 * MIB
    assert memory.used >= 2 * MIB + RELAY_BYTES
    other = stream(7 * MIB)
    with pytest.raises(MemoryFullError):  # with the other's, more than half of the bound
        await anext(other)
    await answers.aclose()  # type: ignore[attr-defined]
    await asyncio.wait_for(asyncio.gather(*left), 10)
    assert len(left) == 2
    assert memory.used == 0
    assert [node.in_flight for node in balancer.nodes] == [0]
    await calls.close()
    await balancer.close()


@in_loop
async def test_no_other_process_and_no_more_than_a_key_may_have_get_through() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    relays, memory = Relays(8, MIB), Memory(MIB)
    opened = [await relays.open(f"127.0.0.1:{port}", Share(memory, "alice")) for _ in range(2)]
    with pytest.raises(TooManyCallsError):
        await relays.open(f"127.0.0.1:{port}", Share(memory, "alice"))
    name = opened[0].target.removeprefix("unix-abstract:")
    code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0{name}'); print(s.recv(1))"
    told = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=20)
    assert told.stdout == b"b''\n"
    for relay in opened:
        await relay.close()
    server.close()
    with pytest.raises(grpc.aio.AioRpcError, match="failed to connect"):
        await relays.open(f"127.0.0.1:{port}", Share(memory, "alice"))
    assert memory.used == 0
