"""Requests of a sequence: neither asked twice nor of another server; and calls while the set of servers changes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import orjson
import pytest

from serve.gateway.access.keys import add_key
from serve.gateway.grpc.channels import SERVICE, GrpcChannels
from serve.gateway.grpc.parcel import Parcel
from serve.gateway.oip.protocol import BINARY_HEADER
from serve.gateway.oip.sequence import SEQUENCE_ID, Named, in_answer, named
from serve.gateway.settings import Settings
from serve.gateway.upstream.balancer import Balancer
from serve.gateway.upstream.node import Node
from serve.gateway.upstream.outliers import Verdict
from serve.gateway.upstream.sequences import Sequences
from serve.http.client import Address, Response
from tests.serve_http import Received, answer, gateway, in_loop, scripted_server
from tests.unit.serve.gateway.test_balancer import gone
from tests.unit.serve.gateway.test_upstream import INFER, ask

pytestmark = pytest.mark.clock


ALICE, BOB = "a" * 64, "b" * 64


def test_an_id_becomes_its_keys_own_of_the_same_kind() -> None:
    ids = [1, 7, 2**63 - 1, "1", "7", "x" * 128, "ü"]
    found = [named({SEQUENCE_ID: each}, key) for key in (ALICE, BOB) for each in ids]
    assert len({each.sent for each in found if each is not None}) == 2 * len(ids)
    for asked, each in zip(2 * ids, found, strict=True):
        assert each is not None
        assert each.asked == asked
        assert type(each.sent) is type(asked)
        assert len(each.sent) == 32 if isinstance(each.sent, str) else 0 < each.sent < 2**63
    assert named({SEQUENCE_ID: 7}, ALICE) == named({SEQUENCE_ID: 7}, ALICE)


def test_without_keys_an_id_stays_and_without_an_id_there_is_no_sequence() -> None:
    assert named({SEQUENCE_ID: 7}, "") == Named(7, 7)
    assert named({}, ALICE) is None
    for none in (None, 0, ""):
        assert named({SEQUENCE_ID: none}, ALICE) is None


@pytest.mark.parametrize("asked", [7, 2**63 - 1, "7", 'ü"\\'])
def test_an_answer_says_the_clients_id_and_nothing_else_changes(asked: int | str) -> None:
    sequence = named({SEQUENCE_ID: asked}, ALICE)
    assert sequence is not None
    told = {"parameters": {"sequence_id": sequence.sent}, "outputs": [{"data": [f'"sequence_id":{sequence.sent}']}]}
    head, tail = orjson.dumps(told), orjson.dumps({"sequence_id": sequence.sent})
    for raw in (b"", tail):
        headers = [(b"x", b"y"), (BINARY_HEADER, b"%d" % len(head))] if raw else [(b"x", b"y")]
        found = in_answer(sequence, Response(200, headers, head + raw, 0))
        length = int(found.header(BINARY_HEADER) or len(found.body))
        assert orjson.loads(found.body[:length]) == told | {"parameters": {"sequence_id": asked}}
        assert found.body[length:] == raw
    refused = Response(400, [], orjson.dumps({"error": f"sequence {sequence.sent} is not there"}), 0)
    assert orjson.loads(in_answer(sequence, refused).body) == {"error": f"sequence {asked} is not there"}


def request(sequence: Any) -> bytes:
    return orjson.dumps({"inputs": [], "parameters": {"sequence_id": sequence}})


@in_loop
async def test_a_sequence_stays_with_its_server_and_others_spread(tmp_path: Path) -> None:
    async def respond(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"{}"))

    async with (
        scripted_server(respond) as one,
        scripted_server(respond) as two,
        scripted_server(respond) as three,
    ):
        servers = [one, two, three]
        settings = Settings(upstream=tuple(each.url for each in servers), port=0, state=tmp_path / "none.db")
        async with gateway(settings) as address:
            for _ in range(4):
                sent = [request(number) for number in range(1, 31)]
                await asyncio.gather(*(ask(address, INFER, body) for body in sent))
        where = defaultdict(set)
        for number, server in enumerate(servers):
            for received in server.requests:
                where[received.body].add(number)
        assert len(where) == 30
        assert all(len(found) == 1 for found in where.values())
        assert all(len(server.requests) >= 12 for server in servers)


@in_loop
async def test_a_request_of_a_sequence_is_sent_once_whatever_becomes_of_it(tmp_path: Path) -> None:
    lose = False

    async def respond(received: Received, writer: asyncio.StreamWriter) -> None:
        if lose:
            writer.close()  # a connection that was used before, and no byte of an answer
        else:
            writer.write(answer(b"{}"))

    async def main(count: int) -> None:
        nonlocal lose
        lose = False
        async with scripted_server(respond) as one, scripted_server(respond) as two:
            settings = Settings(upstream=(one.url, two.url)[:count], port=0, state=tmp_path / "none.db")
            async with gateway(settings) as address:
                for number in range(1, 9):
                    assert (await ask(address, INFER, request(number))).status == 200
                lose = True
                before = len(one.requests) + len(two.requests)
                for number in range(1, 9):
                    assert (await ask(address, INFER, request(number))).status == 502
                assert len(one.requests) + len(two.requests) == before + 8

    await main(1)
    await main(2)


def test_gateways_agree_and_what_began_elsewhere_stays_there() -> None:
    hosts = ["a", "b", "c"]
    mine: Sequences[str] = Sequences()
    theirs: Sequences[str] = Sequences()
    ids = [b"%d" % number for number in range(60)]
    assert [mine.host(each, hosts, str, hosts) for each in ids] == [
        theirs.host(each, hosts, str, hosts) for each in ids
    ]
    began = mine.host(b"new", hosts, str, ["b"])
    assert [mine.host(b"new", hosts, str, hosts) for _ in range(3)] == [began] * 3 == ["b"] * 3
    assert mine.host(b"new", ["a", "c"], str, ["a", "c"]) in ("a", "c")  # b is gone for good


@in_loop
async def test_however_it_is_spelled_a_sequence_goes_on_under_its_keys_name_alone(tmp_path: Path) -> None:
    async def respond(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"{}"))

    keys = tmp_path / "keys.json"
    alice, bob = ((b"x-api-key", add_key(keys, name)[0].encode()) for name in ("alice", "bob"))
    spelled = (
        request(7),
        b'{"parameters":{"sequenc\\u0065_id":7},"inputs":[]}',
        b'{"parameters":{"sequence_id": 7 },"inputs":[]}',
        b'{"parameters":{"sequence_id":1,"sequence_id":7},"inputs":[]}',
        b'{"parameters":{"sequence_id":1},"parameters":{"sequence_id":7},"inputs":[]}',
    )
    refused = [request(other) for other in (7.0, True, [7], None, -1, 2**63, 2**64 - 1, "7")]
    refused += [b'{"parameters":{"sequence_id": 007},"inputs":[]}']  # a text is for models that say so
    async with scripted_server(respond) as server:
        settings = Settings(upstream=(server.url,), port=0, state=tmp_path / "none.db", keys=keys)
        async with gateway(settings) as address:
            for key in (alice, bob):
                for path in (INFER, INFER.replace(b"/infer", b"/versions/1/infer")):
                    for body in spelled:
                        assert (await ask(address, path, body, key)).status == 200, body
                    for body in refused:
                        assert (await ask(address, path, body, key)).status == 400, body
    sent = [orjson.loads(each.body)["parameters"]["sequence_id"] for each in server.requests if each.method == "POST"]
    assert [sent.count(each) for each in set(sent)] == [10, 10]
    assert 7 not in sent


class Echo(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc.aio's types are not published
    """A server that gives each message back."""

    def service(self, details: Any) -> Any:
        async def stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for each in requests:
                yield each

        async def unary(body: bytes, context: Any) -> bytes:
            await asyncio.sleep(0.02)
            return body

        if details.method == f"{SERVICE}ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    """Its port."""
    server = grpc.aio.server(handlers=[Echo()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def replaced(balancer: Balancer) -> None:
    """All servers are others now, at the same place."""
    balancer.nodes = [Node(node.address, 4, 1.0) for node in balancer.nodes]


@in_loop
async def test_servers_that_are_replaced_while_they_are_asked_cut_no_call_and_no_stream() -> None:
    async with echo() as port:
        balancer = Balancer([Address("127.0.0.1", port)], max_connections=4, timeout_s=10.0)
        calls = GrpcChannels(balancer, [f"127.0.0.1:{port}"], [])
        loop = asyncio.get_running_loop()
        messages: asyncio.Queue[bytes] = asyncio.Queue()

        async def said() -> AsyncIterator[Parcel]:
            while True:
                yield Parcel(await messages.get())

        answers = calls.stream(b"/v2/models/m", None, said())
        for number in range(20):
            messages.put_nowait(b"%d" % number)
            assert await asyncio.wait_for(anext(answers), 10) == b"%d" % number
            asked = []
            for _ in range(3):  # calls under way to servers that have just gone, and to new ones
                asked += [
                    asyncio.ensure_future(calls.infer(b"x", b"/v2/models/m", None, loop.time() + 10)) for _ in range(4)
                ]
                await asyncio.sleep(0.005)
                replaced(balancer)
            assert await asyncio.gather(*asked) == [b"x"] * 12
        await answers.aclose()
        assert len(calls._channels) < 20, "those that nothing uses any more are closed"
        await calls.close()
        await balancer.close()


@in_loop
async def test_over_grpc_an_address_that_is_gone_keeps_nobody_waiting_either() -> None:
    async with echo() as port:
        with gone() as away:
            balancer = Balancer([away, Address("127.0.0.1", port)], max_connections=4, timeout_s=30.0)
            calls = GrpcChannels(balancer, [str(away), f"127.0.0.1:{port}"], [])
            async with asyncio.timeout(15):  # gRPC's own time is 20 s
                until = asyncio.get_running_loop().time() + 30
                asked = [calls.infer(b"x", b"/v2/models/m", None, until) for _ in range(8)]
                assert await asyncio.gather(*asked) == [b"x"] * 8
            await calls.close()
            await balancer.close()


@in_loop
async def test_a_trial_over_grpc_brings_a_server_back() -> None:
    async with echo() as port:
        addresses = [Address("127.0.0.1", port), Address("localhost", port)]
        balancer = Balancer(addresses, max_connections=4, timeout_s=10.0)
        calls = GrpcChannels(balancer, [f"127.0.0.1:{port}"] * 2, [])
        loop = asyncio.get_running_loop()
        for level in balancer.levels(balancer.scope(b"/v2/models/m")):
            level.of(balancer.nodes[0]).all.out = True
        assert len(balancer.ejected()) == 2
        given_up = asyncio.ensure_future(calls.infer(b"x", b"/v2/models/m", None, loop.time() + 10))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        assert await calls.infer(b"x", b"/v2/models/m", None, loop.time() + 10) == b"x"
        assert not balancer.ejected()
        attempt = balancer.begin(balancer.scope(b"/v2/models/m"))
        attempt.end(Verdict.NOTHING, Verdict.NOTHING)
        async with asyncio.timeout(10):  # the server may be at work on the one that was given up
            while [node.in_flight for node in balancer.nodes] != [0, 0]:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.01)
        await calls.close()
        await balancer.close()
