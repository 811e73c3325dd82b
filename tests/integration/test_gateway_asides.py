"""Clients that do not wait, where a request can't keep its place: in sequences, under release."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from serve.gateway.access.asides import JUDGED
from serve.gateway.access.keys import add_key
from serve.gateway.settings import ModelSettings, Settings
from serve.rollout.plan import Plan, Target
from serve.rollout.store import Store
from serve.triton.launch import Ports, TritonServer
from tests.integration.test_gateway_grpc import free_port
from tests.integration.test_gateway_left import counted, pending
from tests.integration.test_gateway_sequences import until
from tests.serve_http import gateway_thread

pytestmark = pytest.mark.integration
PLACES = 4
SLEEPS_S = 1.0
MODEL = """\
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        # An empty slot of the sequence batcher has a row, too: of what its memory held before.
        time.sleep(max((seconds for x in given if (seconds := float(x.max())) in (0.0, 1.0)), default=0.0))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]) for x in given]
"""
CONFIG = """\
name: "NAME"
backend: "python"
max_batch_size: 2
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 600000000 }\n"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("asides")
    for name, more in (("slow", ""), ("other", ""), ("steps", SEQUENCES)):
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(CONFIG.replace("NAME", name) + more)
        (version / "model.py").write_text(MODEL)
    with TritonServer(repository, ports=Ports(0, 0, 0)) as server:
        yield server


def request(seconds: float, **parameters: object) -> bytes:
    item = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [seconds]}
    return json.dumps({"inputs": [item], "parameters": parameters}).encode()


@pytest.mark.parametrize(
    ("case", "way"),
    [("sequence", "http"), ("sequence", "grpc"), ("release", "http"), ("release", "grpc")],
)
def test_who_does_not_wait_fills_no_queue_where_its_requests_keep_no_place(
    triton: TritonServer, tmp_path: Path, case: str, way: str
) -> None:
    """Places of these are free again once the answer would have come, by the mean of answers before."""
    model = "steps" if case == "sequence" else "slow"
    keys = tmp_path / "keys.json"
    evil, good = add_key(keys, "evil")[0], add_key(keys, "good")[0]
    state = tmp_path / "rollouts.db"
    settings = Settings(
        upstream=(f"http://{triton.http_address}",), port=0, keys=keys, state=state,
        grpc_upstream=(triton.grpc_address,), grpc_port=(grpc_port := free_port()),
        models={name: ModelSettings(max_in_flight=PLACES) for name in (model, "other")},
    )  # fmt: skip

    def ask(key: str, seconds: float, patience_s: float = 60, **parameters: object) -> int:
        body = request(seconds, **parameters)
        with contextlib.closing(http.client.HTTPConnection(address, timeout=patience_s)) as connection:
            connection.request("POST", f"/v2/models/{model}/infer", body, {"x-api-key": key})
            return connection.getresponse().status

    def leave(number: int) -> None:
        own = {"sequence_id": 1 + number % 2} if case == "sequence" else {}
        if way == "grpc":
            item = triton_grpc.InferInput("x", [1, 1], "FP32")
            item.set_data_from_numpy(np.full((1, 1), SLEEPS_S, np.float32))
            with triton_grpc.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
                while time.monotonic() < end:
                    with contextlib.suppress(InferenceServerException):
                        client.infer(model, [item], client_timeout=0.03, headers={"x-api-key": evil}, **own)
            return
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                ask(evil, SLEEPS_S, 0.03, **own)

    with gateway_thread(settings) as url:
        address = url.removeprefix("http://")
        if case == "release":
            store = Store(state)
            store.start("slow", Target("other"), Plan(steps=(50.0,), step_s=3600.0), Target("slow"))
            until(lambda: store.all("slow")[0].state == "running")
            time.sleep(0.6)  # a gateway looks twice a second
        for number in range(30):  # which tell it that answers take milliseconds
            whole = {"sequence_id": 100 + number, "sequence_start": True, "sequence_end": True}
            assert ask(good, 0.0, **(whole if case == "sequence" else {})) == 200
        if case == "sequence":
            assert ask(evil, 0.0, sequence_id=1, sequence_start=True) == 200
            assert ask(evil, 0.0, sequence_id=2, sequence_start=True) == 200
        before = counted(triton, "nv_inference_request_success", model)
        end = time.monotonic() + 5
        threads = [threading.Thread(target=leave, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        most = most_of_candidate = 0
        while time.monotonic() < end:
            most, most_of_candidate = (
                max(most, pending(triton, model)),
                max(most_of_candidate, pending(triton, "other")),
            )
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        assert counted(triton, "nv_inference_request_success", model) > before  # they did reach the model
        # Half of its places, and as many as come at once.
        assert most <= PLACES // 2 + PLACES
        assert most_of_candidate <= JUDGED + PLACES
        started = time.monotonic()
        whole = {"sequence_id": 200, "sequence_start": True, "sequence_end": True}
        while ask(good, 0.0, **(whole if case == "sequence" else {})) != 200:
            assert time.monotonic() - started < 100
        # Over, or ended by then: another test's gateway knows nothing of them, and Triton keeps their slots.
        for number in (1, 2) if case == "sequence" else ():
            until(partial(is_over, partial(ask, evil, 0.0, sequence_id=number, sequence_end=True)))


def is_over(end: Callable[[], int]) -> bool:
    """Whether a sequence has ended; 503 while its key may ask nothing."""
    return end() != 503
