"""Each message of a stream takes one of its model's places, in front of a real Triton."""

from __future__ import annotations

import re
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.access.keys import add_key
from serve.gateway.settings import ModelSettings, Settings
from serve.triton.launch import Ports, TritonServer
from tests.integration.test_gateway_grpc import free_port
from tests.integration.test_gateway_left import pending
from tests.integration.test_gateway_mixed_streams import CONFIG, DECOUPLED, HELD, PYTHON
from tests.integration.test_gateway_sequences import message as of_sequence
from tests.sequence_models import remembering
from tests.serve_http import gateway_thread

pytestmark = pytest.mark.integration
PLACES, TIMEOUT_S = 4, 120
SLEEPS = """\
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "count").as_numpy()) for request in requests]

    def answer(self, count):
        time.sleep(int(count[0]) // 1000 / 1000)
        return pb_utils.InferenceResponse([pb_utils.Tensor("number", count)])
"""


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Models: "slow" takes as many milliseconds as it is asked thousands; "held" goes on until there is a file "go"."""
    folder = tmp_path_factory.mktemp("places") / "models"
    kinds = {"slow": ("", SLEEPS), "held": (DECOUPLED, HELD.replace("GO", str(folder.parent / "go")))}
    for name, (more, code) in kinds.items():
        version = folder / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(code)
        (version.parent / "config.pbtxt").write_text(CONFIG.replace("NAME", name) + PYTHON + more)
    with TritonServer(folder, ports=Ports(0, 0, 0)) as server:
        yield server


@dataclass
class Served:
    """A gateway, with the keys of three clients."""

    url: str
    channel: grpc.Channel
    flooding: str
    other: str
    admin: str

    def ask(self, number: int, key: str) -> Any:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        return stub.ModelInfer(asked("slow", number), timeout=TIMEOUT_S, metadata=[("x-api-key", key)])

    def stream(self, requests: Iterator[Any], key: str) -> Any:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        return stub.ModelStreamInfer(requests, timeout=TIMEOUT_S, metadata=[("x-api-key", key)])

    def in_flight(self, model: str) -> int:
        request = urllib.request.Request(f"{self.url}/metrics", headers={"x-api-key": self.admin})
        with urllib.request.urlopen(request, timeout=10) as response:
            text = response.read().decode()
        found = re.search(rf'^gateway_model_in_flight{{model="{model}"}} (\S+)$', text, re.MULTILINE)
        return 0 if found is None else int(float(found[1]))


@contextmanager
def served(triton: TritonServer, folder: Path, places: int = PLACES, timeout_s: float = 30.0) -> Iterator[Served]:
    keys, port = folder / "keys.json", free_port()
    flooding, other = (add_key(keys, name)[0] for name in ("flooding", "other"))
    admin = add_key(keys, "admin", admin=True)[0]
    settings = Settings(
        upstream=(f"http://{triton.http_address}",), grpc_upstream=(triton.grpc_address,), port=0, grpc_port=port,
        timeout_s=timeout_s, keys=keys, models={name: ModelSettings(max_in_flight=places) for name in ("slow", "held", "counts")},
    )  # fmt: skip
    with gateway_thread(settings) as url, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Served(url, channel, flooding, other, admin)


def asked(model: str, number: int) -> Any:
    request = messages.ModelInferRequest(model_name=model, raw_input_contents=[struct.pack("<q", number)])
    request.inputs.add(name="count", datatype="INT64", shape=[1])
    return request


def number_of(answer: Any) -> int:
    number: int = struct.unpack("<q", answer.raw_output_contents[0])[0]
    return number


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_flood_of_streams_holds_no_more_than_the_models_places_and_keeps_nobody_out(
    triton: TritonServer, tmp_path: Path
) -> None:
    streams, each, of_model = 4, 100, 30_000
    found: list[list[int]] = [[] for _ in range(streams)]
    with served(triton, tmp_path) as there:

        def flood(which: int) -> None:
            requests = (asked("slow", of_model + number) for number in range(each))
            for answer in there.stream(requests, there.flooding):
                found[which].append(number_of(answer.infer_response))

        threads = [threading.Thread(target=flood, args=(which,)) for which in range(streams)]
        for thread in threads:
            thread.start()
        most, others = 0, 0
        while any(thread.is_alive() for thread in threads):
            most = max(most, pending(triton, "slow"))
            assert number_of(there.ask(others, there.other)) == others
            others += 1
        assert 0 < most <= PLACES
        assert others > 10
        assert found == [[of_model + number for number in range(each)]] * streams
        assert there.in_flight("slow") == 0


def test_a_model_that_is_slower_than_others_may_wait_answers_them_beside_streams(
    triton: TritonServer, tmp_path: Path
) -> None:
    over = threading.Event()

    def endless() -> Iterator[Any]:
        while not over.is_set():
            yield asked("slow", 1_000_000)

    with served(triton, tmp_path) as there:
        streams = [there.stream(endless(), there.flooding) for _ in range(3)]
        for answers in streams:
            next(answers)
        for number in range(3):
            assert number_of(there.ask(number, there.other)) == number
            assert pending(triton, "slow") <= PLACES
        until(lambda: pending(triton, "slow") > 0)  # the other's requests have kept them back, for up to a second
        over.set()
        for answers in streams:
            answers.cancel()
        time.sleep(0.1)
        counted, asked_of_triton = there.in_flight("slow"), pending(triton, "slow")
        while asked_of_triton:  # it still has some, which nobody hears of
            assert asked_of_triton <= counted
            time.sleep(0.3)
            counted, asked_of_triton = there.in_flight("slow"), pending(triton, "slow")
        until(lambda: there.in_flight("slow") == 0)
        assert number_of(there.ask(7, there.flooding)) == 7


def test_a_request_with_many_answers_has_its_place_until_the_last(triton: TritonServer, tmp_path: Path) -> None:
    with served(triton, tmp_path) as there:
        answers = there.stream(iter([asked("held", 1)]), there.flooding)
        next(answers)
        assert there.in_flight("held") == 1
        (Path(triton.repository).parent / "go").touch()
        assert list(answers) == []
        until(lambda: there.in_flight("held") == 0)


def test_messages_that_wait_for_a_slot_keep_no_place_from_those_that_free_it(tmp_path: Path) -> None:
    """Two places and four slots: three sequences are begun while all slots are held, then others are ended.

    Triton answers a stream's messages in their order, so what ends a sequence keeps its place until that is given up.
    """
    with remembering(tmp_path / "models") as triton, served(triton, tmp_path, places=2, timeout_s=5.0) as there:
        begun = [of_sequence("counts", 1, sequence_id=each, sequence_start=True) for each in range(1, 8)]
        ended = [of_sequence("counts", 1, sequence_id=each, sequence_end=True) for each in range(1, 8)]
        answers = list(there.stream(iter([*begun, *ended]), there.flooding))
        assert [answer.error_message for answer in answers] == [""] * 14
        assert [number_of(answer.infer_response) for answer in answers] == [1] * 7 + [2] * 7
