"""Requests that take a real Triton longer than they may: their key pays for all of it, and others are answered after.

Whichever way they come: on the short way and the long one, of sequences, over gRPC, or from a client that hangs up.
"""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.access.keys import add_key
from serve.gateway.settings import Settings
from serve.triton.launch import Ports, TritonServer
from tests.integration.test_gateway_connections import CONFIG, MODEL
from tests.integration.test_gateway_grpc import free_port
from tests.integration.test_gateway_heavy import SEQUENCES
from tests.serve_http import gateway_thread

TIMEOUT_S, LONG_S, CONNECTIONS, TIME_S = 1.5, 6.0, 4, 22.0
WAYS = ("short", "long", "sequence", "grpc", "left")
NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("overdue")
    for name in WAYS:
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.py").write_text(MODEL)
        (repository / name / "config.pbtxt").write_text(CONFIG % name + (SEQUENCES if name == "sequence" else ""))
    with TritonServer(repository, ports=Ports(0, 0, 0)) as server:
        yield server
        server.stop(within_s=5)  # what tests have left with it is of no use


@pytest.fixture
def another_triton(triton: TritonServer) -> Iterator[TritonServer]:
    with TritonServer(triton.repository, ports=Ports(0, 0, 0)) as server:
        yield server
        server.stop(within_s=5)


def body_of(seconds: float, **parameters: object) -> bytes:
    item = {"name": "seconds", "datatype": "FP32", "shape": [1, 1], "data": [seconds]}
    return json.dumps({"inputs": [item], "parameters": parameters}).encode()


def ask(
    connection: http.client.HTTPConnection,
    key: str,
    model: str,
    seconds: float,
    headers: dict[str, str],
    **told: object,
) -> int:
    body = body_of(seconds, **told)
    connection.request("POST", f"/v2/models/{model}/infer", body, {"x-api-key": key} | headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status


def over_grpc(calls: Any, key: str, model: str, seconds: float, timeout_s: float = 60) -> int:
    request = messages.ModelInferRequest(model_name=model, raw_input_contents=[struct.pack("<f", seconds)])
    request.inputs.add(name="seconds", datatype="FP32", shape=[1, 1])
    try:
        calls.ModelInfer(request, metadata=(("x-api-key", key),), timeout=timeout_s)
    except grpc.RpcError as err:
        return 504 if err.code() is grpc.StatusCode.DEADLINE_EXCEEDED else 503
    return 200


def hang_up(address: str, key: str, model: str, seconds: float) -> None:
    host, _, port = address.partition(":")
    body = body_of(seconds)
    head = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(0.1)


@pytest.mark.parametrize("way", WAYS)
def test_others_are_answered_once_the_first_request_that_takes_too_long_is_over(
    triton: TritonServer, tmp_path: Path, way: str
) -> None:
    keys, port = tmp_path / "keys.json", free_port()
    greedy, *others = (add_key(keys, name)[0] for name in ("greedy", "one", "two", "three"))
    settings = Settings(
        upstream=(f"http://{triton.http_address}",), grpc_upstream=(triton.grpc_address,), port=0, grpc_port=port,
        keys=keys, timeout_s=TIMEOUT_S, max_address_share=1.0,
    )  # fmt: skip
    answered: list[float] = []
    late: list[float] = []
    go, ends = threading.Event(), threading.Event()

    with gateway_thread(settings) as url, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        address = url.removeprefix("http://")
        calls = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def begun_by(connection: http.client.HTTPConnection, key: str) -> dict[str, object]:
            """Of a model with sequences, one of its own; what is asked goes on with it."""
            told: dict[str, object] = {"sequence_id": next(NUMBERS)} if way == "sequence" else {}
            if told:
                assert ask(connection, key, way, 0.0, {}, sequence_start=True, **told) == 200
            return told

        def light(key: str) -> None:
            with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
                told = begun_by(connection, key)
                while not ends.is_set():
                    if ask(connection, key, way, 0.0, {}, **told) == 200:
                        answered.append(time.monotonic())
                    time.sleep(0.1)

        def heavy() -> None:
            with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
                told = begun_by(connection, greedy)
                go.wait()
                while not ends.is_set():
                    status = 0
                    if way == "left":
                        hang_up(address, greedy, way, LONG_S)
                    elif way == "grpc":
                        status = over_grpc(calls, greedy, way, LONG_S)
                    else:
                        headers = {"X-Request-Timeout-Ms": "60000"} if way == "long" else {}
                        status = ask(connection, greedy, way, LONG_S, headers, **told)
                    if status == 504:
                        late.append(time.monotonic())
                    time.sleep(0.1)

        threads = [threading.Thread(target=light, args=(key,)) for key in others]
        # Of a key whose sequences were begun something is known, and nothing of what comes next.
        threads += [threading.Thread(target=heavy) for _ in range(1 if way == "sequence" else CONNECTIONS)]
        for thread in threads:
            thread.start()
        time.sleep(2)
        go.set()
        begun = time.monotonic()
        time.sleep(TIME_S)
        until = time.monotonic()
        ends.set()
        for thread in threads:
            thread.join()

    # Its seconds are the request's, and three times as many the others': they ask nine times a second each.
    after = [each for each in answered if begun + LONG_S + 1 < each < until]
    assert len(after) > 0.6 * 9 * len(others) * (TIME_S - LONG_S - 1), (len(after), len(late))
    if way != "left":
        assert len(late) <= 2


def test_of_two_servers_the_one_that_is_free_of_long_requests_answers_the_others(
    triton: TritonServer, another_triton: TritonServer, tmp_path: Path
) -> None:
    """One key asks two models at once for what takes long, which may well be with one server each."""
    keys = tmp_path / "keys.json"
    greedy, *others = (add_key(keys, name)[0] for name in ("greedy", "one", "two", "three"))
    upstream = tuple(f"http://{each.http_address}" for each in (triton, another_triton))
    settings = Settings(upstream=upstream, port=0, keys=keys, timeout_s=TIMEOUT_S, max_address_share=1.0)
    statuses: list[int] = []
    go, ends = threading.Event(), threading.Event()

    with gateway_thread(settings) as url:
        address = url.removeprefix("http://")

        def light(key: str, model: str) -> None:
            with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
                while not ends.is_set():
                    status = ask(connection, key, model, 0.0, {})
                    if go.is_set():
                        statuses.append(status)
                    time.sleep(0.1)

        def heavy(model: str) -> None:
            with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
                go.wait()
                while not ends.is_set():
                    ask(connection, greedy, model, LONG_S, {})
                    time.sleep(0.1)

        models = ("short", "long")
        threads = [threading.Thread(target=light, args=(key, model)) for key in others for model in models]
        threads += [threading.Thread(target=heavy, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        time.sleep(2)
        go.set()
        time.sleep(1.6 * LONG_S)
        ends.set()
        for thread in threads:
            thread.join()

    # At first nobody knows that they are long: who is behind one then waits for as long as it may, once.
    assert statuses.count(504) <= len(others) * len(models), statuses.count(504)
    assert statuses.count(200) > 0.8 * 9 * len(others) * len(models) * (1.6 * LONG_S - TIMEOUT_S)
    assert len(statuses) - statuses.count(200) <= len(others) * len(models)
