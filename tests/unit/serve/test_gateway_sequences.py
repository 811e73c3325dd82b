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

from serve.gateway.balancer import Balancer
from serve.gateway.errors import BadRequestError
from serve.gateway.grpc_channels import SERVICE, GrpcChannels
from serve.gateway.keys import add_key
from serve.gateway.node import Node
from serve.gateway.outliers import Verdict
from serve.gateway.protocol import BINARY_HEADER
from serve.gateway.sequences import (
    IDLE_S,
    MOST_OF_KEY,
    UNKNOWN,
    Owners,
    Sequences,
    TakenSequenceError,
    named_sequence,
    sequence_of,
)
from serve.gateway.settings import Settings
from serve.http_client import Address
from tests.serve_http import Received, answer, gateway, in_loop, scripted_server
from tests.unit.serve.test_gateway_upstream import INFER, ask

pytestmark = pytest.mark.clock


@pytest.mark.parametrize(
    ("body", "sequence"),
    [
        (b'{"inputs":[]}', None),
        (b'{"parameters":{"sequence_id":7}}', b"7"),
        (b'{"parameters":{"sequence_id": 007 }}', b"7"),
        (b'{"parameters":{"sequence_id":"7"}}', b"7"),
        (b'{"parameters":{"sequence_id":"a b"}}', b"a b"),
        (b'{"parameters":{"sequence_id":0}}', None),
        (b'{"parameters":{"sequence_id":""}}', None),
        (b'{"parameters":{"s\\u0065quence_id":7}}', b"7"),
        (b'{"parameters":{"sequence_id":"\\u0061"}}', b"a"),
        (b'{"parameters":{"sequence_id":1.5}}', UNKNOWN),
        (b'{"parameters":{"sequence_id":1},"x":{"sequence_id":2}}', UNKNOWN),
        (b'{"x":"\\u0061"', UNKNOWN),
        (b'{"data":["sequence_id"]}', UNKNOWN),
    ],
)
def test_which_sequence_a_request_belongs_to(body: bytes, sequence: bytes | None) -> None:
    assert sequence_of((), body) == sequence
    tail = b'{"sequence_id":9}\\u0000'
    assert sequence_of([(BINARY_HEADER, b"%d" % len(body))], body + tail) == sequence


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
async def test_another_keys_sequence_is_refused_until_it_ends(tmp_path: Path) -> None:
    async def respond(received: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"{}"))

    keys = tmp_path / "keys.json"
    alice, bob = ((b"x-api-key", add_key(keys, name)[0].encode()) for name in ("alice", "bob"))
    last = {"sequence_id": 7, "sequence_end": True}
    sneaked = (
        request(7),
        request("7"),
        b'{"parameters":{"sequenc\\u0065_id":7},"inputs":[]}',
        b'{"parameters":{"sequence_id": 007},"inputs":[]}',
        b'{"parameters":{"sequence_id":1,"sequence_id":7},"inputs":[]}',
        b'{"parameters":{"sequence_id":7},"parameters":{"sequence_id":1},"inputs":[]}',
        orjson.dumps({"inputs": [], "parameters": last}),
    )
    async with scripted_server(respond) as server:
        settings = Settings(upstream=(server.url,), port=0, state=tmp_path / "none.db", keys=keys)
        async with gateway(settings) as address:
            assert (await ask(address, INFER, request(7), bob)).status == 200
            for path in (INFER, INFER.replace(b"/infer", b"/versions/1/infer")):
                for body in sneaked:
                    found = await ask(address, path, body, alice)
                    assert found.status in (400, 409), body
            assert orjson.loads(found.body)["why"].startswith("another key has begun")
            assert len(server.requests) == 1
            assert (await ask(address, INFER, request(8), alice)).status == 200
            assert (await ask(address, INFER, b'{"inputs":[]}', alice)).status == 200
            assert (await ask(address, INFER, orjson.dumps({"inputs": [], "parameters": last}), bob)).status == 200
            assert (await ask(address, INFER, request(7), alice)).status == 200
            assert (await ask(address, INFER, request(7), bob)).status == 409


def test_a_sequence_is_free_when_it_is_idle_or_its_process_died() -> None:
    now = 0.0
    owners = Owners(lambda: now)
    owners.claim("a", "m", b"1", ends=False, life=0)
    owners.claim("b", "n", b"1", ends=False, life=0)
    now = IDLE_S - 1
    with pytest.raises(TakenSequenceError):
        owners.claim("b", "m", b"1", ends=False, life=0)
    owners.claim("a", "m", b"1", ends=False, life=0)
    now += 2
    with pytest.raises(TakenSequenceError):
        owners.claim("b", "m", b"1", ends=True, life=0)
    owners.claim("b", "m", b"1", ends=False, life=1)
    with pytest.raises(TakenSequenceError):
        owners.claim("a", "m", b"1", ends=False, life=1)
    now += IDLE_S
    owners.claim("a", "m", b"1", ends=True, life=1)
    owners.claim("", "m", b"1", ends=False)
    owners.claim("b", "m", b"1", ends=True)


def test_one_key_has_room_for_so_many_and_none_of_anothers() -> None:
    owners = Owners()
    owners.claim("b", "m", b"mine", ends=False)
    for number in range(2 * MOST_OF_KEY):
        owners.claim("a", "m", b"%d" % number, ends=False)
    assert len(owners._of) == MOST_OF_KEY + 1
    with pytest.raises(TakenSequenceError):
        owners.claim("a", "m", b"mine", ends=False)


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"parameters":{"sequence_id":[7]}}', b'{"parameters":[1]}',
                                  b'{"parameters":{"sequence_id":7,"sequence_end":1}}'])  # fmt: skip
def test_what_can_not_be_read_is_of_nobodys_sequence(body: bytes) -> None:
    with pytest.raises(BadRequestError):
        named_sequence((), body)


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

        async def said() -> AsyncIterator[bytes]:
            while True:
                yield await messages.get()

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
async def test_a_trial_over_grpc_brings_a_server_back() -> None:
    async with echo() as port:
        addresses = [Address("127.0.0.1", port), Address("localhost", port)]
        balancer = Balancer(addresses, max_connections=4, timeout_s=10.0)
        calls = GrpcChannels(balancer, [f"127.0.0.1:{port}"] * 2, [])
        loop = asyncio.get_running_loop()
        for level in balancer.levels(balancer.scope(b"/v2/models/m")):
            record = level.of(balancer.nodes[0])
            record.ejected = True
        assert len(balancer.ejected()) == 2
        given_up = asyncio.ensure_future(calls.infer(b"x", b"/v2/models/m", None, loop.time() + 10))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        assert await calls.infer(b"x", b"/v2/models/m", None, loop.time() + 10) == b"x"
        assert not balancer.ejected()
        attempt = balancer.begin(balancer.scope(b"/v2/models/m"))
        attempt.end(Verdict.NOTHING, Verdict.NOTHING)
        assert [node.in_flight for node in balancer.nodes] == [0, 0]
        await calls.close()
        await balancer.close()
