"""A stream of messages of which each goes to the model server in a stream of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import pytest

from serve.gateway.grpc.parcel import Parcel, contents
from serve.gateway.grpc.singly import Singly
from tests.serve_http import in_loop


class Server:
    """Answers each message with two that name it, once its event is set; b"fails" with an error."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.gates: dict[bytes, asyncio.Event] = {}
        self._server = grpc.aio.server()

    async def __aenter__(self) -> Server:
        handlers = {"Stream": grpc.stream_stream_rpc_method_handler(self._answer)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        await self._server.stop(0)

    async def _answer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes]:
        messages = [each async for each in requests]
        assert len(messages) == 1
        self.sent += messages
        await self.gates.setdefault(messages[0], asyncio.Event()).wait()
        if messages[0] == b"fails":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        for part in (b"1", b"2"):
            yield messages[0] + part

    def go(self, *messages: bytes) -> None:
        for message in messages:
            self.gates.setdefault(message, asyncio.Event()).set()

    def stream(self, *messages: bytes, one_by_one: bool = False) -> Singly:
        """A message "name:a" is of sequence "a"."""
        last = b""

        async def requests() -> AsyncGenerator[Parcel]:
            nonlocal last
            for last in messages:
                yield Parcel(last)

        return Singly(
            self._channel.stream_stream("/test/Stream", request_serializer=contents), requests(), lambda: last.partition(b":")[2] or None,
            one_by_one=one_by_one,
        )  # fmt: skip

    async def has(self, *messages: bytes) -> None:
        """Wait until so many were sent, and see that no more are."""
        async with asyncio.timeout(30):
            while len(self.sent) < len(messages):  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert sorted(self.sent) == sorted(messages)


async def rest(stream: Singly) -> list[bytes]:
    async with asyncio.timeout(30):
        found = []
        while (answer := await stream.read()) is not grpc.aio.EOF:
            found.append(answer)
        return found


@in_loop
async def test_messages_go_at_once_and_answers_come_in_their_order() -> None:
    async with Server() as server:
        stream = server.stream(b"a", b"b", b"c")
        await server.has(b"a", b"b", b"c")
        server.go(b"c", b"b", b"a")
        assert await rest(stream) == [b"a1", b"a2", b"b1", b"b2", b"c1", b"c2"]


@in_loop
async def test_a_message_of_a_sequence_waits_for_the_answer_to_the_one_before_and_for_no_other() -> None:
    async with Server() as server:
        stream = server.stream(b"1:a", b"2:a", b"1:b", b"2:b", b"x")
        await server.has(b"1:a", b"1:b", b"x")
        server.go(b"1:b")
        await server.has(b"1:a", b"1:b", b"x", b"2:b")  # though nobody has read an answer
        server.go(b"1:a", b"2:a", b"2:b", b"x")
        assert [answer[:3] for answer in (await rest(stream))[::2]] == [b"1:a", b"2:a", b"1:b", b"2:b", b"x1"]


@in_loop
async def test_one_by_one_the_next_goes_when_all_answers_before_were_read() -> None:
    async with Server() as server:
        stream = server.stream(b"a", b"b", one_by_one=True)
        server.go(b"a", b"b")
        assert [await stream.read(), await stream.read()] == [b"a1", b"a2"]
        await server.has(b"a")
        assert await rest(stream) == [b"b1", b"b2"]


@in_loop
async def test_a_message_that_fails_fails_the_stream_after_the_answers_before_it() -> None:
    async with Server() as server:
        stream = server.stream(b"a", b"fails", b"b")
        server.go(b"a", b"fails", b"b")
        assert [await stream.read(), await stream.read()] == [b"a1", b"a2"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        stream.cancel()


@pytest.mark.parametrize("messages", [(), (b"a",), (b"1:a", b"2:a")])
@in_loop
async def test_who_reads_hears_that_it_is_cancelled(messages: tuple[bytes, ...]) -> None:
    async with Server() as server:
        stream = server.stream(*messages)
        if not messages:
            assert await rest(stream) == []
        await server.has(*messages[:1])
        reading = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0.05)
        stream.cancel()
        if messages:
            with pytest.raises(asyncio.CancelledError):
                await reading
        else:
            assert await reading is grpc.aio.EOF
