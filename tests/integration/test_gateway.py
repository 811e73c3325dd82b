"""The gateway in front of a real Triton: clients of Triton's can't tell them apart."""

from __future__ import annotations

import asyncio
import csv
import gzip
import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
import tritonclient.http.aio
import tritonclient.utils

from serve.gateway.access.keys import add_key
from serve.gateway.settings import Settings
from serve.triton.launch import TritonServer
from tests.gateway_models import fetch, served_models
from tests.serve_http import gateway_thread
from tests.serve_models import WEIGHT

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with served_models(tmp_path_factory.mktemp("gateway")) as server:
        yield server


@pytest.fixture(scope="module")
def triton(models: TritonServer) -> str:
    return models.http_address


@pytest.fixture(scope="module")
def gateway(triton: str) -> Iterator[str]:
    """host:port of a gateway to it."""
    with gateway_thread(Settings(upstream=(f"http://{triton}",), port=0, max_body_bytes=4_000_000)) as url:
        yield url.removeprefix("http://")


@pytest.fixture(params=["triton", "gateway"])
def server(request: pytest.FixtureRequest) -> str:
    """Each test runs against Triton itself, and through the gateway."""
    address: str = request.getfixturevalue(request.param)
    return address


@pytest.fixture
def client(server: str) -> Iterator[Any]:
    with tritonclient.http.InferenceServerClient(server) as client:
        yield client


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
@pytest.mark.parametrize("version", ["", "1"])
def test_infer(client: Any, binary_in: bool, binary_out: bool, version: str) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensor = tritonclient.http.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x, binary_data=binary_in)
    wanted = [tritonclient.http.InferRequestedOutput("logits", binary_data=binary_out)]
    result = client.infer("tiny", [tensor], model_version=version, outputs=wanted, request_id="7")
    np.testing.assert_allclose(result.as_numpy("logits"), x @ WEIGHT)
    assert result.get_response()["id"] == "7"


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_infer_compressed_both_ways(client: Any, algorithm: str) -> None:
    x = np.ones((1, 4), np.float32)
    tensor = tritonclient.http.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    result = client.infer(
        "tiny", [tensor], request_compression_algorithm=algorithm, response_compression_algorithm=algorithm
    )
    np.testing.assert_allclose(result.as_numpy("logits"), x @ WEIGHT)


def test_infer_bytes(client: Any) -> None:
    data = np.array([[b"\xff\0abc"], [b""]], dtype=np.object_)
    tensor = tritonclient.http.InferInput("file", data.shape, "BYTES")
    tensor.set_data_from_numpy(data)
    result = client.infer("files", [tensor])
    assert result.as_numpy("head").tolist() == [[b"\xff\0ab"], [b""]]
    assert result.as_numpy("bytes").tolist() == [[5], [0]]


def test_the_asyncio_client(gateway: str) -> None:
    async def main() -> None:
        async with tritonclient.http.aio.InferenceServerClient(gateway) as client:
            tensor = tritonclient.http.InferInput("x", (1, 4), "FP32")
            tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
            result = await client.infer("tiny", [tensor])
            np.testing.assert_allclose(result.as_numpy("logits"), [[2, 2, 2]])
            assert await client.is_server_ready()

    asyncio.run(main())


def test_metadata_and_readiness(client: Any, triton: str) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", "1")
    assert not client.is_model_ready("other")
    assert not client.is_model_ready("tiny", "7")
    with tritonclient.http.InferenceServerClient(triton) as direct:
        assert client.get_model_metadata("tiny") == direct.get_model_metadata("tiny")
        assert client.get_model_metadata("tiny", "1") == direct.get_model_metadata("tiny", "1")
        assert client.get_model_config("tiny") == direct.get_model_config("tiny")
        assert client.get_model_config("tiny", "1") == direct.get_model_config("tiny", "1")
        assert client.get_inference_statistics("tiny")["model_stats"][0]["name"] == "tiny"
        assert len(client.get_inference_statistics()["model_stats"]) >= 3
        own, told = direct.get_server_metadata(), client.get_server_metadata()
        assert (told["name"], told["version"]) == (own["name"], own["version"])
        assert set(told["extensions"]) <= set(own["extensions"])


def test_errors_have_tritons_own_status_and_what_is_not_there_its_words(gateway: str, triton: str) -> None:
    def failures(address: str) -> list[tuple[str | None, str]]:
        found: list[tuple[str | None, str]] = []
        x = tritonclient.http.InferInput("x", (1, 4), "FP32")
        x.set_data_from_numpy(np.ones((1, 4), np.float32))
        wide = tritonclient.http.InferInput("x", (1, 5), "FP32")
        wide.set_data_from_numpy(np.ones((1, 5), np.float32))
        with tritonclient.http.InferenceServerClient(address) as client:
            asks: list[Callable[[], Any]] = [
                lambda: client.infer("other", [x]),
                lambda: client.infer("tiny", [x], model_version="7"),
                lambda: client.infer("tiny", [wide]),
                lambda: client.infer("files", [x]),
                lambda: client.get_model_metadata("other"),
                lambda: client.get_model_metadata("tiny", "7"),
            ]
            for ask in asks:
                with pytest.raises(tritonclient.utils.InferenceServerException) as caught:
                    ask()
                found.append((caught.value.status(), caught.value.message()))
        return found

    ours, theirs = failures(gateway), failures(triton)
    assert [status for status, _ in ours] == [status for status, _ in theirs]
    missing = [at for at, (status, _) in enumerate(theirs) if status != "400"]
    assert [ours[at] for at in missing] == [theirs[at] for at in missing]
    assert all("does not fit the model" in told for status, told in ours if status == "400")


def test_what_only_an_administrator_may_do_is_refused(gateway: str) -> None:
    with tritonclient.http.InferenceServerClient(gateway) as client:
        asks: list[Callable[[], Any]] = [
            client.get_model_repository_index,
            lambda: client.load_model("tiny"),
            lambda: client.unload_model("tiny"),
            client.get_trace_settings,
            client.get_log_settings,
            client.get_system_shared_memory_status,
            client.get_cuda_shared_memory_status,
        ]
        for ask in asks:
            with pytest.raises(tritonclient.utils.InferenceServerException, match=r"(?i)admin"):
                ask()
        extensions = client.get_server_metadata()["extensions"]
    assert "binary_tensor_data" in extensions
    assert not [name for name in extensions if "memory" in name or "repository" in name]


def test_examples_can_be_sent(gateway: str) -> None:
    for model in ("tiny", "hooked"):
        status, example = fetch(f"http://{gateway}/v2/models/{model}/example")
        assert status == 200
        status, answer = fetch(f"http://{gateway}/v2/models/{model}/infer", json.dumps(example).encode())
        assert (status, answer["model_name"]) == (200, model)
    assert fetch(f"http://{gateway}/v2/models/tiny/versions/1/example")[0] == 200
    status, answer = fetch(f"http://{gateway}/v2/models/other/example")
    assert status == 404
    assert answer["why"] == "Request for unknown model: 'other' is not found"


def test_many_clients_at_a_time(gateway: str) -> None:
    wrong: list[object] = []

    def ask(number: int) -> None:
        x = np.full((1, 4), number, np.float32)
        tensor = tritonclient.http.InferInput("x", x.shape, "FP32")
        tensor.set_data_from_numpy(x)
        with tritonclient.http.InferenceServerClient(gateway) as client:
            for _ in range(20):
                logits = client.infer("tiny", [tensor]).as_numpy("logits")
                if not np.array_equal(logits, x @ WEIGHT):
                    wrong.append(logits)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_gzip_without_tritonclient(server: str) -> None:
    request = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
    connection = http.client.HTTPConnection(server)
    body = gzip.compress(json.dumps(request).encode())
    connection.request("POST", "/v2/models/tiny/infer", body, {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"})
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("content-encoding")) == (200, "gzip")
    assert json.loads(gzip.decompress(answer.read()))["outputs"][0]["data"] == [5.0, 6.0, 7.0]
    connection.close()


def test_perf_analyzer_runs_against_the_gateway_with_a_key(models: TritonServer, tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    secret, _ = add_key(tmp_path / "keys.json", "perf")
    settings = Settings(
        upstream=(f"http://{models.http_address}",), grpc_upstream=(models.grpc_address,), port=0, grpc_port=port,
        keys=tmp_path / "keys.json",
    )  # fmt: skip
    with gateway_thread(settings) as url:
        for protocol, address in (("http", url.removeprefix("http://")), ("grpc", f"127.0.0.1:{port}")):
            out = tmp_path / f"{protocol}.csv"
            command = [sys.executable, str(ROOT / "benchmarks/perf_analyzer.py"), "-m", "tiny", "-u", address]
            command += ["-i", protocol, "-H", f"x-api-key:{secret}", "--request-count", "50", "-f", str(out)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
            if "No matching distribution" in done.stderr:
                pytest.skip("the wheel that carries perf_analyzer can't be fetched")
            assert done.returncode == 0, done.stdout + done.stderr
            with out.open(newline="") as file:
                (row,) = csv.DictReader(file)
            assert float(row["Inferences/Second"]) > 0
