"""A stream over gRPC asks decoupled models or others: one that asks both ends Triton 24.10."""

from __future__ import annotations

import json
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

from serve.gateway.access.keys import add_key
from serve.gateway.grpc.clients import MOST_LEFT
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
HELD = """\
import pathlib
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request.get_response_sender(),)).start()

    def answer(self, sender):
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("number", np.array([0], np.int64))]))
        while not pathlib.Path("GO").exists():
            time.sleep(0.1)
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
    """Models: "many", "more" and "held" are decoupled; "one" and "other" are not; the ensemble "around" asks "many".

    "held" goes on with each request until there is a file "go" beside the repository.
    """
    folder = tmp_path_factory.mktemp("streams") / "models"
    kinds = {"many": (DECOUPLED, MANY), "more": (DECOUPLED, MANY), "one": ("", ONE), "other": ("", ONE)}
    kinds["held"] = DECOUPLED, HELD.replace("GO", str(folder.parent / "go"))
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


def stream(channel: grpc.Channel, *models: str, count: int = 20, key: str = "") -> Any:
    requests = []
    for model in models:
        request = messages.ModelInferRequest(model_name=model, raw_input_contents=[struct.pack("<q", count)])
        request.inputs.add(name="count", datatype="INT64", shape=[1])
        requests.append(request)
    return service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(
        iter(requests), timeout=TIMEOUT_S, metadata=[("x-api-key", key)] if key else []
    )


def asked(address: str, *models: str, count: int = 20, key: str = "") -> int | str:
    """How many answers a stream gets that asks these models, or why it is refused."""
    with grpc.insecure_channel(address) as channel:
        try:
            return sum(not answer.error_message for answer in stream(channel, *models, count=count, key=key))
        except grpc.RpcError as err:
            if err.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED):
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


def test_ordinary_streams_beside_decoupled_ones_end_nothing(triton: TritonServer, address: str) -> None:
    """Triton by itself dies of these within 4 s."""
    before, end = triton.pid, time.monotonic() + 10
    found: list[Any] = []

    def ask(*models: str, count: int) -> None:
        with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            while time.monotonic() < end and triton.running:
                answers = list(stream(channel, *models, count=count))
                numbers = [struct.unpack("<q", each.infer_response.raw_output_contents[0])[0] for each in answers]
                found.append((models[0], numbers))

    threads = [threading.Thread(target=ask, args=("many",), kwargs={"count": 5}) for _ in range(4)]
    threads += [threading.Thread(target=ask, args=("one", "other") * 10, kwargs={"count": 7}) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert triton.running
    assert triton.pid == before
    assert {name for name, _ in found} == {"many", "one"}
    assert all(numbers == (list(range(5)) if name == "many" else [7] * 20) for name, numbers in found)


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


def test_a_stream_ends_once_its_key_may_not_ask_what_still_answers(triton: TritonServer, tmp_path: Path) -> None:
    keys, port = tmp_path / "keys.json", free_port()
    key = add_key(keys, "narrowed")[0]
    settings = Settings(
        upstream=(f"http://{triton.http_address}",), grpc_upstream=(triton.grpc_address,), port=0, grpc_port=port,
        keys=keys,
    )  # fmt: skip
    with gateway_thread(settings), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        answers = stream(channel, "held", key=key)
        next(answers)
        told = json.loads(keys.read_text())
        told["keys"][0]["models"] = ["one"]
        keys.write_text(json.dumps(told))
        with pytest.raises(grpc.RpcError):
            next(answers)
        assert answers.code() is grpc.StatusCode.PERMISSION_DENIED
        assert asked(f"127.0.0.1:{port}", "one", key=key) == 1


def test_streams_that_were_left_count_for_their_key_until_they_are_over(triton: TritonServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    leaving, other = (add_key(keys, name)[0] for name in ("leaving", "other"))
    port = free_port()
    settings = Settings(
        upstream=(f"http://{triton.http_address}",), grpc_upstream=(triton.grpc_address,), port=0, grpc_port=port,
        keys=keys, timeout_s=120,
    )  # fmt: skip
    go = Path(triton.repository).parent / "go"
    before = triton.pid
    with gateway_thread(settings):
        address = f"127.0.0.1:{port}"

        def until(wanted: bool) -> None:
            ends = time.monotonic() + TIMEOUT_S
            while ("were left before their end" in str(asked(address, "many", key=leaving))) is not wanted:
                assert time.monotonic() < ends
                time.sleep(0.2)

        with grpc.insecure_channel(address) as channel:
            streams = [stream(channel, "held", key=leaving) for _ in range(MOST_LEFT)]
            for answers in streams:
                next(answers)
            assert asked(address, "many", key=leaving) == 20
            for answers in streams:
                answers.cancel()
            until(True)
            assert asked(address, "many", key=other) == 20
            go.touch()
            until(False)
    assert triton.running
    assert triton.pid == before
