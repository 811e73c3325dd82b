"""What is said where a server does not describe the model: what it says, and never that there is no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import uvloop
from tritonclient.grpc import service_pb2_grpc as services

from compress.errors import ServerError
from serve.load.ask.target import find_target
from serve.load.options import LoadOptions
from tests.serve_http import Received, answer, scripted_server

NO_KEY, NOT_YOURS = "give a key", "the key may not ask the model m"
COLD = "the model m is not loaded yet"
SAYS: list[tuple[str, str, tuple[str, ...], str, str]] = [
    ("401 Unauthorized", NO_KEY, (), "wants a key", "--header 'X-API-Key: KEY'"),
    ("403 Forbidden", NOT_YOURS, (), "the key may not ask the model 'm'", "serve keys list"),
    ("429 Too Many Requests", "slow down", ("retry-after: 7",), "can't ask the model 'm'", "try again in 7 s"),
    ("503 Service Unavailable", COLD, ("retry-after: 3",), "can't ask the model 'm'", "try again in 3 s; "),
    ("503 Service Unavailable", COLD, ("retry-after: soon",), "can't ask the model 'm'", "when it is ready; "),
    ("500 Internal Server Error", "it broke", (), "can't ask the model 'm'", "the server's log"),
    ("404 Not Found", "no model m", (), "there is no model 'm'", "look up the name"),
    ("400 Bad Request", "Request for unknown model: 'm' is not found", (), "there is no model 'm'", "look up the name"),
    ("405 Method Not Allowed", "GET", (), "can't ask the model 'm'", "Open Inference Protocol"),
]  # fmt: skip


def said_of(options: dict[str, Any]) -> ServerError:
    with pytest.raises(ServerError) as caught:
        uvloop.run(find_target(LoadOptions(model="m", **options)))
    return caught.value


def told_over_http(status: str, body: bytes, *headers: str) -> ServerError:
    async def respond(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(body, status, *headers))

    async def main() -> ServerError:
        async with scripted_server(respond) as server:
            with pytest.raises(ServerError) as caught:
                await find_target(LoadOptions(model="m", url=server.url))
            return caught.value

    return uvloop.run(main())


@pytest.mark.parametrize(("status", "said", "headers", "what", "mend"), SAYS)
def test_over_http_the_error_has_what_the_server_says_why_and_what_to_do(
    status: str, said: str, headers: tuple[str, ...], what: str, mend: str
) -> None:
    err = told_over_http(status, json.dumps({"error": said}).encode(), *headers)
    assert what in err.what
    assert err.why == f"it answers with status {status[:3]}: {said}"
    assert mend in err.mend


BODIES: list[tuple[bytes, str]] = [
    (b"", "nothing else"),
    (b"<html>busy</html>", "<html>busy</html>"),
    (b'{"error": {"deep": 1}}', '{"error": {"deep": 1}}'),
    (b'["error"]', '["error"]'),
    (b"\xff\xfe", "\ufffd\ufffd"),
    (b"x" * 100_000, "x" * 300),
]


@pytest.mark.parametrize(("body", "said"), BODIES)
def test_a_body_of_any_kind_is_shown_and_bounded(body: bytes, said: str) -> None:
    assert told_over_http("503 Service Unavailable", body).why == f"it answers with status 503: {said}"


@contextmanager
def grpc_server(code: grpc.StatusCode, said: str, *metadata: tuple[str, str]) -> Iterator[str]:
    class Refusing(services.GRPCInferenceServiceServicer):  # type: ignore[misc]
        def ModelMetadata(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
            context.set_trailing_metadata(metadata)
            context.abort(code, said)

    server = grpc.server(futures.ThreadPoolExecutor(1))
    services.add_GRPCInferenceServiceServicer_to_server(Refusing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


OVER_GRPC: list[tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...], str, str]] = [
    (grpc.StatusCode.UNAUTHENTICATED, NO_KEY, (), "wants a key", "--header"),
    (grpc.StatusCode.PERMISSION_DENIED, NOT_YOURS, (), "the key may not ask the model 'm'", "serve keys list"),
    (grpc.StatusCode.UNAVAILABLE, COLD, (("retry-after", "3"),), "can't ask the model 'm'", "try again in 3 s; "),
    (grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'm'", (), "there is no model 'm'", "look up the name"),
    (grpc.StatusCode.NOT_FOUND, "no model m", (), "there is no model 'm'", "look up the name"),
    (grpc.StatusCode.UNIMPLEMENTED, "what?", (), "can't ask the model 'm'", "Open Inference Protocol"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "said", "metadata", "what", "mend"), OVER_GRPC)
def test_over_grpc_it_is_told_the_same(
    code: grpc.StatusCode, said: str, metadata: tuple[tuple[str, str], ...], what: str, mend: str
) -> None:
    with grpc_server(code, said, *metadata) as url:
        err = said_of({"url": url})
    assert what in err.what
    assert err.why == f"it answers with {code.name}: {said}"
    assert mend in err.mend


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_server_that_is_not_there_is_told_apart_from_one_that_is_not_ready(scheme: str) -> None:
    assert said_of({"url": f"{scheme}://127.0.0.1:9", "timeout": 5}).what == f"can't reach {scheme}://127.0.0.1:9"
