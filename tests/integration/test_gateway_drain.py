"""What is under way over gRPC when the gateway is told to stop is answered to its end, within its time."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.settings import Settings
from serve.triton.launch import TritonServer
from tests.gateway_models import served_models
from tests.integration.test_gateway_grpc import free_port
from tests.serve_http import gateway_thread

pytestmark = pytest.mark.integration
MESSAGES, PAUSE_S = 24, 0.3  # longer together than what is known of a model is taken for fresh


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with served_models(tmp_path_factory.mktemp("drain")) as server:
        yield server


def test_a_stream_goes_on_while_the_gateway_ends(triton: TritonServer, tmp_path: Path) -> None:
    port, begun, ended = free_port(), threading.Event(), threading.Event()
    settings = Settings(
        upstream=(f"http://{triton.http_address}",), grpc_upstream=(triton.grpc_address,), port=0, grpc_port=port,
        state=tmp_path / "none.db",
    )  # fmt: skip
    told: list[Any] = []

    def asked() -> Iterator[Any]:
        for number in range(MESSAGES):
            message = messages.ModelInferRequest(model_name="tiny", raw_input_contents=[struct.pack("<4f", 1, 2, 3, 4)])
            message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
            message.id = str(number)
            yield message
            time.sleep(PAUSE_S)

    def stream() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                for answer in stub.ModelStreamInfer(asked(), timeout=60):
                    told.append(answer.error_message or answer.infer_response.id)
                    begun.set()
            except grpc.RpcError as err:
                told.append(f"{err.code()}: {err.details()}")
            ended.set()

    client = threading.Thread(target=stream)
    with gateway_thread(settings):
        client.start()
        assert begun.wait(30)
    client.join(60)

    assert ended.is_set()
    assert told == [str(number) for number in range(MESSAGES)]
