"""What does not fit is refused alike over HTTP, gRPC and a gRPC stream: one table, run over all of them before a Triton."""

from __future__ import annotations

import base64
import http.client
import json
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.settings import Settings
from serve.triton.launch import TritonServer
from tests.gateway_models import served_models
from tests.integration.test_gateway_grpc import free_port
from tests.serve_http import gateway_thread

pytestmark = pytest.mark.integration
TIMEOUT_S = 60
FOUR = struct.pack("<4f", 1, 2, 3, 4)
X: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 4], "raw": FOUR}
FILE: dict[str, Any] = {"name": "file", "datatype": "BYTES", "shape": [1, 1], "raw": struct.pack("<I", 4) + b"abcd"}
CLASSES = {"classification": 1}
REGION = {"shared_memory_region": "r", "shared_memory_byte_size": 16}


def tiny(*inputs: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "inputs": list(inputs), **fields}


def files(*inputs: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "files", "inputs": list(inputs), **fields}


def without(item: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in names}


# A request as both protocols can say it; "raw" is an input's data.
REFUSED: dict[str, dict[str, Any]] = {
    "no inputs": tiny(),
    "an input that the model does not have": tiny(X | {"name": "z"}),
    "one input too many": tiny(X, X | {"name": "z"}),
    "an input twice": tiny(X, X),
    "an input without a name": tiny(X | {"name": ""}),
    "another datatype": tiny(X | {"datatype": "INT32"}),
    "a datatype that is none": tiny(X | {"datatype": "FP33"}),
    "no datatype": tiny(X | {"datatype": ""}),
    "a datatype in small letters": tiny(X | {"datatype": "fp32"}),
    "one dimension too few": tiny(X | {"shape": [4]}),
    "one dimension too many": tiny(X | {"shape": [1, 4, 1]}),
    "no shape": tiny(X | {"shape": []}),
    "40,000 dimensions": tiny(X | {"shape": [1] * 40_000}),
    "another size": tiny(X | {"shape": [1, 5], "raw": FOUR + bytes(4)}),
    "a negative size": tiny(X | {"shape": [-1, 4]}),
    "the least size": tiny(X | {"shape": [-(2**63), 4]}),
    "an empty batch": tiny(X | {"shape": [0, 4], "raw": b""}),
    "a batch that is too large": files(FILE | {"shape": [5, 1], "raw": 5 * FILE["raw"]}),
    "a shape of 16 TB": tiny(X | {"shape": [2**40, 4]}),
    "a shape that overflows to what there is": tiny(X | {"shape": [2**62 + 1, 4]}),
    "a shape that overflows to nothing": files(FILE | {"shape": [2**32, 2**32], "raw": b""}),
    "a byte too few": tiny(X | {"raw": FOUR[:-1]}),
    "a byte too many": tiny(X | {"raw": FOUR + b"\0"}),
    "no bytes": tiny(X | {"raw": b""}),
    "no data": tiny(without(X, "raw")),
    "more data than inputs": tiny(X, extra=b"\0" * 16),
    "a text without its length": files(FILE | {"raw": b"abc"}),
    "a text that is longer than it says": files(FILE | {"raw": struct.pack("<I", 3) + b"abcd"}),
    "a text that is shorter than it says": files(FILE | {"raw": struct.pack("<I", 5) + b"abcd"}),
    "a text of 4 GB by its length": files(FILE | {"raw": struct.pack("<I", 2**32 - 1) + b"abcd"}),
    "one text of two": files(FILE | {"shape": [2, 1]}),
    "two texts for one": files(FILE | {"raw": 2 * FILE["raw"]}),
    "an output that the model does not have": tiny(X, outputs=[{"name": "z"}]),
    "an output twice": files(FILE, outputs=[{"name": "head"}, {"name": "head"}]),
    "classes of texts": files(FILE, outputs=[{"name": "head", "parameters": CLASSES}]),
    "no classes at all": tiny(X, outputs=[{"name": "logits", "parameters": {"classification": 0}}]),
    "classes below none": tiny(X, outputs=[{"name": "logits", "parameters": {"classification": -1}}]),
    "too many classes": tiny(X, outputs=[{"name": "logits", "parameters": {"classification": 2**40}}]),
    "classes by a word": tiny(X, outputs=[{"name": "logits", "parameters": {"classification": "1"}}]),
    "shared memory for an input": tiny(without(X, "raw") | {"parameters": REGION}),
    "shared memory beside the data": tiny(X | {"parameters": REGION}),
    "shared memory for an output": tiny(X, outputs=[{"name": "logits", "parameters": REGION}]),
    "shared memory for the request": tiny(X, parameters=REGION),
    "a flag that is a number": tiny(X, parameters={"sequence_id": 7, "sequence_start": 1}),
    "a sequence below none": tiny(X, parameters={"sequence_id": -1}),
    "a sequence of a long name": tiny(X, parameters={"sequence_id": "s" * 129}),
    "a sequence that is a flag": tiny(X, parameters={"sequence_id": True}),
    "a priority below none": tiny(X, parameters={"priority": -1}),
    "a priority by a word": tiny(X, parameters={"priority": "high"}),
    "a time-out below none": tiny(X, parameters={"timeout": -1}),
    "a parameter of Triton's own": tiny(X, parameters={"triton_internal": 1}),
    "65 parameters": tiny(X, parameters={f"p{number}": 1 for number in range(65)}),
    "a long parameter": tiny(X, parameters={"p": "x" * 5000}),
    "a parameter of a long name": tiny(X, parameters={"p" * 5000: 1}),
}


@dataclass
class Asked:
    """How a request ended: its status as HTTP's, the reason, and the server's answer."""

    status: int
    told: str


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with served_models(tmp_path_factory.mktemp("same")) as server:
        yield server


@contextmanager
def served(triton: TritonServer, *, validate: bool) -> Iterator[tuple[str, str]]:
    settings = Settings(
        upstream=(f"http://{triton.http_address}",), grpc_upstream=(triton.grpc_address,), port=0,
        grpc_port=free_port(), validate=validate,
    )  # fmt: skip
    with gateway_thread(settings) as url:
        yield url.removeprefix("http://"), f"127.0.0.1:{settings.grpc_port}"


@pytest.fixture(scope="module")
def addresses(triton: TritonServer) -> Iterator[tuple[str, str]]:
    """host:port of the gateway over HTTP, and over gRPC."""
    with served(triton, validate=True) as found:
        yield found


@pytest.fixture(scope="module")
def unvalidated(triton: TritonServer) -> Iterator[tuple[str, str]]:
    """The same of one that does not hold requests against their model."""
    with served(triton, validate=False) as found:
        yield found


def over_http(address: str, request: dict[str, Any]) -> Asked:
    inputs, tail = [], b""
    for item in request["inputs"]:
        raw = item.get("raw")
        size = {} if raw is None else {"binary_data_size": len(raw)}
        inputs.append(without(item, "raw") | {"parameters": size | item.get("parameters", {})})
        tail += raw or b""
    head = {"inputs": inputs, **without(request, "model", "inputs", "extra")}
    text = json.dumps(head).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    with closing(http.client.HTTPConnection(address, timeout=TIMEOUT_S)) as connection:
        connection.request(
            "POST", f"/v2/models/{request['model']}/infer", text + tail + request.get("extra", b""), headers
        )
        answer = connection.getresponse()
        body = answer.read()
        return Asked(answer.status, json.loads(body).get("why", "") if answer.status != 200 else "")


def parameters(values: dict[str, Any]) -> dict[str, Any]:
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param"}
    return {name: messages.InferParameter(**{kinds[type(value)]: value}) for name, value in values.items()}


def message(request: dict[str, Any]) -> Any:
    inputs, outputs = (
        [without(item, "raw") | {"parameters": parameters(item.get("parameters", {}))} for item in items]
        for items in (request["inputs"], request.get("outputs", []))
    )
    raws = [item["raw"] for item in request["inputs"] if "raw" in item]
    return messages.ModelInferRequest(
        model_name=request["model"], inputs=inputs, outputs=outputs,
        raw_input_contents=raws + ([request["extra"]] if "extra" in request else []),
        parameters=parameters(request.get("parameters", {})),
    )  # fmt: skip


def over_grpc(address: str, request: dict[str, Any], *, stream: bool) -> Asked:
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            if stream:
                for answer in stub.ModelStreamInfer(iter([message(request)]), timeout=TIMEOUT_S):
                    assert not answer.error_message, answer.error_message  # the gateway refuses by the call's end
            else:
                stub.ModelInfer(message(request), timeout=TIMEOUT_S)
        except grpc.RpcError as err:
            return Asked(400 if err.code() is grpc.StatusCode.INVALID_ARGUMENT else 500, err.details())
    return Asked(200, "")


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_over_http_is_refused_over_grpc(
    triton: TritonServer, addresses: tuple[str, str], kind: str
) -> None:
    before, request = triton.pid, REFUSED[kind]
    there = over_http(addresses[0], request)
    assert there.status == 400, there
    for stream in (False, True):
        here = over_grpc(addresses[1], request, stream=stream)
        assert here.status == 400, (stream, here)
    assert over_grpc(addresses[1], tiny(X), stream=False).status == 200
    assert triton.pid == before
    assert triton.running


# What Triton, or a model of its, judges by itself: it is refused there, or means nothing.
FOR_TRITON = frozenset((
    "no inputs", "an input that the model does not have", "one input too many", "another datatype",
    "one dimension too few", "one dimension too many", "no shape", "another size", "an empty batch",
    "a batch that is too large", "an output that the model does not have",
))  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_may_end_a_server_is_refused_without_validation_too(
    triton: TritonServer, unvalidated: tuple[str, str], kind: str
) -> None:
    before, request = triton.pid, REFUSED[kind]
    for found in (
        over_http(unvalidated[0], request),
        over_grpc(unvalidated[1], request, stream=False),
        over_grpc(unvalidated[1], request, stream=True) if kind not in FOR_TRITON else Asked(400, ""),
    ):
        assert found.status == 400, found
    assert over_http(unvalidated[0], tiny(X)).status == 200
    assert over_http(unvalidated[0], files(FILE)).status == 200
    assert triton.pid == before
    assert triton.running


def test_json_without_end_is_refused_without_validation_too(triton: TritonServer, unvalidated: tuple[str, str]) -> None:
    before = triton.pid
    deep = b"[" * 50_000 + b"]" * 50_000
    for body in (
        deep,
        b'{"inputs":' + deep + b"}",
        b'{"parameters":{"a":' + deep + b"}}",
        b'{"inputs":[{"data":' + deep + b"}]}",
    ):
        with closing(http.client.HTTPConnection(unvalidated[0], timeout=TIMEOUT_S)) as connection:
            connection.request("POST", "/v2/models/tiny/infer", body)
            assert connection.getresponse().status == 400
    assert over_grpc(unvalidated[1], tiny(X), stream=False).status == 200
    assert triton.pid == before


@pytest.mark.parametrize("way", ["validated", "not validated"])
@pytest.mark.parametrize(
    "request_",
    [
        tiny(X),
        files(FILE),
        tiny(X, outputs=[{"name": "logits", "parameters": CLASSES}]),
        tiny(X, parameters={"mine": "x", "priority": 0, "timeout": 0}),
        files(FILE | {"shape": [2, 1], "raw": 2 * FILE["raw"]}, outputs=[{"name": "bytes"}, {"name": "head"}]),
    ],
)
def test_what_fits_is_answered_by_all(
    addresses: tuple[str, str], unvalidated: tuple[str, str], request_: dict[str, Any], way: str
) -> None:
    addresses = addresses if way == "validated" else unvalidated
    assert over_http(addresses[0], request_) == Asked(200, "")
    assert over_grpc(addresses[1], request_, stream=False) == Asked(200, "")
    assert over_grpc(addresses[1], request_, stream=True) == Asked(200, "")


FIELDS = {
    "BOOL": "bool_contents", "INT32": "int_contents", "INT64": "int64_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


def typed(field: str, values: list[Any], **more: Any) -> Any:
    item = {"name": "x", "datatype": "FP32", "shape": (1, 4), "contents": {field: values}}
    return messages.ModelInferRequest(model_name="tiny", inputs=[item], **more)


def of_grpc() -> dict[str, Any]:
    """What HTTP has no words for."""
    values = {"BOOL": True, "BYTES": b"a", "FP32": 1.0, "FP64": 1.0}
    found = {
        f"four of {datatype}": typed(field, [values.get(datatype, 1)] * 4)
        for datatype, field in FIELDS.items()
        if datatype != "FP32"
    }
    found["both raw and typed"] = typed("fp32_contents", [1.0] * 4, raw_input_contents=[FOUR])
    found["raw and empty raw"] = message(tiny(X))
    found["raw and empty raw"].raw_input_contents.append(b"")
    found["two kinds of contents"] = typed("fp32_contents", [1.0] * 4)
    found["two kinds of contents"].inputs[0].contents.int_contents.append(1)
    found["three of four"] = typed("fp32_contents", [1.0] * 3)
    found["five of four"] = typed("fp32_contents", [1.0] * 5)
    found["a parameter without a value"] = typed(
        "fp32_contents", [1.0] * 4, parameters={"p": messages.InferParameter()}
    )
    found["an unsigned number beyond the signed ones"] = typed(
        "fp32_contents", [1.0] * 4, parameters={"p": messages.InferParameter(uint64_param=2**63)}
    )
    return found


OF_GRPC = of_grpc()


@pytest.mark.parametrize("kind", OF_GRPC)
def test_what_only_grpc_can_say_is_refused_too(triton: TritonServer, addresses: tuple[str, str], kind: str) -> None:
    with grpc.insecure_channel(addresses[1]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as told:
            stub.ModelInfer(OF_GRPC[kind], timeout=TIMEOUT_S)
        assert told.value.code() is grpc.StatusCode.INVALID_ARGUMENT, told.value
        assert stub.ModelInfer(typed("fp32_contents", [1.0] * 4), timeout=TIMEOUT_S).model_name == "tiny"
    assert triton.running


@pytest.mark.parametrize(
    "body", [b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0fa", b"\x0b" * 20_000, b"\x2a\x04\x0a\x02\xc3\x28", bytes(100)]
)
def test_what_is_no_message_is_refused(triton: TritonServer, addresses: tuple[str, str], body: bytes) -> None:
    with grpc.insecure_channel(addresses[1]) as channel:
        for call in (channel.unary_unary, channel.stream_unary):
            ask = call("/inference.GRPCInferenceService/ModelInfer")
            with pytest.raises(grpc.RpcError) as told:
                ask(body if call == channel.unary_unary else iter([body]), timeout=TIMEOUT_S)
            assert told.value.code() is grpc.StatusCode.INVALID_ARGUMENT, base64.b64encode(body[:20])
    assert triton.running
