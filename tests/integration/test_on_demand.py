"""`serve up --memory` on a real Triton: models come when they are asked for, whoever asks and however."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from serve.gateway.access.keys import add_key
from serve.pack.write import PackOptions, pack
from serve.repository.signing import sign
from serve.rollout.plan import Plan, Target
from serve.rollout.store import Store
from serve.triton.control import control_call
from serve.triton.launch import Ports, TritonOptions, TritonServer
from tests.gateway_models import FILES_MODEL, fetch, write_files_model
from tests.hub_models import hub_artifact, sentence_folder
from tests.integration.test_gateway_grpc import free_port
from tests.integration.test_signed import OPENSSL
from tests.integration.test_up import FREE, Up, triton_of, up
from tests.serve_models import hook_file, tiny_artifact

pytestmark = pytest.mark.integration
ONE = PackOptions(instances=1)
BODY = json.dumps(
    {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0.0, 2.0, 1.0, 0.0]}]}
).encode()
TINY = ("a", "b", "c", "d", "e", "f")
NEW = ("infers", "versioned", "predicted", "told", "configured", "called", "streamed", "streamed-too")
"""Each is asked by one test alone: it is not loaded before."""
MEMORY = "430MiB"  # Triton's own 50, and four or five of these models
SLOW = FILES_MODEL.replace(
    "    def execute",
    "    def initialize(self, args):\n        time.sleep(3)\n\n    def execute",
)
BROKEN = FILES_MODEL.replace(
    "    def execute",
    "    def initialize(self, args):\n        raise ValueError('its weights are torn')\n\n    def execute",
)
LARGE = FILES_MODEL.replace(
    "    def execute",
    "    def initialize(self, args):\n        self.kept = np.ones(100_000_000)\n\n    def execute",
)

KEPT = FILES_MODEL.replace(
    "    def execute",
    "    def initialize(self, args):\n        self.kept = np.ones(8_000_000)\n\n    def execute",
)

HANGS = FILES_MODEL.replace(
    "    def execute",
    "    def initialize(self, args):\n        time.sleep(3600)\n\n    def execute",
)
LONG = FILES_MODEL.replace("time.sleep(2)", "time.sleep(60)")
HANGING = tuple(f"hangs{number}" for number in range(5))  # Triton has four threads that load, where it is told nothing


@dataclass
class Served:
    """A running `serve up --memory`, the key that it asks for, and what it says of itself."""

    running: Up
    url: str
    grpc: str
    key: str
    repository: Path
    state: Path

    def ask(self, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
        """Status and answer; questions that come too often for one key are asked again."""
        headers |= {"content_type": "application/json", "x_api_key": self.key}
        while (found := fetch(f"{self.url}{path}", body, **headers))[0] == 429:
            time.sleep(0.5)
        return found

    def infer(self, model: str) -> tuple[int, Any]:
        return self.ask(f"/v2/models/{model}/infer", BODY)

    def file(self, model: str, text: str = "text", **headers: str) -> tuple[int, Any]:
        return self.ask(f"/predict/{model}", json.dumps({"file": text}).encode(), **headers)

    def metrics(self) -> dict[str, float]:
        request = urllib.request.Request(f"{self.url}/metrics", headers={"x-api-key": self.key})
        for _ in range(20):
            try:
                with urllib.request.urlopen(request) as answer:
                    rows = (line.rpartition(" ") for line in answer.read().decode().splitlines() if line[0] != "#")
                    return {name: float(value) for name, _, value in rows}
            except urllib.error.HTTPError as err:  # it was asked too often
                err.close()
                time.sleep(0.5)
        raise AssertionError("the metrics are refused")

    def of(self, metric: str, model: str, reason: str = "") -> int:
        """A metric of a model; evictions for all reasons, where none is said."""
        begin = f'gateway_model_{metric}{{model="{model}"'
        of_model = {name: value for name, value in self.metrics().items() if name.startswith(begin)}
        return int(sum(value for name, value in of_model.items() if f'reason="{reason}' in name or not reason))

    def loaded(self) -> set[str]:
        """What Triton has, as the page is told."""
        return {row["name"] for row in self.ask("/ui/models")[1] if row["state"] == "READY"}

    def settled(self, model: str) -> None:
        """Ask a model, and let it rest for as long as none goes that has just come."""
        assert self.infer(model)[0] == 200
        time.sleep(0.6)


@contextmanager
def served(folder: Path, repository: Path, *words: str, memory: str = MEMORY, settings: str = "") -> Iterator[Served]:
    keys, state = folder / "keys.json", folder / "rollouts.db"
    key = add_key(keys, "admin", admin=True)[0]
    grpc = free_port()
    (folder / "gateway.toml").write_text(f'keys = "{keys}"\nstate = "{state}"\ngrpc_port = {grpc}\n{settings}')
    more = ["--gateway", str(folder / "gateway.toml"), "--memory", memory, "--drain-timeout", "1", *words]
    with up(folder, str(repository), *FREE, *more) as running:
        yield Served(running, running.url(), f"127.0.0.1:{grpc}", key, repository, state)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("on-demand")
    repository = folder / "models"
    artifact = tiny_artifact(folder / "artifact")
    for name in (*TINY, *NEW):
        pack(artifact, repository=repository, name=name, options=ONE)
    pack(artifact, repository=repository, name="hooked", hooks=hook_file(folder), options=ONE)
    encoder = hub_artifact(sentence_folder(folder / "encoder"), folder / "encoder-artifact")
    pack(encoder, repository=repository, name="encoder", options=ONE)
    write_files_model(repository, name="files")
    write_files_model(repository, SLOW, "slow")
    write_files_model(repository, BROKEN, "broken")
    with served(folder, repository, "--pin", "a") as running:
        yield running


def at_once(count: int, what: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: what(), range(count)))


def test_it_starts_with_what_is_pinned_and_says_what_can_be_asked(server: Served) -> None:
    assert "ON_DEMAND" in server.running.said
    assert server.loaded() == {"a"}
    assert server.ask("/readyz")[0] == 200
    assert server.ask("/v2/models/b/ready")[0] == 200  # a request would be answered
    assert server.ask("/v2/models/nobody/ready")[0] == 400
    assert server.loaded() == {"a"}


def test_what_is_listed_is_what_can_be_asked(server: Served) -> None:
    listed = [row["id"] for row in server.ask("/v1/models")[1]["data"]]
    assert listed == ["encoder"]
    assert server.ask("/v1/models/encoder")[1]["id"] == "encoder"
    assert server.ask("/v1/models/b")[0] == 404
    rows = {row["name"]: row for row in server.ask("/v2/repository/index", b"")[1]}
    assert rows["a"]["state"] == "READY"
    assert rows["encoder"]["state"] == "UNAVAILABLE"
    assert "when it is asked for" in rows["encoder"]["reason"]
    assert "/predict/encoder" in server.ask("/openapi.json")[1]["paths"]
    shown = next(row for row in server.ask("/ui/models")[1] if row["name"] == "told")
    assert (shown["state"], shown["inputs"][0]["shape"]) == ("ON_DEMAND", [-1, 4])
    assert [server.ask(f"/v2/models/told/versions/{version}/ready")[0] for version in (1, 9)] == [200, 400]
    assert server.loaded() == {"a"}  # to list them has loaded none


def test_a_model_is_loaded_once_for_all_who_wait(server: Served) -> None:
    answers = at_once(20, lambda: server.infer("b"))
    assert [status for status, _ in answers] == [200] * 20
    assert server.of("loads_total", "b") == 1


@pytest.mark.parametrize(
    ("model", "path", "body"),
    [
        ("infers", "/v2/models/infers/infer", BODY),
        ("versioned", "/v2/models/versioned/versions/1/infer", BODY),
        ("predicted", "/predict/predicted", json.dumps({"x": [0, 2, 1, 0]}).encode()),
        ("hooked", "/predict/hooked", json.dumps({"text": "0,2,1,0"}).encode()),
        ("encoder", "/v1/embeddings", json.dumps({"model": "encoder", "input": ["word1", "word2 word3"]}).encode()),
        ("told", "/v2/models/told", None),
        ("configured", "/v2/models/configured/config", None),
        ("files", "/v2/models/files/example", None),
    ],
)
def test_however_it_is_asked_it_comes(server: Served, model: str, path: str, body: bytes | None) -> None:
    status, answer = server.ask(path, body)
    assert status == 200, answer
    assert model in server.loaded()
    memory = server.ask("/ui/memory")[1]
    assert next(row for row in memory["models"] if row["name"] == model)["loaded"] == 1


def grpc_inputs() -> list[triton_grpc.InferInput]:
    given = triton_grpc.InferInput("x", [1, 4], "FP32")
    given.set_data_from_numpy(np.array([[0, 2, 1, 0]], np.float32))
    return [given]


@contextmanager
def grpc_client(server: Served) -> Iterator[triton_grpc.InferenceServerClient]:
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        yield client


def test_grpc_brings_a_model_by_a_call_and_by_a_stream(server: Served) -> None:
    headers = {"x-api-key": server.key}
    with grpc_client(server) as client:
        assert client.is_model_ready("called", headers=headers)
        assert server.of("loads_total", "called") == 0
        answer = client.infer("called", grpc_inputs(), headers=headers)
        np.testing.assert_allclose(answer.as_numpy("logits"), [[0, 2, 1]])
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)), headers=headers)
        for model in ("streamed", "streamed-too", "streamed"):
            client.async_stream_infer(model, grpc_inputs())
        for _ in range(3):
            result, error = answers.get(timeout=30)
            assert error is None, error
            np.testing.assert_allclose(result.as_numpy("logits"), [[0, 2, 1]])
        client.stop_stream()
    assert [server.of("loads_total", model) for model in ("called", "streamed", "streamed-too")] == [1, 1, 1]


def test_the_one_used_longest_ago_goes_and_the_pin_stays(server: Served) -> None:
    for model in ("a", "b", "c", "d", "e"):
        server.settled(model)
    before = server.loaded() - {"a"}
    server.settled("b")  # which is the newest now
    server.settled("f")
    after = server.loaded()
    assert "a" in after
    assert {"b", "f"} <= after
    assert before - after <= {"c", "d", "files", "hooked", "encoder"}
    assert server.metrics()["gateway_models_memory_bytes"] <= server.metrics()["gateway_models_memory_limit_bytes"]


def test_none_goes_while_requests_are_with_it(server: Served) -> None:
    assert server.file("files")[0] == 200
    evicted = server.of("evictions_total", "files")
    stop = threading.Event()
    statuses: list[int] = []

    def keep_busy() -> None:
        while not stop.is_set():
            statuses.append(server.file("files", "sleep")[0])

    threads = [threading.Thread(target=keep_busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for model in ("b", "c", "d", "e", "f"):
            assert server.infer(model)[0] == 200
        assert server.of("evictions_total", "files") == evicted
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert set(statuses) == {200}


def test_who_cannot_wait_is_told_when_to_come_back_and_it_is_loaded_meanwhile(server: Served) -> None:
    request = urllib.request.Request(
        f"{server.url}/predict/slow", json.dumps({"file": "text"}).encode(),
        {"x-api-key": server.key, "content-type": "application/json", "x-request-timeout-ms": "300"},
    )  # fmt: skip
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    with caught.value as answer:
        told = json.loads(answer.read())
        assert answer.code == 503, told
        assert "not loaded yet" in told["error"]
        assert 1 <= int(answer.headers["retry-after"]) <= 10
    refused = 'gateway_requests_total{code="503",model="%s",route="/predict/{model}"}'
    assert server.metrics().get(refused % "slow") == 1, "by its name, though it never answered"
    assert server.file("made-up")[0] == 404
    assert not [name for name in server.metrics() if "made-up" in name]
    server.running.until(lambda: server.of("loads_total", "slow") == 1, 30)
    assert server.file("slow")[0] == 200
    assert server.of("loads_total", "slow") == 1


def test_one_that_does_not_load_is_told_and_holds_up_no_other(server: Served) -> None:
    started = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        broken = [pool.submit(server.file, "broken") for _ in range(3)]
        assert pool.submit(server.infer, "b").result()[0] == 200
    for status, told in (each.result() for each in broken):
        assert status == 503
        assert "could not be loaded" in told["error"]
        assert "torn" not in json.dumps(told)  # what is in its code is its owner's affair
    assert time.monotonic() - started < 30
    assert "broken can't be loaded" in server.running.said
    assert "its weights are torn" in server.running.said
    assert server.of("load_failures_total", "broken") >= 1
    assert server.ask("/readyz")[0] == 200
    rows = {row["name"]: row["state"] for row in server.ask("/ui/models")[1]}
    assert rows["broken"] == "FAILED"


def test_loads_by_hand_do_not_get_past_the_memory(server: Served) -> None:
    for act in ("load", "unload"):
        status, told = server.ask(f"/v2/repository/models/a/{act}", b"{}")
        assert (status, "--pin" in told["mend"]) == (403, True), told
    assert server.infer("a")[0] == 200


def test_a_rollout_keeps_both_of_its_models(server: Served) -> None:
    store = Store(server.state)
    store.start("name", Target("c"), Plan(steps=(50.0,), shadow=0.0), Target("b"))
    try:
        server.running.until(lambda: {"b", "c"} <= server.loaded())
        for model in ("d", "e", "f", "files", "d"):
            assert (server.file(model) if model == "files" else server.infer(model))[0] == 200
            assert {"b", "c"} <= server.loaded()
        assert {status for status, _ in (server.infer("name") for _ in range(20))} == {200}
    finally:
        store.wish("name", "abort")
    server.running.until(lambda: not any(row.active for row in store.current()))
    store.clear("name")


def test_after_a_restart_of_triton_what_is_asked_comes_back(server: Served) -> None:
    assert server.infer("b")[0] == 200
    first = triton_of(server.running.process)
    os.kill(first, signal.SIGKILL)
    server.running.until(lambda: "ready again" in server.running.said)
    server.running.until(lambda: server.infer("b")[0] == 200)
    assert {"a", "b"} <= server.loaded()
    assert server.infer("a")[0] == 200
    assert triton_of(server.running.process) not in (0, first)


@pytest.fixture
def few(tmp_path: Path) -> Path:
    artifact = tiny_artifact(tmp_path / "artifact")
    for name in "abc":
        pack(artifact, repository=tmp_path / "models", name=name, options=ONE)
    return tmp_path / "models"


def test_what_changes_in_the_repository_is_followed(tmp_path: Path, few: Path) -> None:
    with served(tmp_path, few, "--watch") as server:
        server.settled("a")
        pack(tiny_artifact(tmp_path / "artifact"), repository=few, name="new", options=ONE)
        server.running.until(lambda: "new has changed" in server.running.said)
        assert server.infer("new")[0] == 200
        pack(tmp_path / "artifact", repository=few, name="a", options=ONE)  # a second version
        server.running.until(lambda: "a is loaded" in server.running.said)
        assert server.ask("/v2/models/a")[1]["versions"] == ["2"]
        assert server.infer("a")[0] == 200
        pack(tmp_path / "artifact", repository=few, name="b", options=ONE)
        server.running.until(lambda: "b has changed" in server.running.said)
        assert server.ask("/v2/models/b")[1]["versions"] == ["2"]
        shutil.rmtree(few / "c")
        server.running.until(lambda: "c is no longer served" in server.running.said)
        assert server.infer("c")[0] == 404
        shutil.rmtree(few / "a")
        server.running.until(lambda: "a is no longer served" in server.running.said)
        server.running.until(lambda: server.infer("a")[0] == 404)


def test_of_a_signed_repository_only_what_was_signed_is_loaded(tmp_path: Path, few: Path) -> None:
    private, public = tmp_path / "key.pem", tmp_path / "public.pem"
    make = [str(OPENSSL), "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", str(private)]
    subprocess.run(make, check=True, capture_output=True)
    subprocess.run([OPENSSL, "pkey", "-in", private, "-pubout", "-out", public], check=True, capture_output=True)
    sign(few, private)
    with served(tmp_path, few, "--public-key", str(public)) as server:
        (few / "b" / "1" / "model.onnx").write_bytes(b"another")
        for model in "abc":
            assert server.infer(model)[0] == 200  # what was verified at the start


def test_a_damaged_file_of_a_model_that_rests_keeps_no_other_from_coming_back(tmp_path: Path, few: Path) -> None:
    with served(tmp_path, few, "--pin", "a") as server:
        (few / "b" / "1" / "model.onnx").write_bytes(b"torn")
        os.kill(triton_of(server.running.process), signal.SIGKILL)
        server.running.until(lambda: "ready again" in server.running.said)
        server.running.until(lambda: server.infer("a")[0] == 200)
        assert server.infer("c")[0] == 200
        assert server.infer("b")[0] == 503
        assert "b can't be loaded" in server.running.said
        (few / "a" / "1" / "model.onnx").write_bytes(b"torn, too")
        os.kill(triton_of(server.running.process), signal.SIGKILL)
        server.running.until(lambda: "did not start" in server.running.said)
        assert str(few / "a" / "1" / "model.onnx") in server.running.said  # which file it is


def test_what_turns_out_too_large_is_refused_from_then_on_and_others_go_on(tmp_path: Path, few: Path) -> None:
    write_files_model(few, LARGE, "large")
    with served(tmp_path, few) as server:
        server.infer("a")
        first = server.file("large")[0]
        server.running.until(lambda: "large" not in server.loaded())
        status, told = server.file("large")
        assert (first, status) in ((503, 503), (200, 503)), told
        server.running.until(lambda: server.infer("b")[0] == 200)
        assert "large can't be loaded" in server.running.said


def test_models_whose_loads_hang_cost_others_nothing_for_good(tmp_path: Path, few: Path) -> None:
    for name in HANGING:
        write_files_model(few, HANGS, name)
    keys = {name: add_key(tmp_path / "keys.json", name)[0] for name in HANGING}
    body = json.dumps({"file": "text"}).encode()
    with served(tmp_path, few, "--start-timeout", "8") as server:

        def asked(name: str) -> tuple[int, Any]:
            words = {"content_type": "application/json", "x_api_key": keys[name], "x_request_timeout_ms": "500"}
            return fetch(f"{server.url}/predict/{name}", body, **words)

        for name in HANGING:
            assert asked(name)[0] == 503
        server.running.until(lambda: all(server.of("load_failures_total", name) for name in HANGING), 120)
        assert server.infer("a")[0] == 200  # and not only what was there
        status, told = asked(HANGING[-1])
        assert (status, "could not be loaded" in told["error"]) == (503, True), told
        assert {"why", "mend"} <= told.keys()
        assert server.running.said.count("has not ended within 8 s (--start-timeout)") == len(HANGING)
        server.running.until(lambda: server.metrics()["gateway_model_loads_left_behind"] == 0, 30)
        server.running.until(lambda: not [name for name in HANGING if server.of("memory_bytes", name)], 30)
        assert "is loaded again" not in server.running.said  # they were ended on purpose
        server.file(HANGING[0], x_request_timeout_ms="500")  # hangs as we stop
        began = time.monotonic()
    assert time.monotonic() - began < 20


def test_what_is_computed_for_nobody_holds_no_memory_once_its_model_has_made_way(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    for name in ("long", "other"):
        write_files_model(repository, LONG, name)
    with served(tmp_path, repository, memory="100MiB", settings="timeout_s = 2\n") as server:  # one of these
        assert server.file("long")[0] == 200
        assert server.file("long", "sleep", x_request_timeout_ms="60000")[0] == 504
        began = time.monotonic()
        server.running.until(lambda: server.file("other")[0] == 200, 30)
        assert time.monotonic() - began < 20  # of the 60 s that it would have computed
        assert not server.of("memory_bytes", "long")
        server.running.until(lambda: server.file("long")[0] == 200, 30)
        assert "is loaded again" not in server.running.said  # it was ended on purpose


def test_code_that_has_something_to_do_at_its_end_does_it(tmp_path: Path) -> None:
    repository, told = tmp_path / "models", tmp_path / "told"
    ending = f"\n    def finalize(self):\n        time.sleep(2)\n        open({str(told)!r}, 'w').close()\n"
    write_files_model(repository, FILES_MODEL + ending, "ending")
    write_files_model(repository, name="other")
    with served(tmp_path, repository, memory="100MiB") as server:  # one of these
        assert server.file("ending")[0] == 200
        server.running.until(lambda: server.file("other")[0] == 200, 30)
        assert told.exists()


def test_models_come_and_go_in_a_hurry_and_triton_lives(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    names = tuple(f"m{number}" for number in range(4))
    for name in names:
        write_files_model(repository, name=name)
    with served(tmp_path, repository, memory="125MiB") as server:  # two of these
        found = [server.file(name)[0] for name in names * 10]
        assert set(found) == {200}
        assert sum(server.of("loads_total", name) for name in names) >= 30
        assert "is loaded again" not in server.running.said


def test_large_bodies_of_one_key_make_no_models_of_others_go(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    names = ("one", "two")
    for name in (*names, "large"):
        write_files_model(repository, name=name)
    large, small = (add_key(tmp_path / "keys.json", name)[0] for name in ("large", "small"))
    body = json.dumps({"file": "x" * (48 << 20)}).encode()
    found: list[int] = []
    stop = threading.Event()
    with served(tmp_path, repository, memory="250MiB") as server:  # one more than these fits

        def ask(key: str, model: str, body: bytes) -> int:
            return fetch(
                f"{server.url}/predict/{model}", body, content_type="application/json", x_api_key=key
            )[0]  # fmt: skip

        def flood() -> None:
            while not stop.is_set():
                found.append(ask(large, "large", body))

        def came(name: str) -> bool:
            return ask(small, name, text) == 200

        text = json.dumps({"file": "text"}).encode()
        for name in names:
            server.running.until(partial(came, name), 30)
        threads = [threading.Thread(target=flood) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            server.running.until(lambda: found.count(200) > 3, 60)
            until = time.monotonic() + 8
            while time.monotonic() < until:
                assert [ask(small, name, text) for name in names] == [200, 200]
                time.sleep(0.2)
            assert [server.of("evictions_total", name) for name in names] == [0, 0]
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def test_a_key_that_keeps_its_models_busy_does_not_keep_others_out(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    for name in ("busy0", "busy1", "cold"):
        write_files_model(repository, KEPT, name)
    greedy, poor = (add_key(tmp_path / "keys.json", name)[0] for name in ("greedy", "poor"))
    stop = threading.Event()
    found: list[tuple[int, Any]] = []
    with served(tmp_path, repository, memory="330MiB") as server:  # two of these, beside Triton's own

        def ask(key: str, model: str, text: str) -> tuple[int, Any]:
            body = json.dumps({"file": text}).encode()
            return fetch(f"{server.url}/predict/{model}", body, content_type="application/json", x_api_key=key)

        def keep_busy(model: str) -> None:
            while not stop.is_set():
                found.append(ask(greedy, model, "sleep"))
                if found[-1][0] != 200:
                    time.sleep(0.5)

        threads = [threading.Thread(target=keep_busy, args=(model,)) for model in ("busy0", "busy1") for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            server.running.until(lambda: len([1 for status, _ in found if status == 200]) > 8, 60)
            server.running.until(lambda: ask(poor, "cold", "text")[0] == 200, 90)
            went = [server.of("evictions_total", model, "drained") for model in ("busy0", "busy1")]
            assert sum(went) >= 1
            assert "a key with less in memory has its turn" in server.running.said
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    refused = [told for status, told in found if status != 200]
    assert all("is not loaded yet" in told["error"] for told in refused), refused  # and none was lost


def test_two_keys_that_share_models_do_not_empty_the_memory_of_what_others_share(tmp_path: Path) -> None:
    """As no model is one key's alone, each of the two would count as one that has nothing."""
    repository = tmp_path / "models"
    shared, theirs = ("shared0", "shared1"), tuple(f"theirs{number}" for number in range(5))
    for name in (*shared, *theirs):
        write_files_model(repository, name=name)
    keys = [add_key(tmp_path / "keys.json", f"k{number}")[0] for number in range(5)]
    stop = threading.Event()
    found: dict[str, list[tuple[int, Any]]] = {key: [] for key in keys}
    with served(tmp_path, repository, memory="225MiB") as server:  # four of these, beside Triton's own

        def ask_on(key: str, model: str, pause_s: float) -> None:
            while not stop.wait(pause_s):
                told = fetch(
                    f"{server.url}/predict/{model}", json.dumps({"file": "text"}).encode(),
                    content_type="application/json", x_api_key=key,
                )  # fmt: skip
                found[key].append(told)

        honest = [(key, model, 0.2) for key in keys[2:] for model in shared]
        hostile = [(key, model, 1.0) for key in keys[:2] for model in theirs]
        threads = [threading.Thread(target=ask_on, args=each) for each in (*honest, *hostile)]
        for thread in threads[: len(honest)]:
            thread.start()
        try:
            server.running.until(lambda: all(len(found[key]) > 4 for key in keys[2:]), 60)
            for thread in threads[len(honest) :]:
                thread.start()
            time.sleep(40)  # by which what is there has been there for long enough for a turn
            assert not [told for key in keys[2:] for status, told in found[key] if status != 200]
            assert [server.of("evictions_total", model) for model in shared] == [0, 0]
            assert sum(server.of("loads_total", model) for model in theirs) > 4  # and the two trade theirs
        finally:
            stop.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()


def test_triton_loads_one_more_while_a_load_of_each_that_can_hang_does(tmp_path: Path, few: Path) -> None:
    for name in HANGING:
        write_files_model(few, HANGS, name)
    options = TritonOptions(heal=True, only=frozenset(), stop_timeout_s=1.0)

    async def loaded(triton: TritonServer) -> None:
        async with grpc.aio.insecure_channel(triton.grpc_address) as channel:
            stuck = [asyncio.ensure_future(control_call(channel, "Load", name, triton.control, 60)) for name in HANGING]
            await asyncio.sleep(1)
            for name in "abc":
                await control_call(channel, "Load", name, triton.control, 20)
            for name in HANGING:
                triton.end_stubs(name, spared=())
            ended = await asyncio.gather(*stuck, return_exceptions=True)
            assert all("not healthy" in getattr(each, "why", "") for each in ended), ended

    with TritonServer(few, ports=Ports(0, 0, 0), options=options) as triton:
        asyncio.run(loaded(triton))
