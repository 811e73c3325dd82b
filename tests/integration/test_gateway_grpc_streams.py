"""Streams over gRPC whose answers are long: how much of them the gateway and its Triton may be made to hold."""

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

from serve.gateway.access.footprint import KEPT_BYTES, MIB, footprint_bytes
from serve.gateway.access.keys import add_key
from serve.triton.launch import TritonServer
from tests.gateway_models import served_models
from tests.integration.test_gateway_memory import BODY, BOUND, ECHO_CONFIG, ECHO_MODEL, LONG, Gateway, gateway

pytestmark = pytest.mark.integration
ANSWER, LONG_TEXT, TIMEOUT_S = 6 * MIB, 4_000_000, 60
PIECES_MODEL = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            size = int(pb_utils.get_input_tensor_by_name(request, "size").as_numpy()[0])
            for _ in range(4):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("zeros", np.zeros(size, np.uint8))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DECOUPLED = "model_transaction_policy { decoupled: True }\n"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Models: "echo" gives one answer of the size that is asked for, "pieces", which is decoupled, four."""
    folder = tmp_path_factory.mktemp("streams")
    for name, config, model in (("echo", "", ECHO_MODEL), ("pieces", DECOUPLED, PIECES_MODEL)):
        version = folder / "repository" / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(ECHO_CONFIG.replace("echo", name) + config)
        (version / "model.py").write_text(model)
    with served_models(folder) as server:
        yield server


def wanted(size: int, model: str = "echo") -> Any:
    message = messages.ModelInferRequest(model_name=model, raw_input_contents=[struct.pack("<q", size)])
    message.inputs.add(name="size", datatype="INT64", shape=[1])
    return message


def short() -> Any:
    message = messages.ModelInferRequest(model_name="tiny", raw_input_contents=[struct.pack("<4f", 1, 2, 3, 4)])
    message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    return message


class Unread:
    """Streams of one key that ask much and read nothing, each over a connection of its own."""

    def __init__(self, served: Gateway, key: str, streams: int, asked: list[Any]) -> None:
        self._over = threading.Event()
        self._asked = asked
        own = [*LONG, ("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
        self._channels = [grpc.insecure_channel(served.grpc_address, own) for _ in range(streams)]
        stubs = map(service_pb2_grpc.GRPCInferenceServiceStub, self._channels)
        self.calls = [stub.ModelStreamInfer(self._messages(), metadata=[("x-api-key", key)]) for stub in stubs]

    def _messages(self) -> Iterator[Any]:
        yield from self._asked
        self._over.wait(TIMEOUT_S)

    def leave(self) -> None:
        self._over.set()
        for channel in self._channels:
            channel.close()


def until_free(served: Gateway, key: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while served.metric("gateway_memory_bytes", key) > MIB:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def keyed(tmp_path: Path) -> tuple[Path, str, str]:
    path = tmp_path / "keys.json"
    return path, add_key(path, "alice")[0], add_key(path, "bob", admin=True)[0]


def test_triton_is_asked_for_few_answers_that_nobody_reads(triton: TritonServer, keyed: tuple[Path, str, str]) -> None:
    path, alice, bob = keyed
    with gateway(triton, keys=path) as served, grpc.insecure_channel(served.grpc_address, LONG) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def answered() -> int:
            asked = messages.ModelStatisticsRequest(name="echo")
            count: int = stub.ModelStatistics(asked, metadata=[("x-api-key", bob)]).model_stats[0].inference_count
            return count

        before = answered()
        unread = Unread(served, alice, 1, [wanted(ANSWER // 2)] * 60)
        time.sleep(3)  # for all of them, if they were asked
        found = answered() - before
        unread.leave()
        assert 0 < found < 15, found
        until_free(served, bob)


@pytest.mark.parametrize("model", ["echo", "pieces"])
def test_answers_of_streams_are_counted_as_they_come_and_when_nobody_waits_for_them(
    triton: TritonServer, keyed: tuple[Path, str, str], model: str
) -> None:
    path, alice, bob = keyed
    others = []
    with gateway(triton, keys=path) as served, grpc.insecure_channel(served.grpc_address, LONG) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        streams = Unread(served, alice, 40, [wanted(ANSWER, model)] * 2)
        for _ in range(20):
            others.append(stub.ModelInfer(short(), metadata=[("x-api-key", bob)], timeout=TIMEOUT_S).model_name)
            time.sleep(0.1)
        streams.leave()
        until_free(served, bob)
        assert set(others) == {"tiny"}
        assert served.peak() < footprint_bytes(BOUND, BODY)
        answer = stub.ModelInfer(wanted(MIB), metadata=[("x-api-key", alice)], timeout=TIMEOUT_S)
        assert len(answer.raw_output_contents[0]) == MIB
    assert triton.running


def test_a_stream_gets_all_its_long_answers(triton: TritonServer) -> None:
    sizes = [MIB + number for number in range(30)]
    with gateway(triton) as served, grpc.insecure_channel(served.grpc_address, LONG) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def lengths(asked: list[Any]) -> list[int]:
            found = stub.ModelStreamInfer(iter(asked), timeout=TIMEOUT_S)
            return [len(answer.infer_response.raw_output_contents[0]) for answer in found]

        assert lengths([wanted(size) for size in sizes]) == sizes
        pieces = lengths([wanted(size, "pieces") for size in sizes[:5]])  # Triton sends those of several as they come
        assert sorted(pieces) == sorted(sizes[:5] * 4)
        mixed = lengths([short(), wanted(MIB), short(), wanted(2 * MIB)])
        assert sorted(mixed)[2:] == [MIB, 2 * MIB]
        until_free(served, "")


def test_a_stream_that_began_with_short_answers_counts_for_the_longest(
    triton: TritonServer, keyed: tuple[Path, str, str]
) -> None:
    """Ten that have no connection of their own: a key's half of the bound has room for two of the longest."""
    path, alice, bob = keyed
    with gateway(triton, keys=path) as served:
        streams = Unread(served, alice, 10, [short(), wanted(ANSWER)])
        deadline = time.monotonic() + TIMEOUT_S
        while served.metric("gateway_memory_refused_total", bob) < 8:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        streams.leave()
        until_free(served, bob)
        assert served.peak() < footprint_bytes(BOUND, BODY)


def test_streams_of_many_connections_hold_what_is_counted_and_give_it_back(
    triton: TritonServer, tmp_path: Path
) -> None:
    """Two keys without rights, each with fifty connections that send long messages to a model and read nothing."""
    path = tmp_path / "keys.json"
    alice, bob, carol = (add_key(path, name, admin=name == "carol")[0] for name in ("alice", "bob", "carol"))
    text = struct.pack("<I", LONG_TEXT) + bytes(LONG_TEXT)
    long = messages.ModelInferRequest(model_name="files", raw_input_contents=[text])
    long.inputs.add(name="file", datatype="BYTES", shape=[1, 1])
    with (
        gateway(triton, keys=path, max_address_share=1.0) as served,
        grpc.insecure_channel(served.grpc_address, LONG) as channel,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        idle = served.resident()
        attackers = [Unread(served, key, 50, [long] * 8) for key in (alice, bob)]
        for _ in range(30):
            assert stub.ModelInfer(short(), metadata=[("x-api-key", carol)], timeout=TIMEOUT_S).model_name == "tiny"
            time.sleep(0.1)
        for each in attackers:
            each.leave()
        assert served.peak() < footprint_bytes(BOUND, BODY)
        until_free(served, carol)
        deadline = time.monotonic() + TIMEOUT_S
        while served.resident() > idle + KEPT_BYTES:
            assert time.monotonic() < deadline, (served.resident() // MIB, idle // MIB)
            time.sleep(0.5)
