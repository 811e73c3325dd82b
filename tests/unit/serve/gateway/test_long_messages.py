"""Long messages over gRPC that are whole at the same time: the event loop is free between them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import tracemalloc
from functools import partial
from typing import Any, cast

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages

from serve.gateway.access.long_work import LongWork
from serve.gateway.access.memory import Memory, Share
from serve.gateway.grpc.clients import Clients
from serve.gateway.grpc.message import Incoming
from serve.gateway.grpc.request import check_message
from serve.gateway.grpc.status import unary
from serve.gateway.grpc.wire import head_of
from serve.gateway.oip.contract import Contract
from serve.gateway.oip.metadata import ModelMetadata, TensorMetadata
from serve.gateway.settings import Settings
from tests.serve_http import in_loop

pytestmark = pytest.mark.clock
MIB = 1 << 20
LONG, CALLS = 16 * MIB, 16
COME_S = 3.0  # in which all of them have come
OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.http2.bdp_probe", 0))
# In a process of its own: so many messages, which are sent when all calls have been taken up.
CLIENT = """
import sys
import threading
import time
import grpc

address, count, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
channels = [grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(count)]
body, now = bytes(size), threading.Event()

def message():
    now.wait()
    yield body

calls = [channel.stream_unary("/any/one").future(message()) for channel in channels]
time.sleep(1)
now.set()
assert [call.result() for call in calls] == [b"read"] * count
"""


class AsGate:
    """As much of a gate as is asked for."""

    def __init__(self) -> None:
        self.memory = Memory(1 << 33)
        self.long_work = LongWork()


class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Reads a message as a gateway does."""

    def __init__(self) -> None:
        gate = AsGate()
        self.calls = 0
        self._memory = gate.memory
        settings = Settings(upstream=("http://127.0.0.1:1",))
        clients = Clients(1, 1)
        self._incoming = Incoming(settings, cast("Any", gate), cast("Any", None), cast("Any", None), clients)

    def service(self, _: Any) -> Any:
        async def answer(context: Any) -> bytes:
            self.calls += 1
            with Share(self._memory, "key") as share:
                await self._incoming.message(context, share)
            return b"read"

        return unary(answer, lambda _: None)


async def longest_stretch(handler: Handler, address: str, count: int) -> float:
    """Seconds that nobody else was served for once so many messages had come."""
    until = handler.calls + count
    command = [sys.executable, "-c", CLIENT, address, str(count), str(LONG)]
    client = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    ends = asyncio.ensure_future(client.wait())
    while handler.calls < until and not ends.done():  # noqa: ASYNC110  # it counts
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.1)  # they are read
    time.sleep(COME_S)  # noqa: ASYNC251  # as something else holds the loop
    longest, seen = 0.0, time.perf_counter()
    while not ends.done():
        await asyncio.sleep(0.002)
        longest, seen = max(longest, time.perf_counter() - seen), time.perf_counter()
    print("S", count, longest)
    assert ends.result() == 0
    return longest


@in_loop
async def test_messages_that_are_whole_at_the_same_time_leave_the_loop_to_others_between_them() -> None:
    handler = Handler()
    server = grpc.aio.server(handlers=[handler], options=OPTIONS)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        address = f"127.0.0.1:{port}"
        alone = sorted([await longest_stretch(handler, address, 1) for _ in range(3)])[1]
        assert await longest_stretch(handler, address, CALLS) < CALLS / 2 * alone
    finally:
        await server.stop(0)


def test_what_is_raw_of_a_long_message_is_checked_where_it_is() -> None:
    texts = TensorMetadata("x", "UINT8", (-1,))
    contract = Contract.of(ModelMetadata("m", ("1",), (texts,), (texts,), False))
    body = messages.ModelInferRequest(
        model_name="m", inputs=[{"name": "x", "datatype": "UINT8", "shape": (LONG,)}], raw_input_contents=[bytes(LONG)]
    ).SerializeToString()
    tracemalloc.start()
    try:
        head, raws = head_of(body)
        check = partial(check_message, messages.ModelInferRequest.FromString(head), shared_memory=False, raws=raws)
        check(contract)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
    assert sum(len(each) for each in raws or ()) == LONG
