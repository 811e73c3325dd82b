"""Streams of answers as server-sent events, from a real Triton with a decoupled model."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import requests
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.access.footprint import MIB
from serve.gateway.settings import Settings
from serve.triton.launch import TritonServer
from tests.gateway_models import served_models
from tests.integration.test_gateway_grpc_decoupled import MANY_MODEL, settled
from tests.integration.test_gateway_grpc_streams import DECOUPLED, keyed, until_free
from tests.integration.test_gateway_memory import ECHO_CONFIG, Gateway, gateway
from tests.serve_http import gateway_thread

__all__ = ["keyed"]

pytestmark = pytest.mark.integration
WORDS_CONFIG = """\
name: "words"
backend: "python"
max_batch_size: 4
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "word" data_type: TYPE_STRING dims: [ 1 ] }, { name: "place" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { count: 2 kind: KIND_CPU } ]
"""
WORDS_MODEL = """\
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[0, 0].decode()
            loud = json.loads(request.parameters() or "{}").get("loud")
            for place, word in enumerate(text.split()):
                if word == "wait":
                    time.sleep(1.5)
                if word == "fail":
                    sender.send(pb_utils.InferenceResponse([], pb_utils.TritonError("no more words")))
                    break
                told = np.array([[(word.upper() if loud else word).encode()]], object)
                tensors = [pb_utils.Tensor("word", told), pb_utils.Tensor("place", np.array([[place]], np.int32))]
                sender.send(pb_utils.InferenceResponse(tensors))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """Models: "words" gives the words of a text one by one, "many" as many answers of 256 KiB as it is asked for."""
    folder = tmp_path_factory.mktemp("events")
    many = ECHO_CONFIG.replace("echo", "many") + DECOUPLED
    log = f"SLOW, LOG = False, {str(folder / 'log')!r}\n"
    for name, config, model in (("words", WORDS_CONFIG + DECOUPLED, WORDS_MODEL), ("many", many, log + MANY_MODEL)):
        version = folder / "repository" / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(config)
        (version / "model.py").write_text(model)
    with served_models(folder) as server:
        yield server


@pytest.fixture(scope="module")
def served(triton: TritonServer) -> Iterator[Gateway]:
    with gateway(triton, timeout_s=10) as found:
        yield found


def events(answer: requests.Response) -> list[tuple[str, Any]]:
    """Kind and data of each."""
    found = []
    for event in answer.text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in event.splitlines())
        found.append((fields.get("event", "message"), json.loads(fields["data"])))
    return found


def stream(served: Gateway, values: Any, path: str = "/predict/words/stream", **headers: str) -> requests.Response:
    return requests.post(served.url + path, json=values, headers=headers, timeout=60)


def test_each_answer_of_a_decoupled_model_is_an_event_in_the_form_of_predict(served: Gateway) -> None:
    answer = stream(served, {"text": "one två three"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert events(answer) == [
        ("message", {"model": "words", "version": "1", "outputs": {"word": word, "place": place}})
        for place, word in enumerate(["one", "två", "three"])
    ]


@pytest.mark.parametrize("version", ["", "/versions/1"])
def test_tritons_generate_stream_has_its_own_form_and_takes_parameters(served: Gateway, version: str) -> None:
    asked = {"text": "a b", "id": "7", "parameters": {"loud": True, "temperature": 0.5, "seed": 3, "name": "x"}}
    answer = stream(served, asked, f"/v2/models/words{version}/generate_stream")
    assert events(answer) == [
        ("message", {"model_name": "words", "model_version": "1", "word": word, "place": place})
        for place, word in enumerate(["A", "B"])
    ]


def test_events_come_one_by_one(served: Gateway) -> None:
    began = time.monotonic()
    with requests.post(f"{served.url}/predict/words/stream", json={"text": "a wait"}, stream=True, timeout=60) as found:
        came = [time.monotonic() - began for line in found.iter_lines() if line]
    assert len(came) == 2
    assert came[1] - came[0] > 1


@pytest.mark.parametrize(
    ("text", "status", "told"),
    [("", 200, []), ("fail", 500, None), ("a fail", 200, ["message", "error"])],
    ids=["no answer", "the first fails", "a later one fails"],
)
def test_what_fails_before_the_first_answer_has_a_status_and_is_an_event_afterwards(
    served: Gateway, text: str, status: int, told: list[str] | None
) -> None:
    answer = stream(served, {"text": text})
    assert answer.status_code == status
    if told is None:
        assert answer.json() == {"error": "the model 'words' failed", "why": "no more words"}
    else:
        assert [kind for kind, _ in events(answer)] == told


@pytest.mark.parametrize(
    ("path", "values", "status", "word"),
    [
        ("/predict/words/stream", {"txt": "a"}, 422, "'text' is missing"),
        ("/predict/words/stream", {"text": 3}, 422, "does not fit"),
        ("/predict/words/stream", [1], 400, "not values by input name"),
        ("/predict/nobody/stream", {"text": "a"}, 404, "nobody"),
        ("/v2/models/words/versions/9/generate_stream", {"text": "a"}, 404, "9"),
        ("/v2/models/words/generate_stream", {"text": "a", "parameters": [1]}, 400, "no object"),
        (
            "/v2/models/words/generate_stream",
            {"text": "a", "parameters": {"x": None}},
            400,
            "neither a number nor a text",
        ),
        ("/v2/models/words/generate_stream", {"text": "a", "parameters": {"x": 2**63}}, 400, "too large"),
        (
            "/v2/models/words/generate_stream",
            {"text": "a", "parameters": {str(n): 1 for n in range(99)}},
            400,
            "more than",
        ),
        ("/v2/models/words/generate_stream", {"text": "a", "parameters": {"triton_x": 1}}, 400, "are Triton's own"),
        ("/v2/models/words/generate_stream", {"text": "a", "parameters": {"sequence_id": -1}}, 400, ""),
        ("/v2/models/words/generate_stream", {"text": "a", "id": 7}, 400, "its id is no text"),
        ("/v2/models/words/generate_stream", {"text": "a", "id": "i" * 1025}, 400, "up to 1024 letters"),
        ("/v2/models/words/generate_stream", {"text": "a", "temperature": 0.5}, 422, "'temperature' is none of them"),
    ],
)
def test_what_does_not_fit_is_refused_before_triton_sees_it(
    served: Gateway, path: str, values: Any, status: int, word: str
) -> None:
    answer = stream(served, values, path)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert word in answer.text


def test_bodies_may_be_packed_and_a_text_may_come_as_a_file(served: Gateway) -> None:
    url, long = f"{served.url}/predict/words/stream", "word " * 3000
    packed = gzip.compress(json.dumps({"text": long}).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert len(events(requests.post(url, packed, headers=headers, timeout=60))) == 3000
    assert len(events(requests.post(url, files={"file": b"a b"}, timeout=60))) == 2


@pytest.mark.parametrize(("patience", "kinds"), [("1000", ["message", "error"]), ("5000", ["message"] * 2)])
def test_a_client_bounds_the_whole_by_its_own_deadline(served: Gateway, patience: str, kinds: list[str]) -> None:
    answer = stream(served, {"text": "a wait"}, **{"X-Request-Timeout-Ms": patience})
    assert [kind for kind, _ in events(answer)] == kinds


def test_long_answers_are_written_as_they_are(served: Gateway) -> None:
    answer = stream(served, {"size": [3]}, "/v2/models/many/generate_stream")
    assert [len(data["zeros"]) for _, data in events(answer)] == [262144] * 3


@pytest.mark.parametrize("keep", [False, True])
def test_a_client_of_http_1_0_gets_events_without_chunks_until_the_connection_ends(served: Gateway, keep: bool) -> None:
    body = b'{"text": "one two"}'
    head = [
        "POST /predict/words/stream HTTP/1.0", "host: x", "content-type: application/json",
        f"content-length: {len(body)}", *(["connection: keep-alive"] if keep else []),
    ]  # fmt: skip
    host, port = served.address.split(":")
    with socket.create_connection((host, int(port)), 30) as sock:
        sock.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        came = b"".join(iter(lambda: sock.recv(65536), b""))
    told, _, rest = came.partition(b"\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in told
    assert b"connection: close" in told
    assert [line[:6] for line in rest.split(b"\n")] == [b"data: ", b"", b"data: ", b"", b""]


def test_a_client_of_http_1_0_is_told_the_length_of_an_answer_that_is_whole(served: Gateway) -> None:
    host, port = served.address.split(":")
    for method in ("GET", "HEAD"):
        with socket.create_connection((host, int(port)), 30) as sock:
            sock.sendall(f"{method} /v2 HTTP/1.0\r\nhost: x\r\n\r\n".encode())
            told, _, rest = b"".join(iter(lambda: sock.recv(65536), b"")).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in told
        assert method == "HEAD" or b"content-length: %d" % len(rest) in told


def test_a_client_that_stops_reading_keeps_the_model_from_computing_and_the_gateway_small(
    triton: TritonServer, keyed: tuple[Path, str, str]
) -> None:
    path, alice, bob = keyed
    body = json.dumps({"size": [300]}).encode()
    head = (
        "POST /v2/models/many/generate_stream HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"x-api-key: {alice}\r\ncontent-length: {len(body)}\r\n\r\n"
    )

    def executed() -> int:
        with grpc.insecure_channel(triton.grpc_address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            told = stub.ModelStatistics(messages.ModelStatisticsRequest(name="many"))
            return int(told.model_stats[0].execution_count)

    with gateway(triton, keys=path, memory_bytes=64 * MIB) as served:
        before = executed()
        sockets = []
        for _ in range(6):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, port = served.address.split(":")
            sock.connect((host, int(port)))
            sock.sendall(head.encode() + body)
            sockets.append(sock)
        assert settled(lambda: executed() - before) <= 2
        assert served.metric("gateway_memory_bytes", bob) < 64 * MIB
        assert stream(served, {"text": "a b"}, **{"x-api-key": bob}).status_code == 200
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        until_free(served, bob)
    assert triton.running


def test_a_client_that_leaves_ends_its_stream_here_and_others_go_on(served: Gateway, triton: TritonServer) -> None:
    for _ in range(5):
        connection = http.client.HTTPConnection(served.address, timeout=30)
        body = json.dumps({"text": "a " * 50 + "wait " * 2})
        connection.request("POST", "/predict/words/stream", body, {"content-type": "application/json"})
        connection.getresponse().read(10)
        connection.close()
    assert len(events(stream(served, {"text": "a b c"}))) == 3
    assert triton.running


def test_a_key_is_asked_for_counts_each_stream_and_ends_it_where_it_is_revoked(
    triton: TritonServer, keyed: tuple[Path, str, str]
) -> None:
    path, alice, bob = keyed
    with gateway(triton, keys=path) as served:
        assert stream(served, {"text": "a"}).status_code == 401
        url, asked = f"{served.url}/predict/words/stream", {"text": "a wait wait wait wait wait b"}
        with requests.post(url, json=asked, headers={"x-api-key": alice}, stream=True, timeout=60) as found:
            lines = (line for line in found.iter_lines() if line)
            assert next(lines).startswith(b"data: ")
            keys = json.loads(path.read_text())
            keys["keys"] = [each for each in keys["keys"] if each["name"] != "alice"]
            path.write_text(json.dumps(keys))
            rest = list(lines)
        assert b"event: error" in rest
        assert not any(b'"b"' in line for line in rest)
        assert stream(served, {"text": "a"}, **{"x-api-key": bob}).status_code == 200


def test_a_gateway_without_tritons_grpc_address_says_so(triton: TritonServer, tmp_path: Path) -> None:
    settings = Settings(upstream=(f"http://{triton.http_address}",), port=0, state=tmp_path / "rollouts.db")
    with gateway_thread(settings) as url:
        answer = requests.post(f"{url}/predict/words/stream", json={"text": "a"}, timeout=60)
    assert answer.status_code == 501
    assert "--grpc-upstream" in answer.json()["mend"]
