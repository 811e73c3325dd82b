"""A real tritonserver, started from the wheel, serving what `serve pack` writes."""

from __future__ import annotations

import contextlib
import json
import string
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from compress.errors import ServerError
from serve.pack.write import PackOptions, pack
from serve.triton.launch import Ports, TritonServer
from tests.serve_models import (
    hook_file,
    lookup_artifact,
    sum_artifact,
    text_artifact,
    tiny_artifact,
    unbatched_artifact,
)

FREE = Ports(0, 0, 0)
# The hook waits, so that requests queue up behind it and are put together.
SLOW_HOOKS = """
import os
import sys
import time
from typing import Annotated, NamedTuple

import numpy as np


class Answer(NamedTuple):
    half: float
    raw: bytes
    pair: Annotated[np.ndarray, "int64[2]"]
    large: bool


def preprocess(numbers: Annotated[np.ndarray, "float32[n]"], shift: int, up: bool):
    if shift == 404:
        raise KeyError("no such shift")
    if shift == 99:
        sys.exit("the hook gives up")
    time.sleep(0.02)
    return {"a": numbers, "b": np.full_like(numbers, shift if up else -shift)}


def postprocess(total) -> Answer:
    assert total.shape == ()
    return Answer(total / 2, b"\\xff\\x00", [1, 2], bool(total > 10))
"""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """One server for all tests that only ask it."""
    folder = tmp_path_factory.mktemp("triton")
    repository = folder / "models"
    one = PackOptions(instances=1)
    tiny = tiny_artifact(folder / "tiny")
    pack(tiny, repository=repository, name="plain", options=one)
    pack(tiny, repository=repository, name="hooked", hooks=hook_file(folder / "hooked"), options=one)
    total = sum_artifact(folder / "sum")
    pack(total, repository=repository, name="sum", options=one)
    pack(total, repository=repository, name="sum-hooked", hooks=hook_file(folder / "slow", SLOW_HOOKS), options=one)
    patient = PackOptions(instances=1, max_queue_delay_microseconds=200_000)
    pack(lookup_artifact(folder / "lookup"), repository=repository, name="lookup", options=patient)
    pack(text_artifact(folder / "text"), repository=repository, name="text", options=one)
    pack(unbatched_artifact(folder / "whole"), repository=repository, name="whole", options=one)
    with TritonServer(repository, ports=FREE, log=folder / "triton.log") as server:
        yield server


def get(server: TritonServer, path: str) -> Any:
    with urllib.request.urlopen(f"http://{server.http_address}{path}", timeout=30) as response:
        return json.load(response)


Input = tuple[str, list[int], list[Any]]


def tensors(inputs: dict[str, Input]) -> list[dict[str, Any]]:
    return [
        {"name": name, "datatype": datatype, "shape": shape, "data": data}
        for name, (datatype, shape, data) in inputs.items()
    ]


def infer(server: TritonServer, model: str, *outputs: str, **inputs: Input) -> dict[str, list[Any]]:
    """Ask a model for these outputs, or for all.

    Inputs are datatype, shape and flat data; the answer is flat data by output name.
    """
    body: dict[str, Any] = {"inputs": tensors(inputs)}
    if outputs:
        body["outputs"] = [{"name": name} for name in outputs]
    url = f"http://{server.http_address}/v2/models/{model}/infer"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=30) as response:
        return {output["name"]: output["data"] for output in json.load(response)["outputs"]}


def refusal(ask: Callable[[], Any]) -> tuple[int, str]:
    """The status and the message with which a request is refused."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask()
    with caught.value as response:
        return response.code, json.load(response)["error"]


def test_a_model_without_hooks_answers(server: TritonServer) -> None:
    answer = infer(server, "plain", x=("FP32", [2, 4], [1, 2, 3, 4, 0, 0, 0, 1]))
    assert answer == {"logits": [5.0, 6.0, 7.0, 1.0, 1.0, 1.0]}


def test_an_ensemble_with_hooks_answers_item_by_item(server: TritonServer) -> None:
    answer = infer(server, "hooked", text=("BYTES", [2, 1], ["0,2,1,0", "0,0,0.5,0"]))
    assert answer == {"label": ["b", "c"], "score": [2.0, 0.5]}


def shifted(number: float, shift: int) -> dict[str, Input]:
    """One item for "sum-hooked": half the sum of (number + shift)."""
    return {"numbers": ("FP32", [1, 1], [number]), "shift": ("INT64", [1, 1], [shift]), "up": ("BOOL", [1, 1], [True])}


def test_each_kind_of_argument_and_result_gets_through(server: TritonServer) -> None:
    inputs = shifted(0, 4) | {"numbers": ("FP32", [1, 3], [1, 2, 3])}
    wanted = [{"name": "raw", "parameters": {"binary_data": True}}, *({"name": n} for n in ("half", "pair", "large"))]
    body = json.dumps({"inputs": tensors(inputs), "outputs": wanted}).encode()
    url = f"http://{server.http_address}/v2/models/sum-hooked/infer"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as response:
        answer, head = response.read(), int(response.headers["Inference-Header-Content-Length"])
    outputs = {output["name"]: output for output in json.loads(answer[:head])["outputs"]}
    assert outputs["half"]["data"] == [9.0]
    assert outputs["pair"]["data"] == [1, 2]
    assert outputs["large"]["data"] == [True]
    assert answer[head:] == b"\x02\x00\x00\x00\xff\x00"  # its length, and bytes that are no text


def test_only_the_outputs_that_are_asked_for_come_back(server: TritonServer) -> None:
    assert infer(server, "hooked", "label", text=("BYTES", [1, 1], ["0,2,1,0"])) == {"label": ["b"]}


def test_a_number_for_each_sample_and_varying_lengths_are_served(server: TritonServer) -> None:
    for length in (1, 3):
        ones = ("FP32", [2, length], [1.0] * 2 * length)
        assert infer(server, "sum", a=ones, b=ones) == {"total": [2.0 * length] * 2}


def test_text_goes_into_the_network_and_out(server: TritonServer) -> None:
    assert infer(server, "text", words=("BYTES", [1, 2], ["é", ""])) == {"same": ["é", ""]}


def test_a_network_without_a_batch_is_served(server: TritonServer) -> None:
    assert infer(server, "whole", x=("FP32", [2, 2], [1, 2, 3, 4])) == {"y": [-1.0, -2.0, -3.0, -4.0]}


def test_the_example_is_in_the_configuration_and_is_a_request(server: TritonServer) -> None:
    text = get(server, "/v2/models/hooked/config")["parameters"]["example_inputs"]["string_value"]
    (tensor,) = json.loads(text)["inputs"]
    answer = infer(server, "hooked", text=(tensor["datatype"], tensor["shape"], tensor["data"]))
    assert answer["label"] == ["b"]


def test_requests_at_the_same_time_are_put_together(server: TritonServer) -> None:
    before = get(server, "/v2/models/sum-hooked_preprocess/stats")["model_stats"][0]

    def ask(number: int) -> float:
        return float(infer(server, "sum-hooked", "half", **shifted(2 * number, 2))["half"][0])

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(32)))
    assert answers == [number + 1.0 for number in range(32)]  # each its own, in spite of the batch
    after = get(server, "/v2/models/sum-hooked_preprocess/stats")["model_stats"][0]
    inferences = after["inference_count"] - before["inference_count"]
    assert inferences == 32
    assert after["execution_count"] - before["execution_count"] < inferences


@pytest.mark.parametrize(
    ("shift", "status", "message"),
    [
        (404, 500, "hooks.py preprocess: KeyError: 'no such shift' (line 19)"),
        (99, 500, "hooks.py preprocess: SystemExit: the hook gives up (line 21)"),
    ],
)
def test_a_failing_hook_fails_only_its_own_request(server: TritonServer, shift: int, status: int, message: str) -> None:
    def ask(number: int) -> tuple[int, str]:
        inputs = shifted(1, shift if number == 5 else 1)
        try:
            return 200, str(infer(server, "sum-hooked", "half", **inputs)["half"])
        except urllib.error.HTTPError as err:
            with err:
                return err.code, json.load(err)["error"]

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    code, told = answers.pop(5)
    assert code == status
    assert message in told
    assert answers == [(200, "[1.0]")] * 11


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("1,two,3,4", 400, "hooks.py preprocess: ValueError: could not convert string to float: 'two' (line 15)"),
        ("1,2", 500, "hooks.py preprocess: TypeError: x: gave float32[2], wanted float32[4]"),
    ],
)
def test_a_bad_input_is_told_apart_from_a_bad_hook(server: TritonServer, text: str, status: int, message: str) -> None:
    code, told = refusal(lambda: infer(server, "hooked", text=("BYTES", [1, 1], [text])))
    assert code == status
    assert message in told


def test_a_request_that_fails_in_the_network_fails_alone(server: TritonServer) -> None:
    def ask(number: int) -> tuple[int, Any]:
        try:
            return 200, infer(server, "lookup", ids=("INT64", [1, 2], [number, 1]))["rows"]
        except urllib.error.HTTPError as err:
            with err:
                return err.code, json.load(err)["error"]

    with ThreadPoolExecutor(16) as pool:  # all in one batch: the model waits long enough for them
        answers = list(pool.map(ask, [*range(10), 77, *range(5)]))
    code, told = answers.pop(10)
    assert code == 500
    assert "ONNX Runtime" in told
    assert "indices element out of data bounds" in told
    assert answers == [(200, [float(number), 1.0]) for number in [*range(10), *range(5)]]


def test_it_listens_on_loopback_only(server: TritonServer) -> None:
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=30) as response:
        assert b"nv_inference_count" in response.read()
    ports = {
        int(text.rpartition(":")[2]) for text in (server.http_address, server.grpc_address, server.metrics_address)
    }
    lines = [*Path("/proc/net/tcp").read_text().splitlines(), *Path("/proc/net/tcp6").read_text().splitlines()]
    listening = [line.split()[1].split(":") for line in lines if line.split()[3] == "0A"]
    found = {int(port, 16): address for address, port in listening if int(port, 16) in ports}
    # As the kernel writes 127.0.0.1 and ::ffff:127.0.0.1.
    assert set(found.values()) <= {"0100007F", "0000000000000000FFFF00000100007F"}
    assert found.keys() == ports


def test_nothing_but_pythons_cache_of_model_py_is_written_into_the_repository(server: TritonServer) -> None:
    written = {path.name for path in server.repository.rglob("*.pyc")}
    assert written <= {f"model.{sys.implementation.cache_tag}.pyc"}


PRINTABLE = "".join(sorted(set(string.printable) - set("/\x0b\x0c"))) + "größe 模型"


def test_a_repository_is_served_whatever_its_folder_is_called(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    nasty = tmp_path / f"a$(touch {canary.name})b`touch {canary.name}`;touch {canary.name}&" / PRINTABLE
    pack(tiny_artifact(tmp_path / "tiny"), repository=nasty, name="hooked", hooks=hook_file(tmp_path / "hooks"),
         options=PackOptions(instances=1))  # fmt: skip
    with contextlib.chdir(tmp_path), TritonServer(nasty, ports=FREE, log=tmp_path / "triton.log") as server:
        assert get(server, "/v2/models/hooked")["name"] == "hooked"
        assert infer(server, "hooked", "label", text=("BYTES", [1, 1], ["0,0,5,0"]))["label"] == ["c"]
    assert not list(tmp_path.rglob(canary.name))


def test_a_temporary_folder_that_a_shell_would_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(tiny_artifact(tmp_path / "tiny"), repository=tmp_path / "models", name="plain")
    (tmp_path / "a b").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a b"))
    with pytest.raises(ServerError, match="set TMPDIR"):
        TritonServer(tmp_path / "models", ports=FREE, log=tmp_path / "triton.log").start()
    assert not list((tmp_path / "a b").iterdir())
