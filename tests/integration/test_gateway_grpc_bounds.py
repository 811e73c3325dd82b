"""What a client can make a gateway and its Triton hold by calls over gRPC that it never ends, or never reads."""

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

from serve.gateway.access.footprint import MIB
from serve.gateway.access.keys import add_key
from serve.triton.launch import TritonServer
from tests.gateway_models import served_models
from tests.integration.test_gateway_memory import BODY, gateway

pytestmark = pytest.mark.integration
SERVICE = "/inference.GRPCInferenceService/"
TIMEOUT_S = 120
MANY_CONFIG = """\
name: "many"
backend: "python"
max_batch_size: 0
input [ { name: "count" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "number" data_type: TYPE_INT64 dims: [ 1 ] } ]
model_transaction_policy { decoupled: True }
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
MANY_MODEL = """\
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


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("bounds")
    version = folder / "repository" / "many" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(MANY_CONFIG)
    (version / "model.py").write_text(MANY_MODEL)
    with served_models(folder) as server:
        yield server


def file_of(content: bytes) -> Any:
    return messages.ModelInferRequest(
        model_name="files", inputs=[{"name": "file", "datatype": "BYTES", "shape": (1, 1)}],
        raw_input_contents=[struct.pack("<I", len(content)) + content],
    )  # fmt: skip


def many(count: int, **parameters: bool) -> Any:
    return messages.ModelInferRequest(
        model_name="many", inputs=[{"name": "count", "datatype": "INT64", "shape": (1,)}],
        raw_input_contents=[struct.pack("<q", count)],
        parameters={name: {"bool_param": value} for name, value in parameters.items()},
    )  # fmt: skip


@contextlib.contextmanager
def silence() -> Iterator[Iterator[bytes]]:
    """The messages of a call that sends none and does not end."""
    end = threading.Event()

    def nothing() -> Iterator[bytes]:
        end.wait()
        yield from ()

    try:
        yield nothing()
    finally:
        end.set()


def test_what_needs_no_key_needs_no_message(triton: TritonServer) -> None:
    with gateway(triton) as served, grpc.insecure_channel(served.grpc_address) as channel:
        for name in ("ServerLive", "ServerReady"):
            with silence() as nothing:  # each call has its own: two threads can't wait in one generator
                assert channel.stream_unary(SERVICE + name)(nothing, timeout=TIMEOUT_S) == b"\x08\x01"


def test_the_message_of_what_needs_no_key_is_not_read(triton: TritonServer) -> None:
    with gateway(triton) as served, socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        host, _, port = served.grpc_address.rpartition(":")

        def pass_on(source: socket.socket, target: socket.socket, most: int) -> None:
            with contextlib.suppress(OSError):
                while most > 0 and (data := source.recv(min(most, 65536))):
                    target.sendall(data)
                    most -= len(data)

        def accept() -> None:
            client, _ = listener.accept()
            server = socket.create_connection((host, int(port)))
            stack.callback(client.close)
            stack.callback(server.close)
            threading.Thread(target=pass_on, args=(client, server, MIB), daemon=True).start()
            threading.Thread(target=pass_on, args=(server, client, 1 << 40), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with grpc.insecure_channel(address) as channel:  # most of the message never comes
            live = channel.unary_unary(f"{SERVICE}ServerLive")(bytes(BODY - 4096), timeout=TIMEOUT_S)
        assert live == b"\x08\x01"


def test_a_call_whose_message_does_not_come_has_a_time(triton: TritonServer) -> None:
    with gateway(triton, body_timeout_s=2) as served, grpc.insecure_channel(served.grpc_address) as channel:
        for name in ("ModelInfer", "ModelMetadata"):
            with silence() as nothing, pytest.raises(grpc.RpcError) as told:
                channel.stream_unary(SERVICE + name)(nothing, timeout=TIMEOUT_S)
            assert "did not come in time" in told.value.details()
        deadline = time.monotonic() + 30
        while served.metric("gateway_memory_bytes") > MIB:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ModelMetadata(messages.ModelMetadataRequest(name="files")).name == "files"
        with pytest.raises(grpc.RpcError) as told:
            stub.ModelMetadata(messages.ModelMetadataRequest(name="x" * 100_000))
        assert told.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_key_has_half_of_the_memory_over_grpc_too(triton: TritonServer, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = {name: (("x-api-key", add_key(path, name, admin=name == "root")[0]),) for name in ("a", "b", "root")}
    message = file_of(b"sleep" + bytes(BODY - 8192))
    outcomes: Counter[Any] = Counter()
    with gateway(triton, keys=path) as served, contextlib.ExitStack() as stack:
        a, b = (
            service_pb2_grpc.GRPCInferenceServiceStub(
                stack.enter_context(
                    grpc.insecure_channel(served.grpc_address, (("grpc.use_local_subchannel_pool", 1),))
                )
            )
            for _ in range(2)
        )
        calls = [a.ModelInfer.future(message, metadata=keys["a"], timeout=TIMEOUT_S) for _ in range(4)]
        deadline = time.monotonic() + TIMEOUT_S
        while not any(call.done() for call in calls):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        answer = b.ModelInfer(message, metadata=keys["b"], timeout=TIMEOUT_S)
        assert answer.model_name == "files"
        for call in calls:
            outcomes[call.code()] += 1
        # What comes faster than it is read is more than half in gRPC's library already: then its connection ends.
        refused = outcomes[grpc.StatusCode.RESOURCE_EXHAUSTED] + outcomes[grpc.StatusCode.UNAVAILABLE]
        assert refused >= 2, outcomes


def test_a_stream_is_read_no_further_than_triton_answers(triton: TritonServer) -> None:
    sent = 0

    def slow() -> Iterator[Any]:
        nonlocal sent
        for _ in range(60):
            sent += 1
            yield file_of(b"sleep" + bytes(MIB))

    with gateway(triton) as served, grpc.insecure_channel(served.grpc_address) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(slow(), timeout=TIMEOUT_S)
        assert not next(call).error_message
        time.sleep(4)  # for all of them, if they were read; Triton takes 2 s for one
        assert sent < 30
        call.cancel()
        deadline = time.monotonic() + 30
        while served.metric("gateway_memory_bytes") > MIB:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_stream_goes_on_whatever_number_of_answers_its_messages_have(triton: TritonServer) -> None:
    counts = [0] * 600 + [3] + [1] * 600
    with gateway(triton) as served, grpc.insecure_channel(served.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = list(stub.ModelStreamInfer(map(many, counts), timeout=TIMEOUT_S))
        assert len(answers) == 603
        assert {answer.error_message for answer in answers} == {""}
        assert {tuple(answer.infer_response.parameters) for answer in answers} == {()}
        asked = [many(count, triton_enable_empty_final_response=True) for count in (0, 2)]
        finals = [
            (len(answer.infer_response.outputs), answer.infer_response.parameters["triton_final_response"].bool_param)
            for answer in stub.ModelStreamInfer(iter(asked), timeout=TIMEOUT_S)
        ]
        assert finals == [(0, True), (1, False), (1, False), (0, True)]
        files = [file_of(b"abcd")] * 600
        assert len(list(stub.ModelStreamInfer(iter(files), timeout=TIMEOUT_S))) == 600
