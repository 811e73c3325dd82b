"""Decoupled models over gRPC, which compute ahead: how many messages of a key Triton computes whose answers nobody reads."""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.access.footprint import MIB
from serve.triton.launch import TritonServer
from tests.gateway_models import served_models
from tests.integration.test_gateway_grpc_streams import DECOUPLED, TIMEOUT_S, Unread, keyed, until_free
from tests.integration.test_gateway_memory import ECHO_CONFIG, LONG, gateway

__all__ = ["keyed"]

pytestmark = pytest.mark.integration
PIECE, ROOM = 256 * 1024, 64 * MIB
MANY_MODEL = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "size").as_numpy()[0])
            for _ in range(count):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("zeros", np.zeros(262144, np.uint8))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """The model "many" gives as many answers of 256 KiB as it is asked for."""
    folder = tmp_path_factory.mktemp("decoupled")
    version = folder / "repository" / "many" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(ECHO_CONFIG.replace("echo", "many") + DECOUPLED)
    (version / "model.py").write_text(MANY_MODEL)
    with served_models(folder) as server:
        yield server


def pieces(count: int, name: str = "") -> Any:
    message = messages.ModelInferRequest(model_name="many", id=name, raw_input_contents=[struct.pack("<q", count)])
    message.inputs.add(name="size", datatype="INT64", shape=[1])
    return message


def computed(triton: TritonServer) -> Callable[[], int]:
    """Counts the messages that Triton has computed since, whether their answers are read or not."""

    def count() -> int:
        with grpc.insecure_channel(triton.grpc_address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            asked = messages.ModelStatisticsRequest(name="many")
            found: int = stub.ModelStatistics(asked).model_stats[0].execution_count
        return found

    before = count()
    return lambda: count() - before


def resident(triton: TritonServer) -> int:
    """Bytes that the server has of its own, without what it shares with its models' processes."""
    (line,) = (each for each in Path(f"/proc/{triton.pid}/status").read_text().splitlines() if "RssAnon" in each)
    return int(line.split()[1]) * 1024


def settled(count: Callable[[], int]) -> int:
    """What it comes to once it has stood still for two seconds, but is not 0."""
    deadline, found, since = time.monotonic() + TIMEOUT_S, 0, time.monotonic()
    while not found or time.monotonic() - since < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        if (now := count()) != found:
            found, since = now, time.monotonic()
    return found


@pytest.mark.parametrize("known", [0, 1, 150])
def test_messages_that_come_to_the_whole_room_are_computed_one_at_a_time(
    triton: TritonServer, keyed: tuple[Path, str, str], known: int
) -> None:
    path, alice, bob = keyed
    with gateway(triton, keys=path, memory_bytes=ROOM) as served:
        if known:
            with grpc.insecure_channel(served.grpc_address, LONG) as channel:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                read = stub.ModelStreamInfer(iter([pieces(known)]), metadata=[("x-api-key", alice)])
                assert sum(len(each.infer_response.raw_output_contents) for each in read) == known
        count, before = computed(triton), resident(triton)
        unread = Unread(served, alice, 4, [pieces(150)] * 4)
        found, grown = settled(count), resident(triton) - before
        print(f"known {known}: {found} messages computed, {grown / MIB:.0f} MiB, {grown / (150 * PIECE * found):.2f} of their bytes")
        unread.leave()
        until_free(served, bob)
        assert found <= (2 if known == 1 else 1), f"{found} computed, {grown / MIB:.0f} MiB"
    assert triton.running


def test_streams_that_were_left_count_until_triton_is_through(triton: TritonServer, keyed: tuple[Path, str, str]) -> None:
    path, alice, bob = keyed
    with gateway(triton, keys=path, memory_bytes=ROOM) as served:
        count = computed(triton)
        most = before = resident(triton)
        for _ in range(6):
            unread = Unread(served, alice, 2, [pieces(150)] * 2)
            until = count() + 1
            deadline = time.monotonic() + TIMEOUT_S
            while count() < until:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            most = max(most, resident(triton))
            unread.leave()
        print(f"left: {count()} computed, {(most - before) / MIB:.0f} MiB")
        until_free(served, bob)
    assert triton.running


def test_who_reads_gets_all_answers_and_several_messages_at_a_time(
    triton: TritonServer, keyed: tuple[Path, str, str]
) -> None:
    path, alice, _ = keyed
    answers: Counter[str] = Counter()
    with (
        gateway(triton, keys=path, memory_bytes=ROOM) as served,
        grpc.insecure_channel(served.grpc_address, LONG) as channel,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        sent = [pieces(1 + number % 5, str(number)) for number in range(40)]
        for each in stub.ModelStreamInfer(iter(sent), metadata=[("x-api-key", alice)], timeout=TIMEOUT_S):
            assert not each.error_message
            answers[each.infer_response.id] += 1
        assert answers == {str(number): 1 + number % 5 for number in range(40)}
