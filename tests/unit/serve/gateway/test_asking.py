"""A client that leaves ends what is done for it, and nothing else; who asks a dead server is not blamed for its death."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.edge.asking import unless_client_leaves
from serve.gateway.edge.extensions import LEAVING
from serve.gateway.errors import ClientGoneError
from serve.gateway.health.incidents import Incidents
from serve.gateway.settings import Settings
from serve.http.client import Address, Pool
from tests.serve_http import Received, gateway, in_loop, scripted_server

Leave = Callable[[], None] | None


async def nothing() -> dict[str, str]:
    return {"type": "http.disconnect"}


async def at_once() -> str:
    return "done"


async def later() -> str:
    await asyncio.sleep(30)
    return "done"


def gone(leave: Leave) -> None:
    """What a connection does that is closed already."""
    if leave is not None:
        leave()


@pytest.mark.parametrize("work", [at_once, later])
def test_who_has_left_before_cancels_nothing_that_comes_after(work: Callable[[], Awaitable[str]]) -> None:
    async def serve() -> None:
        for _ in range(2):  # a turn first, and then the model
            with pytest.raises(ClientGoneError):
                await unless_client_leaves({"extensions": {LEAVING: gone}}, nothing, work())
        await asyncio.sleep(0)  # a cancellation left over would end this
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    asyncio.run(serve())


def test_who_leaves_meanwhile_ends_it_however_often_it_is_told() -> None:
    async def serve() -> None:
        told: list[Leave] = []

        def leave() -> None:
            if told[0] is not None:
                told[0]()
                told[0]()

        asyncio.get_running_loop().call_soon(leave)
        with pytest.raises(ClientGoneError):
            await unless_client_leaves({"extensions": {LEAVING: told.append}}, nothing, later())
        await asyncio.sleep(0)
        assert told[1:] == [None]

    asyncio.run(serve())


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@in_loop
async def test_who_finds_no_server_is_not_blamed_for_its_death() -> None:
    """Connections break, and others ask, a moment before whoever looks after the process knows that it died."""
    incidents = Incidents()
    nowhere = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    settings = Settings(upstream=(f"http://{nowhere[0]}",), port=0, grpc_port=free_port(), grpc_upstream=(nowhere[1],))
    async with gateway(settings, incidents=incidents) as address:
        assert await asked(address) == 503
        async with grpc.aio.insecure_channel(f"127.0.0.1:{settings.grpc_port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(
                    messages.ModelInferRequest(model_name="m")
                )
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
    assert await incidents.suspects.died(None) == []


@in_loop
async def test_who_was_with_a_server_that_died_is_suspected() -> None:
    async def dies(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.close()

    incidents = Incidents()
    async with (
        scripted_server(dies) as triton,
        gateway(Settings(upstream=(triton.url,), port=0), incidents=incidents) as address,
    ):
        assert await asked(address) == 502
    assert [suspect.model for suspect in await incidents.suspects.died(None)] == ["m"]


async def asked(address: Address) -> int:
    pool = Pool(address)
    answered = await pool.request(b"POST", b"/v2/models/m/infer", body=b"{}")
    await pool.close()
    return answered.status
