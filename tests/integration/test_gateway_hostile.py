"""Requests that end a bare Triton, or spoil the batch that others are in: behind the gateway they reach neither."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import http.client
import json
import struct
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import numpy as np
import pytest
from onnx import helper
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from compress.artifact import Artifact, Runtime
from serve.gateway.oip.cost import CHEAP_BYTES
from serve.gateway.oip.request import loaded
from serve.gateway.settings import Settings
from serve.pack.write import pack
from serve.triton.launch import TritonServer
from tests.gateway_models import fetch, served_models
from tests.integration.test_gateway_grpc import free_port
from tests.serve_http import gateway_thread
from tests.serve_models import artifact_of

pytestmark = pytest.mark.integration
GOOD = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
TEXT = {"inputs": [{"name": "file", "datatype": "BYTES", "shape": [1, 1], "data": ["abcd"]}]}


RUNTIMES: tuple[Runtime, ...] = ("onnxruntime", "openvino") if find_spec("openvino_telemetry") else ("onnxruntime",)


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("hostile")
    for runtime in RUNTIMES:  # as long as x, and a row for each two numbers of x
        negative = [helper.make_node("Neg", ["x"], ["y"])]
        free = artifact_of(folder / f"{runtime}_free", negative, ["x:float32[batch,n]"], ["y:float32[batch,n]"])
        reshape = [helper.make_node("Reshape", ["x", "pairs"], ["y"])]
        pairs = {"pairs": np.array([-1, 2], np.int64)}
        rows = artifact_of(folder / f"{runtime}_rows", reshape, ["x:float32[batch,n]"], ["y:float32[batch,2]"], pairs)
        for artifact in (free, rows):
            dataclasses.replace(Artifact.load(artifact), runtime=runtime).save()
            pack(artifact, repository=folder / "repository", name=artifact.name)
    with served_models(folder) as server:
        yield server


@pytest.fixture(scope="module")
def urls(triton: TritonServer) -> Iterator[tuple[str, str]]:
    """The gateway's URL, and its gRPC address."""
    port = free_port()
    settings = Settings(
        upstream=(f"http://{triton.http_address}",), grpc_upstream=(triton.grpc_address,), port=0, grpc_port=port
    )
    with gateway_thread(settings) as url:
        yield url, f"127.0.0.1:{port}"


def shaped(shape: Any, data: Any = (1, 2, 3, 4)) -> bytes:
    return json.dumps({"inputs": [GOOD["inputs"][0] | {"shape": shape, "data": list(data)}]}).encode()


CLASSIFIED = [{"name": "head", "parameters": {"classification": 1}}]
HOSTILE: dict[str, tuple[str, bytes]] = {
    "classes of a BYTES output": ("files", json.dumps(TEXT | {"outputs": CLASSIFIED}).encode()),
    "a shape of 16 TB": ("tiny", shaped([1099511627776, 4])),
    "a shape of 1.6 GB": ("tiny", shaped([100000000, 4])),
    "a shape that overflows": ("tiny", shaped([2**62, 4])),
    "a shape that overflows to nothing": ("files", json.dumps(
        {"inputs": [TEXT["inputs"][0] | {"shape": [4294967296, 4294967296], "data": []}]}).encode()),
    "a shape of words": ("tiny", shaped(["a", 200000000])),
    "many dimensions": ("tiny", shaped([1] * 40_000)),
    "deep lists": ("tiny", b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":' + b"[" * 50_000 + b"]" * 50_000
                   + b"}]}"),
    "deep objects": ("tiny", b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "two lists of inputs": ("tiny", (b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1099511627776,4],"data":[1]}],'
                            b'"inputs":[{"name":"x","datatype":"FP32","shape":[8,4],"data":[1,2,3,4]}]}')),
    "no data": ("tiny", b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4]}]}'),
    "shared memory": ("tiny", (b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"parameters":'
                      b'{"shared_memory_region":"a","shared_memory_byte_size":16}}]}')),
}  # fmt: skip


EMPTY = {"name": "x", "datatype": "FP32", "shape": [1, 0]}
HOSTILE |= {
    f"classes of nothing on {model}": (model, json.dumps(
        {"inputs": [EMPTY | {"data": []}], "outputs": [{"name": "y", "parameters": {"classification": 1}}]}).encode())
    for runtime in RUNTIMES for model in (f"{runtime}_free", f"{runtime}_rows")
}  # fmt: skip


MANY = {f"a{at}": 1 for at in range(60)}
DEAR: dict[str, tuple[str, dict[str, Any], int]] = {
    "many outputs of many parameters": (
        "/v2/models/tiny/infer", GOOD | {"outputs": [{"name": "y", "parameters": MANY}] * 80}, 400),
    "many lists": ("/v2/models/tiny/infer", {"inputs": [GOOD["inputs"][0] | {"data": [[]] * 20_000}]}, 400),
    "objects for numbers": ("/predict/tiny", {"x": {"a": [{"b": 1}] * 4000}}, 422),
    "many texts": ("/predict/files", {"file": ["a"] * 10_000}, 400),
    "packed blanks": ("/v2/models/tiny/infer", GOOD, 200),
}  # fmt: skip


@pytest.mark.parametrize("kind", DEAR)
def test_what_is_dear_to_read_is_not_read_in_the_event_loop(
    urls: tuple[str, str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The process that reads it is another: what this one parses is noted."""
    path, asked, wanted = DEAR[kind]
    body, headers, parsed = json.dumps(asked, separators=(",", ":")).encode(), {}, list[int]()
    assert len(body) < 64 * 1024
    if kind == "packed blanks":
        body, headers = gzip.compress(body + b" " * 20_000_000), {"content-encoding": "gzip"}

    def noting(text: bytes) -> Any:
        parsed.append(len(text))
        return loaded(text)

    monkeypatch.setattr("serve.gateway.oip.request.loaded", noting)
    monkeypatch.setattr("serve.gateway.oip.contracts.loaded", noting)
    asking = Request(urls[0] + path, data=body, headers={"content-type": "application/json", **headers})
    try:
        with urlopen(asking, timeout=60) as answer:
            status = answer.status
    except HTTPError as err:
        status = err.code
    assert status == wanted
    assert max(parsed, default=0) <= CHEAP_BYTES, "what came"


def framed(prefix: int, content: bytes = b"abcd") -> tuple[bytes, int]:
    """A raw BYTES element that says another length than it has."""
    size = 4 + len(content)
    head = json.dumps(
        {"inputs": [{"name": "file", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": size}}]}
    ).encode()
    return head + struct.pack("<I", prefix) + content, len(head)


@pytest.mark.parametrize("kind", HOSTILE)
def test_one_request_ends_nothing(triton: TritonServer, urls: tuple[str, str], kind: str) -> None:
    before = triton.pid
    model, body = HOSTILE[kind]
    status, told = fetch(f"{urls[0]}/v2/models/{model}/infer", body)
    assert status == 400, told
    assert told["error"]
    assert fetch(f"{urls[0]}/v2/models/tiny/infer", json.dumps(GOOD).encode())[0] == 200
    assert fetch(f"{urls[0]}/v2/models/files/infer", json.dumps(TEXT).encode())[0] == 200
    assert triton.pid == before
    assert triton.running


def test_classes_of_nothing_by_raw_tensors_end_nothing(triton: TritonServer, urls: tuple[str, str]) -> None:
    before = triton.pid
    for model in (f"{runtime}_free" for runtime in RUNTIMES):
        outputs = [{"name": "y", "parameters": {"classification": 1, "binary_data": True}}]
        body = json.dumps({"inputs": [EMPTY | {"parameters": {"binary_data_size": 0}}], "outputs": outputs}).encode()
        url, length = f"{urls[0]}/v2/models/{model}/infer", {"Inference-Header-Content-Length": str(len(body))}
        assert fetch(url, body, **length)[0] == 400
        assert fetch(url, shaped([1, 4]))[0] == 200
    assert triton.pid == before
    assert triton.running


def test_a_wrong_length_fails_nobody_elses_request(urls: tuple[str, str]) -> None:
    url = f"{urls[0]}/v2/models/files/infer"
    stop = threading.Event()
    statuses: list[int] = []

    def neighbour() -> None:
        while not stop.is_set():
            statuses.append(fetch(url, json.dumps(TEXT).encode())[0])

    neighbours = [threading.Thread(target=neighbour) for _ in range(2)]
    for thread in neighbours:
        thread.start()
    try:
        for prefix in (0, 3, 5, 100, 2**31 - 1, 2**31, 2**32 - 1) * 5:
            body, length = framed(prefix)
            assert fetch(url, body, **{"Inference-Header-Content-Length": str(length)})[0] == 400
    finally:
        stop.set()
        for thread in neighbours:
            thread.join()
    assert len(statuses) > 1
    assert set(statuses) == {200}


def test_long_json_is_read_beside_the_event_loop_and_answered(urls: tuple[str, str]) -> None:
    for _ in range(2):
        status, answer = fetch(f"{urls[0]}/v2/models/tiny/infer", json.dumps(GOOD | {"note": "x" * 100_000}).encode())
        assert status == 200
        assert answer["outputs"][0]["data"] == [5.0, 6.0, 7.0]
    bad = shaped([1, 4], range(100_000))
    status, told = fetch(f"{urls[0]}/v2/models/tiny/infer", bad)
    assert (status, told["why"]) == (400, "the input 'x' has 4 elements by its shape, and 100000 in its data")


def test_a_raw_body_is_one_tensor(urls: tuple[str, str]) -> None:
    def ask(model: str, body: bytes) -> tuple[int, Any]:
        headers = {"Inference-Header-Content-Length": "0", "Content-Type": "application/octet-stream"}
        with contextlib.closing(http.client.HTTPConnection(urls[0].removeprefix("http://"))) as connection:
            connection.request("POST", f"/v2/models/{model}/infer", body, headers)
            answer = connection.getresponse()
            length = int(answer.headers.get("Inference-Header-Content-Length", "0"))
            return answer.status, answer.read()[length:]

    assert ask("tiny", struct.pack("<4f", 1, 2, 3, 4)) == (200, struct.pack("<3f", 5, 6, 7))
    assert ask("tiny", bytes(15))[0] == 400
    assert ask("files", b"abcdef")[1].startswith(struct.pack("<I", 4) + b"abcd")


def x_of(shape: tuple[int, ...], **fields: Any) -> Any:
    return messages.ModelInferRequest(
        model_name="tiny", inputs=[{"name": "x", "datatype": "FP32", "shape": shape}], **fields
    )


GRPC: dict[str, Any] = {
    "a shape of 16 TB": x_of((1099511627776, 4), raw_input_contents=[bytes(16)]),
    "a shape that overflows": x_of((2**62, 4), raw_input_contents=[bytes(16)]),
    "a negative shape": x_of((-1, 4), raw_input_contents=[bytes(16)]),
    "no data": x_of((1, 4)),
    "too much data": x_of((1, 4), raw_input_contents=[bytes(16), bytes(16)]),
    "classes of a BYTES output": messages.ModelInferRequest(
        model_name="files",
        inputs=[{"name": "file", "datatype": "BYTES", "shape": (1, 1), "contents": {"bytes_contents": [b"abcd"]}}],
        outputs=[{"name": "head", "parameters": {"classification": messages.InferParameter(int64_param=1)}}],
    ),
    "a wrong length": messages.ModelInferRequest(
        model_name="files", inputs=[{"name": "file", "datatype": "BYTES", "shape": (1, 1)}],
        raw_input_contents=[struct.pack("<I", 2**31) + b"abcd"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", GRPC)
def test_one_message_ends_nothing(triton: TritonServer, urls: tuple[str, str], kind: str) -> None:
    before = triton.pid
    with grpc.insecure_channel(urls[1]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(GRPC[kind], timeout=20)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value
        answer = stub.ModelInfer(x_of((1, 4), raw_input_contents=[struct.pack("<4f", 1, 2, 3, 4)]), timeout=20)
    assert answer.raw_output_contents[0] == struct.pack("<3f", 5, 6, 7)
    assert triton.pid == before
    assert triton.running


@pytest.mark.parametrize("name", ["Content-Type", "Accept-Encoding", "Traceparent", "Tracestate"])
def test_a_long_header_is_no_failure_of_triton(urls: tuple[str, str], name: str) -> None:
    """Triton closes the connection on a head of over 8 KiB: any client could have had it ejected for all."""
    url, _ = urls
    for more in ({}, {"X-Request-Timeout-Ms": "20000"}):  # the short way, and the long one
        assert fetch(f"{url}/v2/models/tiny/infer", json.dumps(GOOD).encode(), **{name: "x" * 9000}, **more)[0] == 200
    address = url.removeprefix("http://")
    with contextlib.closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        connection.request("GET", "/metrics")
        page = connection.getresponse().read().decode()
    assert 'gateway_upstream_errors_total{kind="closed"}' not in page
