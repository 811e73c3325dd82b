"""A stream over gRPC asks decoupled models or others: one that asks both ends Triton 24.10."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.settings import Settings
from serve.triton.launch import Ports, TritonServer
from tests.integration.test_gateway_grpc import free_port
from tests.serve_http import gateway_thread

pytestmark = pytest.mark.integration
TIMEOUT_S = 60
CONFIG = """\
name: "NAME"
max_batch_size: 0
input [ { name: "count" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "number" data_type: TYPE_INT64 dims: [ 1 ] } ]
"""
PYTHON = 'backend: "python"\ninstance_group [ { count: 1 kind: KIND_CPU } ]\n'
DECOUPLED = "model_transaction_policy { decoupled: True }\n"
AROUND = """\
platform: "ensemble"
ensemble_scheduling { step [ {
  model_name: "many" model_version: -1
  input_map { key: "count" value: "count" } output_map { key: "number" value: "number" }
} ] }
"""
MANY = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(pb_utils.get_input_tensor_by_name(request, "count").as_numpy()[0])):
                tensor = pb_utils.Tensor("number", np.array([number], np.int64))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ONE = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        numbers = [pb_utils.get_input_tensor_by_name(request, "count").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("number", number)]) for number in numbers]
"""


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Models: "many" and "more" are decoupled; "one" and "other" are not; the ensemble "around" asks "many"."""
    folder = tmp_path_factory.mktemp("streams")
    kinds = {"many": (DECOUPLED, MANY), "more": (DECOUPLED, MANY), "one": ("", ONE), "other": ("", ONE)}
    for name, (more, code) in kinds.items():
        version = folder / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(code)
        (version.parent / "config.pbtxt").write_text(CONFIG.replace("NAME", name) + PYTHON + more)
    (folder / "around" / "1").mkdir(parents=True)
    (folder / "around" / "config.pbtxt").write_text(CONFIG.replace("NAME", "around") + AROUND)
    with TritonServer(folder, ports=Ports(0, 0, 0)) as server:
        yield server


@pytest.fixture(scope="module", params=[True, False], ids=["validated", "not validated"])
def address(request: pytest.FixtureRequest, triton: TritonServer) -> Iterator[str]:
    port = free_port()
    settings = Settings(
        upstream=(f"http://{triton.http_address}",), grpc_upstream=(triton.grpc_address,), port=0, grpc_port=port,
        validate=request.param,
    )  # fmt: skip
    with gateway_thread(settings):
        yield f"127.0.0.1:{port}"


def asked(address: str, *models: str, count: int = 20) -> int | str:
    """How many answers a stream gets that asks these models, or why it is refused."""
    requests = []
    for model in models:
        request = messages.ModelInferRequest(model_name=model, raw_input_contents=[struct.pack("<q", count)])
        request.inputs.add(name="count", datatype="INT64", shape=[1])
        requests.append(request)
    with grpc.insecure_channel(address) as channel:
        try:
            answers = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(
                iter(requests), timeout=TIMEOUT_S
            )
            return sum(not answer.error_message for answer in answers)
        except grpc.RpcError as err:
            if err.code() is grpc.StatusCode.INVALID_ARGUMENT:
                return str(err.details())
            raise


@pytest.mark.parametrize("models", [("many", "one", "many"), ("one", "many"), ("around", "one"), ("other", "around")])
def test_a_stream_that_asks_both_kinds_is_refused_and_ends_nothing(
    triton: TritonServer, address: str, models: tuple[str, ...]
) -> None:
    before = triton.pid
    for _ in range(20):
        assert "decoupled, or for others, not for both" in str(asked(address, *models))
    assert asked(address, "one") == 1
    assert triton.running
    assert triton.pid == before


def test_a_stream_may_ask_several_models_of_a_kind(address: str) -> None:
    assert asked(address, "many", "more", "around", "many") == 80
    assert asked(address, "one", "other", "one") == 3


def test_clients_that_leave_a_decoupled_model_end_nothing(triton: TritonServer, address: str) -> None:
    before = triton.pid
    for left_after in [1, 5, 0, 40] * 50:
        requests = []
        for _ in range(4):
            request = messages.ModelInferRequest(model_name="many", raw_input_contents=[struct.pack("<q", 50)])
            request.inputs.add(name="count", datatype="INT64", shape=[1])
            requests.append(request)
        with grpc.insecure_channel(address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            answers = stub.ModelStreamInfer(iter(requests), timeout=TIMEOUT_S)
            for _ in range(left_after):
                next(answers)
            answers.cancel()
    assert asked(address, "many") == 20
    assert triton.running
    assert triton.pid == before
