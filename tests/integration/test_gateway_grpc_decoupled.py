"""Decoupled models over gRPC, which compute ahead: how many messages of a key Triton computes whose answers nobody reads."""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
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
import pathlib
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            slow = SLOW and pathlib.Path(LOG).open("a")
            if slow:
                slow.write("[")
                slow.flush()
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "size").as_numpy()[0])
            for _ in range(count):
                time.sleep(0.1 if slow else 0)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("zeros", np.zeros(262144, np.uint8))]))
            if slow:
                slow.write("]")
                slow.close()
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


SEQUENCES = """\
sequence_batching {
  max_sequence_idle_microseconds: 600000000
  control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] } ]
}
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What "slow" writes: "[" at a beginning, "]" at an end."""
    path = tmp_path_factory.mktemp("log") / "log.txt"
    path.touch()
    return path


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory, log: Path) -> Iterator[TritonServer]:
    """The models "many" and "slow" give as many answers of 256 KiB as they are asked for; two of the latter at a time,
    which take their time and write when they begin and end. "turns" is as "many", and batches sequences, four at a time."""
    folder = tmp_path_factory.mktemp("decoupled")
    for name in ("many", "slow", "turns"):
        version = folder / "repository" / name / "1"
        version.mkdir(parents=True)
        config = ECHO_CONFIG.replace("echo", name) + DECOUPLED + (SEQUENCES if name == "turns" else "")
        count = {"many": 1, "slow": 2, "turns": 4}[name]
        (version.parent / "config.pbtxt").write_text(config.replace("count: 1", f"count: {count}"))
        named = f"SLOW, LOG = {name == 'slow'}, {str(log)!r}\n"
        (version / "model.py").write_text(named + MANY_MODEL)
    with served_models(folder) as server:
        yield server


def pieces(count: int, model: str = "many", name: str = "") -> Any:
    message = messages.ModelInferRequest(model_name=model, id=name, raw_input_contents=[struct.pack("<q", count)])
    message.inputs.add(name="size", datatype="INT64", shape=[1])
    return message


def computed(triton: TritonServer, model: str = "many") -> Callable[[], int]:
    """Counts the messages that Triton has computed since, whether their answers are read or not."""

    def count() -> int:
        with grpc.insecure_channel(triton.grpc_address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            asked = messages.ModelStatisticsRequest(name=model)
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


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("known", "sequences"), [(0, 0), (1, 0), (1, 4), (150, 0)])
def test_messages_that_come_to_the_whole_room_are_computed_one_at_a_time(
    triton: TritonServer, keyed: tuple[Path, str, str], known: int, sequences: int
) -> None:
    """To name a sequence changes nothing: the model batches none."""
    path, alice, bob = keyed
    with gateway(triton, keys=path, memory_bytes=ROOM) as served:
        if known:
            with grpc.insecure_channel(served.grpc_address, LONG) as channel:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                read = stub.ModelStreamInfer(iter([pieces(known)]), metadata=[("x-api-key", alice)])
                assert sum(len(each.infer_response.raw_output_contents) for each in read) == known
        count, before = computed(triton), resident(triton)
        asked = [pieces(150) for _ in range(4)]
        for number in range(sequences):
            asked[number].parameters["sequence_id"].int64_param = number + 1
            asked[number].parameters["sequence_start"].bool_param = True
        unread = Unread(served, alice, 4, asked)
        found, grown = settled(count), resident(triton) - before
        unread.leave()
        until_free(served, bob)
        assert found <= (2 if known == 1 else 1), f"{found} computed, {grown / MIB:.0f} MiB"
        assert grown < 2 * found * 150 * PIECE
        assert count() == found, "what waited did not go once its client had left"
    assert triton.running


def of_sequence(number: int, count: int, *, start: bool = False, end: bool = False) -> Any:
    message = pieces(count, "turns")
    message.parameters["sequence_id"].int64_param = number
    message.parameters["sequence_start"].bool_param = start
    message.parameters["sequence_end"].bool_param = end
    return message


def test_messages_to_a_model_that_batches_sequences_are_computed_one_at_a_time_too(
    triton: TritonServer, keyed: tuple[Path, str, str]
) -> None:
    path, alice, bob = keyed
    with gateway(triton, keys=path, memory_bytes=ROOM) as served:
        count, before = computed(triton, "turns"), resident(triton)
        asked = [of_sequence(number, 150, start=True, end=True) for number in range(1, 5)]
        streams = [Unread(served, alice, 1, [each]) for each in asked]
        found, grown = settled(count), resident(triton) - before
        for each in streams:
            each.leave()
        until_free(served, bob)
        assert found <= 1, f"{found} computed, {grown / MIB:.0f} MiB"
    assert triton.running


def test_what_waits_for_a_slot_counts_for_nothing_so_that_what_frees_it_can_go(
    triton: TritonServer, keyed: tuple[Path, str, str]
) -> None:
    path, alice, bob = keyed
    with (
        gateway(triton, keys=path, memory_bytes=ROOM, sequence_wait_s=1000.0) as served,
        grpc.insecure_channel(served.grpc_address, LONG) as channel,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def ask(key: str, asked: Any) -> Any:
            return stub.ModelStreamInfer(iter([asked]), metadata=[("x-api-key", key)], timeout=TIMEOUT_S)

        for number in range(1, 4):
            assert len(list(ask(bob, of_sequence(number, 1, start=True)))) == 1
        assert len(list(ask(alice, of_sequence(1, 1, start=True)))) == 1
        waiting = [ask(alice, of_sequence(number, 1, start=True, end=True)) for number in (2, 3, 4)]
        time.sleep(1)
        assert len(list(ask(alice, of_sequence(1, 1, end=True)))) == 1
        assert [len(list(each)) for each in waiting] == [1, 1, 1]
        for number in range(1, 4):
            assert len(list(ask(bob, of_sequence(number, 1, end=True)))) == 1


def test_a_message_counts_until_triton_is_through_with_it_though_its_stream_was_left(
    triton: TritonServer, keyed: tuple[Path, str, str], log: Path
) -> None:
    path, alice, bob = keyed
    before = log.read_text()

    def begun(number: int) -> bool:
        return log.read_text().removeprefix(before).count("[") >= number

    with gateway(triton, keys=path, memory_bytes=ROOM) as served:
        for number in range(1, 4):
            unread = Unread(served, alice, 2, [pieces(20, "slow")])
            until(partial(begun, number))
            unread.leave()
        until(lambda: log.read_text().endswith("]"))
        until_free(served, bob)
    assert triton.running
    told = log.read_text().removeprefix(before)
    assert told.startswith("[]" * 3), "one had begun before the one before it had ended"
    assert "[[" not in told


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
        sent = [pieces(1 + number % 5, name=str(number)) for number in range(40)]
        for each in stub.ModelStreamInfer(iter(sent), metadata=[("x-api-key", alice)], timeout=TIMEOUT_S):
            assert not each.error_message
            answers[each.infer_response.id] += 1
        assert answers == {str(number): 1 + number % 5 for number in range(40)}
