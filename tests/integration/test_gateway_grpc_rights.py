"""Who may call what over gRPC, before a real Triton: one table, told before a message is read, for as long as it holds."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages

from serve.gateway.access import identity
from serve.gateway.access.keys import add_key, revoke_key
from serve.gateway.grpc import questions as grpc_questions
from serve.gateway.settings import Settings
from tests.gateway_models import served_models
from tests.integration.test_gateway_grpc import free_port
from tests.serve_http import gateway_thread

SERVICE = "/inference.GRPCInferenceService/"
FREE = "free"
# What a key may; the words of `CALLS`.
KEYS: dict[str, set[str]] = {
    "none": set(),
    "unknown": set(),
    "expired": set(),
    "revoked": set(),
    "other": {"known"},
    "reader": {"known"},
    "plain": {"known", "model"},
    "admin": {"known", "model", "admin"},
}
# The one table: who may call it, by the service's own description.
CALLS = {
    "ServerLive": FREE, "ServerReady": FREE, "ServerMetadata": "known",
    **dict.fromkeys(("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics", "ModelInfer"), "model"),
    **dict.fromkeys(
        ("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings",
         "SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister",
         "CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"), "admin",
    ),
}  # fmt: skip
STREAM = "ModelStreamInfer"
REFUSED = {True: grpc.StatusCode.PERMISSION_DENIED, False: grpc.StatusCode.UNAUTHENTICATED}
PATIENCE_S = 30


@dataclass
class Served:
    """A gateway before a Triton, its channel, and keys by their kind."""

    channel: Any
    file: Path
    secrets: dict[str, str]

    def metadata(self, kind: str) -> list[tuple[str, str]]:
        return [("x-api-key", self.secrets[kind])] if self.secrets[kind] else []

    def call(self, name: str, message: bytes, metadata: list[tuple[str, str]]) -> grpc.StatusCode:
        return self.told(name, message, metadata)[0]

    def told(self, name: str, message: bytes, metadata: list[tuple[str, str]]) -> tuple[grpc.StatusCode, str]:
        """The status, and what it says."""
        try:
            if name == SERVICE + STREAM:
                list(self.channel.stream_stream(name)(iter([message]), metadata=metadata, timeout=PATIENCE_S))
            else:
                self.channel.unary_unary(name)(message, metadata=metadata, timeout=PATIENCE_S)
        except grpc.RpcError as err:
            return err.code(), err.details()
        return grpc.StatusCode.OK, ""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("rights")
    file = folder / "keys.json"
    secrets = {
        "none": "",
        "unknown": "sk-00000000-guessed",
        "expired": add_key(file, "expired", admin=True, expires="2020-01-01T00:00:00+00:00")[0],
        "revoked": add_key(file, "revoked", admin=True)[0],
        "other": add_key(file, "other", models=("other",))[0],
        "reader": add_key(file, "reader", models=("other",), metrics=True)[0],
        "plain": add_key(file, "plain", models=("tiny",))[0],
        "pattern": add_key(file, "pattern", models=("tiny*",))[0],
        "admin": add_key(file, "admin", admin=True)[0],
        "slow": add_key(file, "slow", rate=1e-6, burst=2)[0],
        "streaming": add_key(file, "streaming", models=("tiny",))[0],
        "narrowed": add_key(file, "narrowed", models=("tiny",), rate=1e-6, burst=3)[0],
    }
    revoke_key(file, "revoked")
    port = free_port()
    with served_models(folder) as triton, pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "QUESTIONS", 1e-9)
        patch.setattr(identity, "QUESTIONS_AT_ONCE", 200)
        settings = Settings(
            upstream=(f"http://{triton.http_address}",), grpc_upstream=(triton.grpc_address,), port=0, grpc_port=port,
            keys=file,
        )  # fmt: skip
        with gateway_thread(settings), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Served(channel, file, secrets)


def of_tiny(name: str) -> bytes:
    """A message of this call's that asks the model "tiny"."""
    if name == "ModelInfer":
        request = messages.ModelInferRequest(model_name="tiny")
        tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        tensor.contents.fp32_contents.extend([1.0] * 4)
        whole: bytes = request.SerializeToString()
        return whole
    kind = getattr(messages, f"{name}Request")
    message = kind(name="tiny") if "name" in kind.DESCRIPTOR.fields_by_name and name.startswith("Model") else kind()
    text: bytes = message.SerializeToString()
    return text


def test_the_table_has_every_call() -> None:
    service = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert {method.name for method in service.methods} == {*CALLS, STREAM}


@pytest.mark.parametrize("kind", KEYS)
def test_each_key_may_call_what_the_table_says_and_nothing_else(served: Served, kind: str) -> None:
    for name, needs in CALLS.items():
        code = served.call(SERVICE + name, of_tiny(name), served.metadata(kind))
        if needs == FREE or needs in KEYS[kind]:
            assert code not in (*REFUSED.values(), grpc.StatusCode.UNIMPLEMENTED), (name, code)
        else:
            assert code is REFUSED[bool(KEYS[kind])], (name, code)


def test_the_statistics_of_all_models_are_an_administrators(served: Served) -> None:
    empty = messages.ModelStatisticsRequest().SerializeToString()
    assert served.call(SERVICE + "ModelStatistics", empty, served.metadata("plain")) is REFUSED[True]
    assert served.call(SERVICE + "ModelStatistics", empty, served.metadata("admin")) is grpc.StatusCode.OK


@pytest.mark.parametrize("kind", ["plain", "pattern", "admin"])
@pytest.mark.parametrize("call", ["ModelInfer", STREAM, "ModelReady", "ModelMetadata"])
def test_a_name_that_no_model_can_have_is_neither_kept_nor_given_back(served: Served, kind: str, call: str) -> None:
    """Each letter of a name may become four: of some megabytes of them, nobody would count what they take."""
    for odd in ("a", "\x01", "\N{GRINNING FACE}"):
        name = "tiny" + odd * (5_000 if call.startswith("ModelM") or call == "ModelReady" else 1_000_000)
        asked = messages.ModelInferRequest(model_name=name)
        if call in ("ModelReady", "ModelMetadata"):
            asked = getattr(messages, f"{call}Request")(name=name)
        code, said = served.told(SERVICE + call, asked.SerializeToString(), served.metadata(kind))
        longer = grpc.StatusCode.NOT_FOUND if kind == "admin" else grpc.StatusCode.PERMISSION_DENIED
        assert code is longer, said
        assert len(said) < 3_000


@pytest.mark.parametrize("call", ["ModelInfer", STREAM])
def test_an_id_that_triton_would_copy_into_each_answer_is_short(served: Served, call: str) -> None:
    for length, code in ((1024, grpc.StatusCode.OK), (1025, grpc.StatusCode.INVALID_ARGUMENT)):
        asked = messages.ModelInferRequest.FromString(of_tiny("ModelInfer"))
        asked.id = "i" * length
        found, said = served.told(SERVICE + call, asked.SerializeToString(), served.metadata("plain"))
        assert found is code, said


def test_no_other_name_of_a_call_is_one(served: Served) -> None:
    odd = [
        "{}RepositoryIndex/", "{}repositoryIndex", "{}REPOSITORYINDEX", "{}RepositoryIndex%0a", "{}/RepositoryIndex",
        "{}./RepositoryIndex", "{}ServerLive/../RepositoryIndex", "{}RepositoryIndex?x", "{}RepositoryIndex#", "{}",
        "/inference.GRPCInferenceService//RepositoryIndex", "/inference.GRPCInferenceservice/RepositoryIndex",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/RepositoryIndex", "/",
        "/inference.GRPCInferenceService/inference.GRPCInferenceService/RepositoryIndex",
    ]  # fmt: skip
    for name, kind in product(odd, ("none", "other", "admin")):
        code = served.call(name.format(SERVICE), b"", served.metadata(kind))
        refused = {grpc.StatusCode.UNIMPLEMENTED} | (set() if KEYS[kind] else {REFUSED[False]})
        assert code in refused, (name, kind, code)


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        ([("x-api-key", "sk-guess")], grpc.StatusCode.INVALID_ARGUMENT),
        ([("authorization", "Bearer sk-guess")], grpc.StatusCode.UNAUTHENTICATED),
        ([("x-api-key-bin", b"sk-guess")], grpc.StatusCode.PERMISSION_DENIED),
        ([("x-forwarded-for", "127.0.0.1"), ("te", "trailers")], grpc.StatusCode.PERMISSION_DENIED),
    ],
)
def test_a_call_with_two_keys_has_none(served: Served, extra: list[tuple[str, Any]], code: grpc.StatusCode) -> None:
    metadata = [*served.metadata("plain"), *extra]
    assert served.call(SERVICE + "RepositoryIndex", b"", metadata) is code


@pytest.mark.parametrize("name", [name for name, needs in CALLS.items() if needs != FREE])
@pytest.mark.parametrize("kind", ["none", "unknown", "expired", "revoked"])
def test_who_may_not_call_is_told_before_a_message_is_sent(served: Served, name: str, kind: str) -> None:
    """A unary handler would wait for the message, and hold all of it: here none ever comes."""
    never = threading.Event()

    def messages_() -> Iterator[bytes]:
        never.wait(2 * PATIENCE_S)
        yield b""

    call = served.channel.stream_unary(SERVICE + name).future(
        messages_(), metadata=served.metadata(kind), timeout=PATIENCE_S
    )
    try:
        assert call.code() is grpc.StatusCode.UNAUTHENTICATED
    finally:
        never.set()


def test_so_is_a_key_that_has_sent_too_many(served: Served) -> None:
    message = of_tiny("ModelInfer")
    codes = [served.call(SERVICE + "ModelInfer", message, served.metadata("slow")) for _ in range(3)]
    assert codes == [grpc.StatusCode.OK, grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED]
    never = threading.Event()
    call = served.channel.stream_unary(SERVICE + "ModelInfer").future(
        iter(lambda: never.wait(2 * PATIENCE_S) or b"", b""), metadata=served.metadata("slow"), timeout=PATIENCE_S
    )
    assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    never.set()


def test_every_call_is_counted(served: Served) -> None:
    names = [name for name, needs in CALLS.items() if needs != FREE and name != "ModelInfer"]
    for number, name in enumerate(names):
        key = add_key(served.file, f"counted{number}", models=("other",))[0]
        metadata = [("x-api-key", key)]
        until(lambda metadata=metadata: served.call(SERVICE + "ServerMetadata", b"", metadata) is grpc.StatusCode.OK)  # type: ignore[misc]
        codes = [served.call(SERVICE + name, of_tiny(name), metadata) for _ in range(201)]
        assert codes[-1] is grpc.StatusCode.RESOURCE_EXHAUSTED, (name, codes[0], codes[-1])


class Stream:
    """A stream that stays open: what comes of it, and how it ended."""

    def __init__(self, served: Served, kind: str) -> None:
        self.sent: queue.Queue[bytes | None] = queue.Queue()
        self.came: queue.Queue[bytes | grpc.StatusCode] = queue.Queue()
        self.call = served.channel.stream_stream(SERVICE + STREAM)(
            iter(self.sent.get, None), metadata=served.metadata(kind)
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for answer in self.call:
                self.came.put(answer)
        except grpc.RpcError:
            pass
        self.came.put(self.call.code())

    def ask(self) -> bytes | grpc.StatusCode:
        self.sent.put(of_tiny("ModelInfer"))
        return self.came.get(timeout=PATIENCE_S)


def test_a_stream_ends_when_its_key_is_revoked_though_nothing_is_sent(served: Served) -> None:
    streams = [Stream(served, "streaming") for _ in range(2)]
    for stream in streams:
        assert isinstance(stream.ask(), bytes)
    staying = Stream(served, "plain")
    assert isinstance(staying.ask(), bytes)
    revoke_key(served.file, "streaming")
    for stream in streams:
        assert stream.came.get(timeout=PATIENCE_S) is grpc.StatusCode.UNAUTHENTICATED
        assert "no longer valid" in stream.call.details()
    assert isinstance(staying.ask(), bytes)
    staying.sent.put(None)
    assert staying.came.get(timeout=PATIENCE_S) is grpc.StatusCode.OK


def test_a_streams_messages_are_counted(served: Served) -> None:
    stream = Stream(served, "narrowed")
    assert all(isinstance(stream.ask(), bytes) for _ in range(3))
    assert stream.ask() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_stream_needs_a_key(served: Served) -> None:
    for kind in ("none", "unknown", "expired", "revoked"):
        stream = Stream(served, kind)
        assert stream.came.get(timeout=PATIENCE_S) is grpc.StatusCode.UNAUTHENTICATED
    assert Stream(served, "other").ask() is grpc.StatusCode.PERMISSION_DENIED


def test_the_gateway_knows_the_calls_of_the_table() -> None:
    assert {name for name, needs in CALLS.items() if needs == FREE} == grpc_questions.FREE
    assert {name for name, needs in CALLS.items() if needs == "admin"} == grpc_questions.ADMIN


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)
