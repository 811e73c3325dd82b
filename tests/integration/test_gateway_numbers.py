"""Numbers in JSON and in gRPC's own fields, before a real Triton: they come through whole, or are refused.

None may make Triton answer with a status of its servers': the gateway would hold that against the server, and a rollout
against the model.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.settings import Settings
from serve.triton.launch import Ports, TritonServer
from tests.integration.test_gateway_grpc import free_port
from tests.serve_http import gateway_thread

pytestmark = pytest.mark.integration
TIMEOUT_S = 60
WHOLE = [f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)]
MODEL = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([self.same(tensor) for tensor in each.inputs()]) for each in requests]

    def same(self, tensor):
        return pb_utils.Tensor(tensor.name() + "_out", tensor.as_numpy())
"""
TENSOR = '{{ name: "{0}" data_type: TYPE_{1} dims: [ -1 ] {2} }}'


@pytest.fixture(scope="module", params=[True, False], ids=["validated", "not validated"])
def addresses(request: pytest.FixtureRequest, triton: TritonServer) -> Iterator[tuple[str, str]]:
    """host:port of a gateway over HTTP, and over gRPC."""
    port = free_port()
    settings = Settings(
        upstream=(f"http://{triton.http_address}",), grpc_upstream=(triton.grpc_address,), port=0, grpc_port=port,
        validate=request.param,
    )  # fmt: skip
    with gateway_thread(settings) as url:
        yield url.removeprefix("http://"), f"127.0.0.1:{port}"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """It has the model "same", whose inputs are named after their datatypes, and may all be left out."""
    folder = tmp_path_factory.mktemp("numbers")
    version = folder / "same" / "1"
    version.mkdir(parents=True)
    names = [*WHOLE, "BOOL"]
    inputs = ", ".join(TENSOR.format(name, name, "optional: true") for name in names)
    outputs = ", ".join(TENSOR.format(f"{name}_out", name, "") for name in names)
    lines = ['name: "same" backend: "python" max_batch_size: 0', f"input [ {inputs} ]", f"output [ {outputs} ]"]
    (version.parent / "config.pbtxt").write_text("\n".join([*lines, "instance_group [ { count: 1 kind: KIND_CPU } ]"]))
    (version / "model.py").write_text(MODEL)
    with TritonServer(folder, ports=Ports(0, 0, 0)) as server:
        yield server


def ask(address: str, request: Any) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection(address, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", "/v2/models/same/infer", json.dumps(request))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def over_http(address: str, datatype: str, values: list[Any]) -> list[Any] | None:
    """What comes back, None for a refusal."""
    tensor = {"name": datatype, "datatype": datatype, "shape": [len(values)], "data": values}
    status, told = ask(address, {"inputs": [tensor]})
    if status == 400:
        return None
    assert status == 200, told
    found: list[Any] = told["outputs"][0]["data"]
    return found


def over_grpc(address: str, datatype: str, values: list[Any]) -> list[Any] | None:
    """The same, for numbers in fields of their own."""
    request = messages.ModelInferRequest(model_name="same")
    tensor = request.inputs.add(name=datatype, datatype=datatype, shape=[len(values)])
    wide = "64" if datatype.endswith("64") else ""
    kind = "bool" if datatype == "BOOL" else f"uint{wide}" if datatype[0] == "U" else f"int{wide}"
    getattr(tensor.contents, f"{kind}_contents").extend(values)
    with grpc.insecure_channel(address) as channel:
        try:
            answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=TIMEOUT_S)
        except grpc.RpcError as err:
            if err.code() is grpc.StatusCode.INVALID_ARGUMENT:
                return None
            raise
    found: list[Any] = np.frombuffer(answer.raw_output_contents[0], np.dtype(datatype.lower())).tolist()
    return found


@pytest.mark.parametrize("datatype", WHOLE)
def test_whole_numbers_come_through_or_are_refused(addresses: tuple[str, str], datatype: str) -> None:
    http_address, grpc_address = addresses
    ends = np.iinfo(datatype.lower())
    least, most = int(ends.min), int(ends.max)
    held = [least, 0, 1, most]
    assert over_http(http_address, datatype, held) == held
    assert over_grpc(grpc_address, datatype, held) == held
    beyond = [least - 1, most + 1, -(2**63), 2**63, 2**64 - 1]
    for value in beyond:
        if not least <= value <= most:
            assert over_http(http_address, datatype, [1, value]) is None, value
            assert over_http(http_address, datatype, [value, 1]) is None, value
    if not datatype.endswith(("32", "64")):  # those have fields that hold no more
        for value in (least - 1, most + 1):
            if value >= 0 or datatype[0] == "I":
                assert over_grpc(grpc_address, datatype, [1, value]) is None, value
    for other in (1.5, True, "1", None):
        assert over_http(http_address, datatype, [1, other]) is None


def test_truth_is_no_number(addresses: tuple[str, str]) -> None:
    assert over_http(addresses[0], "BOOL", [True, False]) == [True, False]
    for other in (0, 1, 2, -1, 1.0, "true", None):
        assert over_http(addresses[0], "BOOL", [True, other]) is None


def test_a_request_without_a_list_of_inputs_is_one_with_an_empty_list(addresses: tuple[str, str]) -> None:
    assert ask(addresses[0], {})[1] == ask(addresses[0], {"inputs": []})[1]
    assert ask(addresses[0], {})[0] in (200, 400)
