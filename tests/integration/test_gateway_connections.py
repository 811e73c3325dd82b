"""The connections to a real Triton are shared: slow requests to some models keep nobody from another."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.gateway.access.keys import add_key
from serve.gateway.settings import Settings
from serve.triton.launch import Ports, TritonServer
from tests.serve_http import gateway_thread

SLOW = [f"slow{number}" for number in range(5)]
EACH = 24  # connections of the greedy key, on each of these
SLEEPS_S = 1.5
CONFIG = """\
name: "%s"
backend: "python"
max_batch_size: 8
input [ { name: "seconds" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "slept" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
MODEL = """\
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        asked = [pb_utils.get_input_tensor_by_name(request, "seconds").as_numpy() for request in requests]
        time.sleep(max(float(each.max()) for each in asked))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("slept", each)]) for each in asked]
"""


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("connections")
    for name in [*SLOW, "quick"]:
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(MODEL)
        (repository / name / "config.pbtxt").write_text(CONFIG % name)
    with TritonServer(repository, ports=Ports(0, 0, 0)) as server:
        yield server


def infer(host: str, key: str, model: str, seconds: float) -> tuple[int, str]:
    client = http.client.HTTPConnection(host, timeout=60)
    body = {"inputs": [{"name": "seconds", "datatype": "FP32", "shape": [1, 1], "data": [seconds]}]}
    client.request("POST", f"/v2/models/{model}/infer", json.dumps(body), {"x-api-key": key})
    answer = client.getresponse()
    told = answer.status, answer.read().decode()
    client.close()
    return told


def test_a_key_with_slow_requests_to_five_models_keeps_nobody_from_a_sixth(
    triton: TritonServer, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    greedy, other = add_key(keys, "greedy")[0], add_key(keys, "other")[0]
    settings = Settings(upstream=(f"http://{triton.http_address}",), port=0, keys=keys, max_connections=48)
    outcomes: Counter[int] = Counter()
    told: set[str] = set()
    ends = threading.Event()

    with gateway_thread(settings) as url:
        host = url.removeprefix("http://")
        for model in [*SLOW, "quick"]:
            assert infer(host, other, model, 0.0)[0] == 200

        def ask(model: str) -> None:
            while not ends.is_set():
                status, text = infer(host, greedy, model, SLEEPS_S)
                outcomes[status] += 1
                if status == 429:
                    told.add(json.loads(text)["error"])
                ends.wait(0.2)

        threads = [threading.Thread(target=ask, args=(model,)) for model in SLOW for _ in range(EACH)]
        for thread in threads:
            thread.start()
        time.sleep(2 * SLEEPS_S)
        took = []
        for _ in range(20):
            since = time.monotonic()
            assert infer(host, other, "quick", 0.0)[0] == 200
            took.append(time.monotonic() - since)
            time.sleep(0.1)
        ends.set()
        for thread in threads:
            thread.join()
    assert max(took) < SLEEPS_S / 2
    assert outcomes[200] > 0
    assert told == {"too many requests of this key are with the model server"}
