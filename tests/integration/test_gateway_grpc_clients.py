"""Clients that take no answers, hold calls or hold connections over gRPC: each is bounded, and the others go on."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.access.footprint import MIB, footprint_bytes
from serve.gateway.access.keys import add_key
from serve.triton.launch import TritonServer
from tests.gateway_models import served_models
from tests.integration.test_gateway_grpc_bounds import MANY_CONFIG, MANY_MODEL, many, silence
from tests.integration.test_gateway_memory import BODY, BOUND, ECHO_CONFIG, ECHO_MODEL, Gateway, gateway

pytestmark = pytest.mark.integration
SERVICE = "/inference.GRPCInferenceService/"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RESET, SETTINGS, PING, WINDOW, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
ACK, END_STREAM, END_HEADERS = 1, 1, 4
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("clients")
    for name, config, model in (("many", MANY_CONFIG, MANY_MODEL), ("echo", ECHO_CONFIG, ECHO_MODEL)):
        version = folder / "repository" / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(config)
        (version / "model.py").write_text(model)
    with served_models(folder) as server:
        yield server


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def literal(name: str, value: str) -> bytes:
    """A header in HPACK, neither compressed nor remembered; both are shorter than 127 letters."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def call_head(name: str) -> bytes:
    fields = {
        ":method": "POST", ":scheme": "http", ":path": SERVICE + name, ":authority": "gateway", "te": "trailers",
        "content-type": "application/grpc",
    }  # fmt: skip
    return b"".join(literal(*field) for field in fields.items())


class Http2:
    """A connection that answers pings, and never opens its window further than the 64 KiB that it begins with."""

    def __init__(self, served: Gateway, source: str = "127.0.0.1") -> None:
        host, _, port = served.grpc_address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), TIMEOUT_S, (source, 0))
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0))
        self.data = b""

    def ask(self, name: str, message: bytes | None, stream: int = 1) -> None:
        """Send a call, with one message, and end its side; or leave it open without any."""
        self.socket.sendall(frame(HEADERS, END_HEADERS, stream, call_head(name)))
        if message is not None:
            body = b"\0" + len(message).to_bytes(4, "big") + message
            self.socket.sendall(frame(DATA, END_STREAM, stream, body))

    def read(self, enough: int = 1 << 40) -> bool:
        """Read until so many bytes of data came; whether the connection ended before."""
        while len(self.data) < enough:
            try:
                head = self._exactly(9)
                payload = self._exactly(int.from_bytes(head[:3], "big"))
                if head[3] == DATA:
                    self.data += payload
                elif head[3] in (SETTINGS, PING) and not head[4] & ACK:
                    self.socket.sendall(frame(head[3], ACK, 0, payload if head[3] == PING else b""))
            except ConnectionError:
                return True
        return False

    def ends(self, streams: int) -> Counter[int]:
        """Read until so many streams ended; how many by which kind of frame."""
        found: Counter[int] = Counter()
        while found.total() < streams:
            head = self._exactly(9)
            payload = self._exactly(int.from_bytes(head[:3], "big"))
            if head[3] == RESET or (head[3] in (HEADERS, DATA) and head[4] & END_STREAM):
                found[head[3]] += 1
            elif head[3] in (SETTINGS, PING) and not head[4] & ACK:
                self.socket.sendall(frame(head[3], ACK, 0, payload if head[3] == PING else b""))
        return found

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            part = self.socket.recv(size - len(found))
            if not part:
                raise ConnectionError
            found += part
        return found


def echo(size: int) -> Any:
    return messages.ModelInferRequest(
        model_name="echo", inputs=[{"name": "size", "datatype": "INT64", "shape": (1,)}],
        raw_input_contents=[struct.pack("<q", size)],
    )  # fmt: skip


def until_free(served: Gateway) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while served.metric("gateway_memory_bytes") > MIB:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(("name", "message"), [("ModelInfer", echo(2 * MIB)), ("ModelStreamInfer", many(10_000))])
def test_an_answer_waits_for_its_reader_for_so_long_only(triton: TritonServer, name: str, message: Any) -> None:
    with gateway(triton, write_timeout_s=1) as served, grpc.insecure_channel(served.grpc_address) as channel:
        slow = Http2(served)
        slow.ask(name, message.SerializeToString())
        with contextlib.closing(slow.socket):
            assert slow.read()
        assert 0 < len(slow.data) <= 65535
        until_free(served)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert len(stub.ModelInfer(echo(MIB), timeout=TIMEOUT_S).raw_output_contents[0]) == MIB


def test_a_stream_that_asks_nothing_ends(triton: TritonServer) -> None:
    with gateway(triton, body_timeout_s=2) as served, grpc.insecure_channel(served.grpc_address) as channel:
        with silence() as nothing, pytest.raises(grpc.RpcError) as told:
            list(channel.stream_stream(f"{SERVICE}ModelStreamInfer")(nothing, timeout=TIMEOUT_S))
        assert told.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "did not come in time" in told.value.details()
        until_free(served)


def test_one_address_has_half_of_the_connections(triton: TritonServer) -> None:
    live = b"\0\0\0\0\2\x08\x01"
    with gateway(triton, max_clients=40) as served, contextlib.ExitStack() as stack:
        for _ in range(60):
            with contextlib.suppress(OSError):
                stack.enter_context(contextlib.closing(Http2(served).socket))
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            other = Http2(served, "127.0.0.2")
            with contextlib.closing(other.socket), contextlib.suppress(OSError):
                other.ask("ServerLive", b"")
                if not other.read(len(live)):
                    assert other.data == live
                    return
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_flood_of_calls_ends_nobody_elses(triton: TritonServer) -> None:
    """More at once than the library lets wait by itself, of which it then ends any."""
    each = 120
    head = call_head("ModelInfer")
    flood = b"".join(frame(HEADERS, END_HEADERS | END_STREAM, 1 + 2 * number, head) for number in range(each))
    with (
        gateway(triton, memory_bytes=1024 * MIB, latency_target_s=60, max_wait_s=60) as served,
        grpc.insecure_channel(served.grpc_address) as channel,
        contextlib.ExitStack() as stack,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        floods = [Http2(served, "127.0.0.2") for _ in range(30)]
        for client in floods:
            stack.enter_context(contextlib.closing(client.socket))
        asking = [stub.ModelInfer.future(echo(4), timeout=TIMEOUT_S) for _ in range(20)]
        for client in floods:
            client.socket.sendall(flood)
        asking += [stub.ModelInfer.future(echo(4), timeout=TIMEOUT_S) for _ in range(60)]
        assert {call.code() for call in asking} == {grpc.StatusCode.OK}
        assert sum((client.ends(each) for client in floods), Counter()) == {HEADERS: 30 * each}


def test_one_key_has_a_quarter_of_the_calls(triton: TritonServer, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = {name: (("x-api-key", add_key(path, name)[0]),) for name in ("a", "b")}
    end = threading.Event()

    def nothing() -> Iterator[bytes]:
        end.wait()
        yield from ()

    with gateway(triton, max_clients=40, keys=path) as served, grpc.insecure_channel(served.grpc_address) as channel:
        stream = channel.stream_stream(f"{SERVICE}ModelStreamInfer")
        calls = [stream(nothing(), metadata=keys["a"], timeout=TIMEOUT_S) for _ in range(12)]
        deadline = time.monotonic() + TIMEOUT_S
        while sum(call.is_active() for call in calls) > 10:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        refused = [call for call in calls if not call.is_active()]
        assert {call.code() for call in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert {"too many calls" in call.details() for call in refused} == {True}
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ModelInfer(echo(4), metadata=keys["b"], timeout=TIMEOUT_S).model_name == "echo"
        for call in calls:
            call.cancel()
        end.set()
        deadline = time.monotonic() + TIMEOUT_S
        while True:  # the calls that ended have given their places back
            with contextlib.suppress(grpc.RpcError):
                assert stub.ModelInfer(echo(4), metadata=keys["a"], timeout=TIMEOUT_S).model_name == "echo"
                return
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize("name", ["ModelInfer", "ModelStreamInfer", "ModelMetadata"])
def test_what_is_packed_is_unpacked_within_the_bound(triton: TritonServer, name: str) -> None:
    """Hundred messages of some kilobytes, each of which unpacks to nearly what a message may be."""
    long = messages.ModelInferRequest(model_name="echo", raw_input_contents=[bytes(BODY - 4096)]).SerializeToString()
    with gateway(triton) as served:
        with contextlib.ExitStack() as stack:
            channels = [stack.enter_context(grpc.insecure_channel(served.grpc_address)) for _ in range(10)]
            calls = []
            for channel in channels:
                ask = channel.stream_stream(SERVICE + name)
                packed = {"timeout": TIMEOUT_S, "compression": grpc.Compression.Gzip}
                calls += [ask(iter([long]), **packed) for _ in range(10)]
            codes = {call.code() for call in calls}
        refused = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
        assert codes <= refused
        assert served.peak() < footprint_bytes(BOUND, BODY)
        until_free(served)


@pytest.mark.parametrize("name", ["ModelInfer", "ModelStreamInfer", "ModelMetadata"])
def test_what_was_refused_is_not_held(triton: TritonServer, name: str) -> None:
    """One long message after the other, each refused, to more than the bound in all."""
    long = messages.ModelInferRequest(model_name="echo", raw_input_contents=[bytes(BODY - 4096)]).SerializeToString()
    with gateway(triton) as served, grpc.insecure_channel(served.grpc_address) as channel:
        ask = channel.stream_stream(SERVICE + name)
        for _ in range(60):
            assert ask(iter([long]), timeout=TIMEOUT_S).code() is grpc.StatusCode.INVALID_ARGUMENT
        assert served.peak() < footprint_bytes(BOUND, BODY)


def test_what_is_packed_too_well_or_badly_is_refused(triton: TritonServer) -> None:
    short = echo(4)
    short.raw_input_contents.append(bytes(BODY))
    with gateway(triton) as served, grpc.insecure_channel(served.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        gzip = {"timeout": TIMEOUT_S, "compression": grpc.Compression.Gzip}
        assert stub.ModelInfer(echo(4), **gzip).raw_output_contents == [bytes(4)]
        found = [answer.infer_response.model_name for answer in stub.ModelStreamInfer(iter([many(3)]), **gzip)]
        assert set(found) == {"many"}
        with pytest.raises(grpc.RpcError, match="too large") as told:
            stub.ModelInfer(short, **gzip)
        assert told.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        ask = channel.unary_unary(f"{SERVICE}ModelInfer")
        with pytest.raises(grpc.RpcError, match="can't be unpacked") as told:
            ask(b"\x1f\x8b" + bytes(64), timeout=TIMEOUT_S)
        assert told.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as told:
            stub.ModelInfer(echo(4), timeout=TIMEOUT_S, compression=grpc.Compression.Deflate)
        assert told.value.code() is grpc.StatusCode.UNIMPLEMENTED


FLOODS = {
    "headers without an end": frame(CONTINUATION, 0, 1, literal("x-more", "y" * 100) * 100),
    "pings": frame(PING, ACK, 0, bytes(8)) * 500,
    "windows": frame(WINDOW, 0, 0, b"\0\0\0\1") * 500,
    "priorities": frame(PRIORITY, 0, 1, bytes(5)) * 500,
    "a kind that nobody knows": frame(0xBB, 0, 0, bytes(8192)),
}


def ends(connection: socket.socket, flood: bytes) -> bool:
    """Whether a connection is ended while this is sent again and again."""
    deadline = time.monotonic() + TIMEOUT_S
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < deadline:
            connection.sendall(flood)
        return False
    return True


@pytest.mark.parametrize("flood", FLOODS)
def test_a_connection_that_brings_much_and_no_call_is_ended(triton: TritonServer, flood: str) -> None:
    with gateway(triton) as served, grpc.insecure_channel(served.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        asked = messages.ModelMetadataRequest(name="echo")
        assert stub.ModelMetadata(asked, timeout=TIMEOUT_S).name == "echo"
        flooding = Http2(served)
        with contextlib.closing(flooding.socket):
            if flood == "headers without an end":
                flooding.socket.sendall(frame(HEADERS, 0, 1, call_head("ServerLive")))
            assert ends(flooding.socket, FLOODS[flood])
        assert stub.ModelMetadata(asked, timeout=TIMEOUT_S).name == "echo"


def test_what_calls_bring_is_no_flood(triton: TritonServer) -> None:
    size = BODY - 8192
    message = messages.ModelInferRequest(
        model_name="files", inputs=[{"name": "file", "datatype": "BYTES", "shape": (1, 1)}],
        raw_input_contents=[struct.pack("<I", size) + bytes(size)],
    )  # fmt: skip
    with gateway(triton) as served, grpc.insecure_channel(served.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(12):
            assert stub.ModelInfer(message, timeout=TIMEOUT_S).model_name == "files"
        answers = stub.ModelStreamInfer(iter([message] * 12), timeout=TIMEOUT_S)
        assert [answer.error_message for answer in answers] == [""] * 12
