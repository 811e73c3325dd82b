"""A candidate on a real Triton that answers nothing: clients have the baseline's answers, and its release ends."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.access.keys import add_key
from serve.gateway.settings import Settings
from serve.rollout.plan import Plan, Target
from serve.rollout.store import Store
from serve.triton.launch import Ports, TritonServer
from tests.integration.test_gateway_connections import CONFIG, MODEL
from tests.integration.test_gateway_grpc import free_port
from tests.integration.test_gateway_overdue import ask, over_grpc
from tests.integration.test_gateway_sequences import until
from tests.serve_http import gateway_thread

KEYS, PAUSE_S, LONGEST_S, HURRY_S = 6, 0.1, 60.0, 0.8
HANGS = """execute(self, requests):
        import time
        time.sleep(3600.0)"""


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("hanging")
    hangs = MODEL.replace("execute(self, requests):", HANGS)
    for name, versions in {"old": [MODEL], "hangs": [hangs], "both": [hangs, MODEL]}.items():
        for version, code in enumerate(versions, 1):
            (repository / name / str(version)).mkdir(parents=True)
            (repository / name / str(version) / "model.py").write_text(code)
        (repository / name / "config.pbtxt").write_text(CONFIG % name + "version_policy { all {} }")
    with TritonServer(repository, ports=Ports(0, 0, 0)) as server:
        yield server
        server.stop(within_s=5)


@pytest.mark.parametrize(
    ("way", "baseline", "candidate", "copied"),
    [
        ("HTTP", Target("old"), Target("hangs"), 0.0),
        ("gRPC", Target("old"), Target("hangs"), 0.0),
        ("HTTP", Target("both", "2"), Target("both", "1"), 0.0),
        ("gRPC", Target("both", "2"), Target("both", "1"), 0.0),
        ("HTTP", Target("both", "2"), Target("both", "1"), 100.0),
    ],
)
def test_all_are_answered_until_it_is_taken_back(
    triton: TritonServer, tmp_path: Path, way: str, baseline: Target, candidate: Target, copied: float
) -> None:
    model = baseline.model
    keys, state, port = tmp_path / "keys.json", tmp_path / "state.db", free_port()
    names = [add_key(keys, f"k{number}")[0] for number in range(KEYS)]
    settings = Settings(
        upstream=(f"http://{triton.http_address}",), grpc_upstream=(triton.grpc_address,), port=0, grpc_port=port,
        keys=keys, state=state, timeout_s=8.0, max_address_share=1.0,
        max_in_flight=4,
    )  # fmt: skip
    statuses: Counter[int] = Counter()
    took: list[float] = []
    ends = threading.Event()

    with gateway_thread(settings) as url, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        address = url.removeprefix("http://")
        calls = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def client(key: str) -> None:
            with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
                while not ends.is_set():
                    begun = time.monotonic()
                    found = over_grpc(calls, key, model, 0.0) if way == "gRPC" else ask(connection, key, model, 0.0, {})
                    took.append(time.monotonic() - begun)
                    statuses[found] += 1
                    time.sleep(PAUSE_S)

        threads = [threading.Thread(target=client, args=(key,)) for key in names]
        for thread in threads:
            thread.start()
        time.sleep(2)
        store = Store(state)
        store.start(model, candidate, Plan(steps=(50.0,), shadow=copied, step_s=3600.0), baseline)
        begun = time.monotonic()
        until(lambda: not store.all(model)[0].active, within_s=LONGEST_S)
        seconds = time.monotonic() - begun
        ends.set()
        for thread in threads:
            thread.join()

    row = store.all(model)[0]
    assert (row.state, "requests fail" in row.why) == ("aborted", True), row.why
    # Of what was sent while it was asked: all are answered, and no request waits as long as any answer may take.
    assert statuses[200] > 0.9 * sum(statuses.values()), statuses
    assert sum(statuses.values()) > KEYS * seconds
    assert max(took) < settings.timeout_s / 2, max(took)


@pytest.mark.parametrize("way", ["HTTP", "gRPC"])
def test_clients_with_little_time_of_their_own_are_answered_too(triton: TritonServer, tmp_path: Path, way: str) -> None:
    keys, state, port = tmp_path / "keys.json", tmp_path / "state.db", free_port()
    names = [add_key(keys, f"k{number}")[0] for number in range(KEYS)]
    settings = Settings(
        upstream=(f"http://{triton.http_address}",), grpc_upstream=(triton.grpc_address,), port=0, grpc_port=port,
        keys=keys, state=state, max_address_share=1.0,
    )  # fmt: skip
    statuses: Counter[int] = Counter()
    ends = threading.Event()

    with gateway_thread(settings) as url, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        address = url.removeprefix("http://")
        calls = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def client(key: str) -> None:
            hurry = {"x-request-timeout-ms": str(round(1000 * HURRY_S))}
            with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
                while not ends.is_set():
                    if way == "gRPC":
                        statuses[over_grpc(calls, key, "old", 0.0, HURRY_S)] += 1
                    else:
                        statuses[ask(connection, key, "old", 0.0, hurry)] += 1
                    time.sleep(PAUSE_S)

        threads = [threading.Thread(target=client, args=(key,)) for key in names]
        for thread in threads:
            thread.start()
        time.sleep(2)
        statuses.clear()
        store = Store(state)
        store.start("old", Target("hangs"), Plan(steps=(50.0,), shadow=0.0, step_s=3600.0), Target("old"))
        time.sleep(10)
        ends.set()
        for thread in threads:
            thread.join()

    assert statuses[200] > 0.9 * sum(statuses.values()), statuses
    assert sum(statuses.values()) > KEYS * 10
