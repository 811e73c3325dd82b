"""Clients that do not wait for their answers, in front of a real Triton: they cost nobody else anything."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.settings import ModelSettings, Settings
from serve.triton.launch import TritonServer
from tests.gateway_models import served_models
from tests.integration.test_gateway_grpc import free_port
from tests.serve_http import gateway_thread

SLEEPS_S = 2.0
PLACES = 3


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with served_models(tmp_path_factory.mktemp("left")) as server:
        yield server


@pytest.fixture(scope="module")
def addresses(triton: TritonServer) -> Iterator[tuple[str, str]]:
    """host:port of the gateway, HTTP and gRPC."""
    port = free_port()
    settings = Settings(
        upstream=(f"http://{triton.http_address}",),
        grpc_upstream=(triton.grpc_address,),
        port=0,
        grpc_port=port,
        models={"files": ModelSettings(max_in_flight=PLACES, max_wait_s=0.1)},
    )
    with gateway_thread(settings) as url:
        yield url.removeprefix("http://"), f"127.0.0.1:{port}"


def tiny() -> Any:
    x = triton_grpc.InferInput("x", (1, 4), "FP32")
    x.set_data_from_numpy(np.ones((1, 4), np.float32))
    request = messages.ModelInferRequest(model_name="tiny", raw_input_contents=[x._get_content()])
    request.inputs.append(x._get_tensor())
    return request


def pending(triton: TritonServer, model: str) -> int:
    """Requests of a model that wait in Triton's queue; those at work are not among them."""
    return counted(triton, "nv_inference_pending_request_count", model)


def counted(triton: TritonServer, name: str, model: str) -> int:
    """What Triton's metrics say of a model."""
    with urllib.request.urlopen(f"http://{triton.metrics_address}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    start = f'{name}{{model="{model}"'
    return sum(round(float(line.rpartition(" ")[2])) for line in lines if line.startswith(start))


def test_thousands_of_grpc_calls_that_are_given_up_leave_triton_alive(
    triton: TritonServer, addresses: tuple[str, str]
) -> None:
    """Told of each, Triton 24.10 ends by SIGSEGV after two to twenty seconds of this: of calls whose deadline passes
    (those of clients with even numbers), and of cancelled ones."""
    end = time.monotonic() + 12
    given_up = [0] * 8

    def ask(number: int) -> None:
        draw, request = random.Random(number), tiny()
        with grpc.insecure_channel(addresses[1]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while time.monotonic() < end:
                if number % 2 == 0:
                    try:
                        stub.ModelInfer(request, timeout=draw.choice((0.003, 0.01)))
                    except grpc.RpcError as err:
                        given_up[number] += err.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                else:
                    call = stub.ModelInfer.future(request)
                    time.sleep(draw.random() * 0.004)
                    given_up[number] += call.cancel()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(given_up))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(sum(given_up[::2]), sum(given_up[1::2])) > 20
    assert triton.running
    with grpc.insecure_channel(addresses[1]) as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(tiny(), timeout=30)
    assert answer.raw_output_contents


@pytest.mark.parametrize("how", ["leaves", "header", "grpc"])
def test_who_gives_up_early_has_no_more_at_triton_than_who_waits(
    triton: TritonServer, addresses: tuple[str, str], how: str
) -> None:
    host, port = addresses[0].split(":")
    body = json.dumps({"inputs": [{"name": "file", "datatype": "BYTES", "shape": [1, 1], "data": ["sleep"]}]}).encode()
    headers = {"Content-Type": "application/json"} | ({"X-Request-Timeout-Ms": "50"} if how == "header" else {})

    def ask() -> None:
        if how == "grpc":
            file = triton_grpc.InferInput("file", (1, 1), "BYTES")
            file.set_data_from_numpy(np.array([[b"sleep"]], np.object_))
            with triton_grpc.InferenceServerClient(addresses[1]) as client, contextlib.suppress(Exception):
                client.infer("files", [file], client_timeout=0.05)
            return
        connection = http.client.HTTPConnection(host, int(port), timeout=0.05 if how == "leaves" else 10)
        with contextlib.closing(connection), contextlib.suppress(TimeoutError):
            connection.request("POST", "/v2/models/files/infer", body, headers)
            connection.getresponse().read()

    most = 0
    end = time.monotonic() + 2 * SLEEPS_S
    while time.monotonic() < end:
        ask()
        most = max(most, pending(triton, "files"))
    assert 0 < most <= PLACES
    deadline = time.monotonic() + (PLACES + 1) * SLEEPS_S + 30
    while pending(triton, "files"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
