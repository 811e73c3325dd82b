"""The gateway's gRPC side in front of a real Triton: clients of Triton's can't tell them apart."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from compress.errors import ServerError
from serve.gateway.access.keys import add_key
from serve.gateway.server import run_gateway
from serve.gateway.settings import ModelSettings, Settings
from serve.triton.launch import TritonServer
from tests.gateway_models import fetch, served_models
from tests.serve_http import gateway_thread
from tests.serve_models import WEIGHT

BIG = 100_000


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with served_models(tmp_path_factory.mktemp("grpc")) as server:
        yield server


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    return {
        "path": str(path),
        "tiny": add_key(path, "tiny", models=("tiny",))[0],
        "slow": add_key(path, "slow", rate=0.001, burst=2)[0],
        "admin": add_key(path, "admin", admin=True)[0],
    }


@pytest.fixture(scope="module")
def addresses(triton: TritonServer, keys: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """The gateway's gRPC address without keys, with keys, and the URL of the first."""
    settings = {
        "upstream": (f"http://{triton.http_address}",),
        "grpc_upstream": (triton.grpc_address,),
        "port": 0,
        "max_body_bytes": 1_000_000,
        "max_elements": BIG,
        "models": {"files": ModelSettings(max_in_flight=1, max_wait_s=0.3)},
    }
    ports = [free_port(), free_port()]
    with (
        gateway_thread(Settings(**settings, grpc_port=ports[0])) as url,  # type: ignore[arg-type]
        gateway_thread(Settings(**settings, grpc_port=ports[1], keys=Path(keys["path"]))),  # type: ignore[arg-type]
    ):
        yield f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}", url


def x_of(rows: int, columns: int = 4) -> Any:
    x = np.ones((rows, columns), np.float32)
    tensor = triton_grpc.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    return tensor


def file_of(content: bytes) -> Any:
    tensor = triton_grpc.InferInput("file", (1, 1), "BYTES")
    tensor.set_data_from_numpy(np.array([[content]], dtype=np.object_))
    return tensor


def test_the_calls_of_a_client_are_tritons(triton: TritonServer, addresses: tuple[str, str, str]) -> None:
    with (
        triton_grpc.InferenceServerClient(triton.grpc_address) as direct,
        triton_grpc.InferenceServerClient(addresses[0]) as client,
    ):
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("tiny", "1")
        assert not client.is_model_ready("other")
        for ask in ("get_model_metadata", "get_model_config"):
            assert getattr(client, ask)("tiny", as_json=True) == getattr(direct, ask)("tiny", as_json=True)
        assert client.get_server_metadata().name == direct.get_server_metadata().name
        assert client.get_inference_statistics("tiny").model_stats[0].name == "tiny"
        result = client.infer("tiny", [x_of(3)], request_id="7", compression_algorithm="gzip")
        np.testing.assert_allclose(result.as_numpy("logits"), np.ones((3, 4), np.float32) @ WEIGHT)
        assert result.get_response().id == "7"
        head = client.infer("files", [file_of(b"\xff\0abc")]).as_numpy("head")
        assert head.tolist() == [[b"\xff\0ab"]]


def test_errors_have_tritons_own_status_and_what_is_not_there_its_words(
    triton: TritonServer, addresses: tuple[str, str, str]
) -> None:
    def failures(address: str) -> list[tuple[str | None, str]]:
        found = []
        with triton_grpc.InferenceServerClient(address) as client:
            asks: list[Callable[[], Any]] = [
                lambda: client.infer("other", [x_of(1)]),
                lambda: client.infer("tiny", [x_of(1)], model_version="7"),
                lambda: client.infer("tiny", [x_of(1, 5)]),
                lambda: client.get_model_metadata("other"),
            ]
            for ask in asks:
                with pytest.raises(InferenceServerException) as caught:
                    ask()
                found.append((caught.value.status(), caught.value.message()))
        return found

    ours, theirs = failures(addresses[0]), failures(triton.grpc_address)
    assert [status for status, _ in ours] == [status for status, _ in theirs]
    missing = [at for at, (status, _) in enumerate(theirs) if "INVALID_ARGUMENT" not in str(status)]
    assert [ours[at] for at in missing] == [theirs[at] for at in missing]


def refused(ask: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        ask()
    return str(caught.value.status()).removeprefix("StatusCode."), caught.value.message()


def test_a_key_opens_what_it_is_for(addresses: tuple[str, str, str], keys: dict[str, str]) -> None:
    with triton_grpc.InferenceServerClient(addresses[1]) as client:

        def bearer(name: str) -> dict[str, str]:
            return {"authorization": f"Bearer {keys[name]}"}

        assert client.is_server_live()
        assert refused(lambda: client.infer("tiny", [x_of(1)]))[0] == "UNAUTHENTICATED"
        assert refused(lambda: client.infer("tiny", [x_of(1)], headers={"x-api-key": "guess"}))[0] == "UNAUTHENTICATED"
        client.infer("tiny", [x_of(1)], headers=bearer("tiny"))
        client.infer("tiny", [x_of(1)], headers={"x-api-key": keys["tiny"]})
        assert refused(lambda: client.infer("files", [file_of(b"x")], headers=bearer("tiny")))[0] == "PERMISSION_DENIED"
        assert refused(lambda: client.get_model_config("files", headers=bearer("tiny")))[0] == "PERMISSION_DENIED"
        assert refused(lambda: client.get_inference_statistics(headers=bearer("tiny")))[0] == "PERMISSION_DENIED"
        assert refused(lambda: client.get_model_repository_index(headers=bearer("tiny")))[0] == "PERMISSION_DENIED"
        names = {model.name for model in client.get_model_repository_index(headers=bearer("admin")).models}
        assert "tiny" in names
        client.infer("tiny", [x_of(1)], headers=bearer("slow"))
        client.infer("tiny", [x_of(1)], headers=bearer("slow"))
        code, told = refused(lambda: client.infer("tiny", [x_of(1)], headers=bearer("slow")))
        assert code == "RESOURCE_EXHAUSTED"
        assert "too many requests" in told


def test_what_is_too_large_is_refused(addresses: tuple[str, str, str]) -> None:
    with triton_grpc.InferenceServerClient(addresses[0]) as client:
        assert refused(lambda: client.infer("tiny", [x_of(1, BIG + 1)]))[0] == "INVALID_ARGUMENT"
        assert refused(lambda: client.infer("files", [file_of(bytes(2_000_000))]))[0] == "RESOURCE_EXHAUSTED"
        client.infer("tiny", [x_of(1)])


def test_a_deadline_holds(addresses: tuple[str, str, str]) -> None:
    with triton_grpc.InferenceServerClient(addresses[0]) as client:
        begun = time.perf_counter()
        assert refused(lambda: client.infer("files", [file_of(b"sleep")], client_timeout=0.3))[0] == "DEADLINE_EXCEEDED"
        assert time.perf_counter() - begun < 1.5


def test_a_request_without_a_place_is_refused_and_one_that_was_given_up_frees_its_own(
    addresses: tuple[str, str, str],
) -> None:
    time.sleep(2.2)  # what the test before left running
    with triton_grpc.InferenceServerClient(addresses[0]) as client:
        done: queue.Queue[Any] = queue.Queue()
        call = client.async_infer("files", [file_of(b"sleep")], callback=lambda result, error: done.put(error))
        time.sleep(0.3)
        code, told = refused(lambda: client.infer("files", [file_of(b"x")]))
        assert code == "UNAVAILABLE"
        assert "more requests than it can answer" in told
        call.cancel()
        assert "CANCELLED" in str(done.get(timeout=5)).upper()
        deadline = time.monotonic() + 5
        while 'gateway_model_in_flight{model="files"} 0.0' not in (page := metrics(addresses[2])):
            assert time.monotonic() < deadline, page
        assert 'route="ModelInfer"' in page


def metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text: str = response.read().decode()
        return text


def test_a_stream_is_passed_on_and_its_messages_are_checked(
    addresses: tuple[str, str, str], keys: dict[str, str]
) -> None:
    def stream(address: str, headers: dict[str, str], model: str = "tiny") -> list[Any]:
        came: queue.Queue[Any] = queue.Queue()
        with triton_grpc.InferenceServerClient(address) as client:
            client.start_stream(lambda result, error: came.put(error or result), headers=headers)
            with contextlib.suppress(InferenceServerException):  # refused already: the callback is told why
                for _ in range(3):
                    client.async_stream_infer(model, [x_of(1)])
            found: list[Any] = []
            while len(found) < 3:
                found.append(came.get(timeout=10))
                if isinstance(found[-1], InferenceServerException):
                    break
            client.stop_stream()
        return found

    for address, headers in ((addresses[0], {}), (addresses[1], {"x-api-key": keys["tiny"]})):
        for result in stream(address, headers):
            np.testing.assert_allclose(result.as_numpy("logits"), [[2, 2, 2]])
    assert "no key" in str(stream(addresses[1], {})[-1])
    assert "may not ask" in str(stream(addresses[1], {"x-api-key": keys["tiny"]}, "files")[-1])


def test_a_port_that_is_taken_is_told(triton: TritonServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = Settings(
            upstream=(f"http://{triton.http_address}",), grpc_upstream=(triton.grpc_address,), port=0,
            grpc_port=taken.getsockname()[1],
        )  # fmt: skip
        with pytest.raises(ServerError, match="for gRPC"):
            run_gateway(settings)


def test_both_sides_see_the_same_places(addresses: tuple[str, str, str]) -> None:
    with triton_grpc.InferenceServerClient(addresses[0]) as client:
        thread = threading.Thread(target=lambda: client.infer("files", [file_of(b"sleep")]))
        thread.start()
        time.sleep(0.4)
        body = b'{"inputs": [{"name": "file", "datatype": "BYTES", "shape": [1, 1], "data": ["x"]}]}'
        status, answer = fetch(f"{addresses[2]}/v2/models/files/infer", body)
        assert (status, "more requests" in answer["error"]) == (503, True)
        thread.join()
