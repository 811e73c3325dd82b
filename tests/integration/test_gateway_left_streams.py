"""Streams that their clients leave, to models that go on with them whatever they are told, in front of a real Triton.

They keep the places of whose they are, and others are answered by what is free, or told at once that nothing is.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import requests
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.access.footprint import MIB
from serve.gateway.access.keys import revoke_key
from serve.triton.launch import Ports, TritonServer
from tests.integration.test_gateway_grpc_streams import keyed
from tests.integration.test_gateway_memory import Gateway, gateway
from tests.integration.test_gateway_mixed_streams import CONFIG, DECOUPLED

__all__ = ["keyed"]

pytestmark = pytest.mark.integration
TIMEOUT_S = 2.0
AT_ONCE_S = 1.5  # half a second that whoever comes may wait, on a machine that others use
# Goes on with a request of more than 0 until there is a file "go", whatever it is told; else one answer.
DEAF = """\
import pathlib
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            if THREADS:
                threading.Thread(target=self.answer, args=(request,)).start()
            else:
                self.answer(request)

    def answer(self, request):
        sender = request.get_response_sender()
        goes_on = int(pb_utils.get_input_tensor_by_name(request, "count").as_numpy()[0]) > 0
        number = 0
        while True:
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("number", np.array([number], np.int64))]))
            number += 1
            if not goes_on or pathlib.Path(GO).exists() or (HEEDS and sender.is_cancelled()):
                break
            time.sleep(0.05)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
HEEDED = 'parameters { key: "heeds_cancellation" value: { string_value: "true" } }\n'
PADDING = 'input [{ name: "padding" data_type: TYPE_UINT8 dims: [-1] optional: true }]\n'
KINDS = {
    "one": (1, "THREADS, HEEDS = False, False", ""),
    "two": (2, "THREADS, HEEDS = False, False", ""),
    "threads": (1, "THREADS, HEEDS = True, False", ""),
    "padded": (1, "THREADS, HEEDS = True, False", PADDING),
    "heeds": (1, "THREADS, HEEDS = False, True", HEEDED),
}


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, the models end what they are at work on."""
    return tmp_path_factory.mktemp("go") / "go"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory, go: Path) -> Iterator[TritonServer]:
    """Models: "one" and "two" have as many instances, each at work on one request at a time; "threads" works on any
    number; "heeds" ends where it is told to."""
    folder = tmp_path_factory.mktemp("left") / "models"
    for name, (count, kind, more) in KINDS.items():
        version = folder / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(f"{kind}\nGO = {str(go)!r}\n{DEAF}")
        instances = f'backend: "python"\ninstance_group [ {{ count: {count} kind: KIND_CPU }} ]\n'
        (version.parent / "config.pbtxt").write_text(CONFIG.replace("NAME", name) + instances + DECOUPLED + more)
    with TritonServer(folder, ports=Ports(0, 0, 0)) as server:
        yield server


@pytest.fixture(autouse=True)
def idle(triton: TritonServer, go: Path) -> Iterator[None]:
    """Each test finds the models idle."""
    go.unlink(missing_ok=True)
    yield
    go.touch()
    with grpc.insecure_channel(triton.grpc_address) as channel:
        for name, (count, _, _) in KINDS.items():
            for _ in range(2 * count):
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                list(stub.ModelStreamInfer(iter([asked(name, 0)]), timeout=60))


def asked(model: str, number: int) -> Any:
    request = messages.ModelInferRequest(model_name=model, raw_input_contents=[struct.pack("<q", number)])
    request.inputs.add(name="count", datatype="INT64", shape=[1])
    return request


def of(name: str, model: str) -> str:
    """What `Gateway.metric` looks for."""
    return rf'{name}\{{model="{model}"\}}'


def metric(served: Gateway, name: str, model: str, key: str) -> float:
    with contextlib.suppress(AssertionError):
        return served.metric(of(name, model), key)
    return 0.0


def until(served: Gateway, name: str, model: str, key: str, value: float) -> None:
    deadline = time.monotonic() + 30
    while (found := metric(served, name, model, key)) != value:
        assert time.monotonic() < deadline, f"{name} is {found}"
        time.sleep(0.1)


def leave(served: Gateway, model: str, key: str, way: str) -> None:
    """Begin a stream that goes on, and leave it after its first answer."""
    if way == "grpc":
        with grpc.insecure_channel(served.grpc_address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            found = stub.ModelStreamInfer(iter([asked(model, 1)]), metadata=[("x-api-key", key)])
            next(found)
            found.cancel()
        return
    connection = http.client.HTTPConnection(served.address, timeout=30)
    headers = {"content-type": "application/json", "x-api-key": key}
    connection.request("POST", f"/predict/{model}/stream", json.dumps({"count": [1]}), headers)
    sock = connection.sock
    assert connection.getresponse().read(10)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    connection.close()


def ask(served: Gateway, model: str, key: str) -> tuple[int, float, str]:
    """Status, seconds, and Retry-After of a stream of one answer."""
    began = time.monotonic()
    url = f"{served.url}/predict/{model}/stream"
    answer = requests.post(url, json={"count": [0]}, headers={"x-api-key": key}, timeout=60)
    return answer.status_code, time.monotonic() - began, answer.headers.get("retry-after", "")


def ask_over_grpc(served: Gateway, model: str, key: str) -> tuple[Any, float]:
    """Status and seconds of the same."""
    began = time.monotonic()
    with grpc.insecure_channel(served.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([asked(model, 0)]), metadata=[("x-api-key", key)], timeout=60)
        with contextlib.suppress(grpc.RpcError):
            list(call)
        return call.code(), time.monotonic() - began


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_a_stream_that_was_left_keeps_its_place_and_others_are_told_at_once(
    triton: TritonServer, keyed: tuple[Path, str, str], go: Path, way: str
) -> None:
    path, alice, bob = keyed
    with gateway(triton, keys=path, timeout_s=TIMEOUT_S) as served:
        assert ask(served, "one", bob)[0] == 200
        leave(served, "one", alice, way)
        until(served, "gateway_model_left", "one", bob, 1)
        time.sleep(2 * TIMEOUT_S)
        first = ask(served, "one", bob)  # whether the model works on several is not known before
        assert first[0] == 503
        for _ in range(4):
            status, seconds, retry_after = ask(served, "one", bob)
            assert (status, bool(retry_after)) == (503, True)
            assert seconds < AT_ONCE_S
            code, seconds = ask_over_grpc(served, "one", bob)
            assert code is grpc.StatusCode.UNAVAILABLE
            assert seconds < AT_ONCE_S
        time.sleep(TIMEOUT_S)  # three of them, since it was left
        assert metric(served, "gateway_model_in_flight", "one", bob) == 2  # and the first that was refused
        assert ask(served, "two", bob)[0] == 200
        go.touch()
        until(served, "gateway_model_in_flight", "one", bob, 0)
        assert metric(served, "gateway_model_left", "one", bob) == 0
        assert ask(served, "one", bob)[0] == ask(served, "one", alice)[0] == 200
    assert triton.running


def test_others_go_on_with_what_is_free(triton: TritonServer, keyed: tuple[Path, str, str]) -> None:
    path, alice, bob = keyed
    with gateway(triton, keys=path, timeout_s=TIMEOUT_S) as served:
        for model in ("two", "threads"):
            leave(served, model, alice, "http")
            until(served, "gateway_model_left", model, bob, 1)
        time.sleep(2 * TIMEOUT_S)
        for _ in range(5):
            assert ask(served, "two", bob)[0] == 200
            assert ask(served, "threads", bob)[0] == 200


def test_whoever_comes_together_to_a_model_that_works_on_many_is_answered(
    triton: TritonServer, keyed: tuple[Path, str, str]
) -> None:
    path, alice, bob = keyed
    with gateway(triton, keys=path, timeout_s=TIMEOUT_S) as served:
        for _ in range(10):  # so that as many of its messages go at once
            assert ask(served, "threads", bob)[0] == 200
        leave(served, "threads", alice, "http")
        until(served, "gateway_model_left", "threads", bob, 1)
        time.sleep(2 * TIMEOUT_S)
        found: list[int] = []
        threads = [threading.Thread(target=lambda: found.append(ask(served, "threads", bob)[0])) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [200] * 8


def test_what_a_key_has_left_is_its_own(triton: TritonServer, keyed: tuple[Path, str, str]) -> None:
    path, alice, bob = keyed
    with gateway(triton, keys=path, timeout_s=TIMEOUT_S) as served:
        leave(served, "threads", alice, "grpc")
        until(served, "gateway_model_left", "threads", bob, 1)
        status, _, retry_after = ask(served, "threads", alice)
        assert (status, bool(retry_after)) == (503, True)
        assert ask(served, "threads", bob)[0] == 200


def test_a_long_message_of_what_was_left_is_not_counted_once_it_was_sent(
    triton: TritonServer, keyed: tuple[Path, str, str]
) -> None:
    path, alice, bob = keyed
    with (
        gateway(triton, keys=path, timeout_s=TIMEOUT_S, memory_bytes=64 * MIB) as served,
        grpc.insecure_channel(served.grpc_address) as channel,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        message = asked("padded", 1)
        message.inputs.add(name="padding", datatype="UINT8", shape=[3 * MIB])
        message.raw_input_contents.append(bytes(3 * MIB))
        found = stub.ModelStreamInfer(iter([message]), metadata=[("x-api-key", alice)])
        next(found)
        found.cancel()
        until(served, "gateway_model_left", "padded", bob, 1)
        assert served.metric("gateway_memory_bytes", bob) > 2 * MIB
        deadline = time.monotonic() + 5 * TIMEOUT_S
        while served.metric("gateway_memory_bytes", bob) > MIB:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert metric(served, "gateway_model_left", "padded", bob) == 1


def test_a_model_that_heeds_is_told(triton: TritonServer, keyed: tuple[Path, str, str]) -> None:
    path, alice, bob = keyed
    with gateway(triton, keys=path, timeout_s=TIMEOUT_S) as served:
        leave(served, "heeds", alice, "http")
        until(served, "gateway_model_left", "heeds", bob, 1)
        until(served, "gateway_model_left", "heeds", bob, 0)
        assert metric(served, "gateway_model_stuck_total", "heeds", bob) == 0
        assert ask(served, "heeds", bob)[0] == 200


def test_one_that_does_not_end_is_told_as_stuck_and_gives_its_place_back(
    triton: TritonServer, keyed: tuple[Path, str, str]
) -> None:
    path, alice, bob = keyed
    with gateway(triton, keys=path, timeout_s=TIMEOUT_S, left_timeout_s=3) as served:
        leave(served, "two", alice, "http")
        until(served, "gateway_model_stuck_total", "two", bob, 1)
        assert metric(served, "gateway_model_in_flight", "two", bob) == 0
        assert ask(served, "two", alice)[0] == 200


def test_a_stream_whose_key_is_revoked_keeps_its_place(triton: TritonServer, keyed: tuple[Path, str, str]) -> None:
    path, alice, bob = keyed
    with gateway(triton, keys=path, timeout_s=TIMEOUT_S) as served:
        url, headers = f"{served.url}/predict/two/stream", {"x-api-key": alice}
        with requests.post(url, json={"count": [1]}, headers=headers, stream=True, timeout=60) as found:
            lines = (line for line in found.iter_lines() if line)
            next(lines)
            revoke_key(path, "alice")
            assert b"event: error" in list(lines)
        time.sleep(2 * TIMEOUT_S)
        assert metric(served, "gateway_model_in_flight", "two", bob) == 1
        assert metric(served, "gateway_model_left", "two", bob) == 1
