"""What clients make a gateway hold has one bound: those over it are told so, and the others go on."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import re
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.access.footprint import KEPT_BYTES, MIB, footprint_bytes
from serve.gateway.access.keys import add_key
from serve.gateway.oip.cost import is_dear
from serve.triton.launch import TritonServer
from tests.gateway_models import FILES_MODEL, fetch, served_models
from tests.warm import Serve

pytestmark = pytest.mark.integration
BOUND, BODY = 32 * MIB, 8 * MIB
CLIENTS = 64
GOOD = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()
ECHO_CONFIG = """\
name: "echo"
backend: "python"
max_batch_size: 0
input [ { name: "size" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "zeros" data_type: TYPE_UINT8 dims: [ -1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
ECHO_MODEL = """\
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        sizes = [int(pb_utils.get_input_tensor_by_name(request, "size").as_numpy()[0]) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("zeros", np.zeros(size, np.uint8))]) for size in sizes]
"""


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("memory")
    for name in ("echo", "aside"):
        version = folder / "repository" / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(ECHO_CONFIG.replace("echo", name))
        (version / "model.py").write_text(ECHO_MODEL)
    with served_models(folder, FILES_MODEL.replace("time.sleep(2)", "time.sleep(0.5)")) as server:
        yield server


class Gateway:
    """In a process of its own, whose memory can be looked at."""

    def __init__(self, process: Serve, url: str, grpc_address: str) -> None:
        self.process = process
        self.url = url
        self.address = url.removeprefix("http://")
        self.grpc_address = grpc_address

    def processes(self) -> list[int]:
        """It, and those that it started."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError):
                    parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                    if self.process.pid in (parent, int(folder.name)):
                        found.append(int(folder.name))
        return found

    def peak(self) -> int:
        """The most bytes that its processes have had, each at its own time."""
        return self._bytes("VmHWM")

    def resident(self) -> int:
        """Bytes that its processes have now."""
        return self._bytes("VmRSS")

    def _bytes(self, name: str) -> int:
        total = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                match = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
                total += int(match[1]) * 1024 if match else 0
        return total

    def metric(self, name: str, key: str = "") -> float:
        with contextlib.closing(http.client.HTTPConnection(self.address)) as connection:
            connection.request("GET", "/metrics", headers={"x-api-key": key} if key else {})
            text = connection.getresponse().read().decode()
        match = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert match is not None, name
        return float(match[1])


@contextlib.contextmanager
def gateway(triton: TritonServer, **settings: float | Path) -> Iterator[Gateway]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    known: dict[str, Any] = {"memory_bytes": BOUND, "max_body_bytes": BODY, "grpc_port": port, **settings}
    flags = [word for name, value in known.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    upstream = ("--upstream", f"http://{triton.http_address}", "--grpc-upstream", triton.grpc_address)
    with Serve("gateway", "--port", "0", *upstream, *flags) as process:
        line = process.stdout.readline()
        match = re.search(r"http://\S+", line)
        assert match is not None, line
        try:
            yield Gateway(process, match[0], f"127.0.0.1:{port}")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(200)


def large() -> tuple[bytes, dict[str, str]]:
    """A request of nearly the longest body: one BYTES element, raw."""
    size = BODY - 4096
    item = {"name": "file", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [item]}).encode()
    return head + struct.pack("<I", size - 4) + bytes(size - 4), {"Inference-Header-Content-Length": str(len(head))}


def long_json() -> bytes:
    """The same as a text."""
    item = {"name": "file", "datatype": "BYTES", "shape": [1, 1], "data": ["x" * (BODY - 4096)]}
    return json.dumps({"inputs": [item]}).encode()


@contextlib.contextmanager
def good_client(gateway: Gateway, outcomes: Counter[int]) -> Iterator[None]:
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            outcomes[fetch(f"{gateway.url}/v2/models/tiny/infer", GOOD)[0]] += 1
            time.sleep(0.01)  # or it would keep the machine busy

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def all_at_once(gateway: Gateway, model: str, body: bytes, headers: dict[str, str]) -> Counter[str]:
    """The outcomes of many clients that begin together; those that go on sending may miss the answer."""
    outcomes: Counter[str] = Counter()
    begin = threading.Barrier(CLIENTS)

    def ask() -> None:
        begin.wait()
        with contextlib.closing(http.client.HTTPConnection(gateway.address, timeout=120)) as connection:
            try:
                connection.request("POST", f"/v2/models/{model}/infer", body, headers)
                answer = connection.getresponse()
                answer.read()
                outcomes[str(answer.status)] += 1
            except ConnectionError:
                outcomes["cut off"] += 1

    threads = [threading.Thread(target=ask) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


@pytest.mark.parametrize("kind", ["raw", "json"])
def test_bodies_beyond_the_bound_are_refused_and_nobody_else(triton: TritonServer, kind: str) -> None:
    body, headers = large() if kind == "raw" else (long_json(), {})
    good: Counter[int] = Counter()
    with gateway(triton) as served:
        with good_client(served, good):
            outcomes = all_at_once(served, "files", body, headers)
        assert served.process.poll() is None
        assert set(good) == {200}, good
        assert set(outcomes) <= {"200", "503", "cut off"}, outcomes
        assert outcomes["200"] > 0
        assert outcomes["503"] > 0
        assert served.peak() < footprint_bytes(BOUND, BODY)
        deadline = time.monotonic() + 30
        while served.metric("gateway_memory_bytes") > MIB:  # all of it was given back
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert served.metric("gateway_memory_refused_total") >= outcomes["503"]
        assert all_at_once_status(served, body, headers) == 200


def all_at_once_status(gateway: Gateway, body: bytes, headers: dict[str, str]) -> int:
    with contextlib.closing(http.client.HTTPConnection(gateway.address, timeout=120)) as connection:
        connection.request("POST", "/v2/models/files/infer", body, headers)
        return connection.getresponse().status


def test_answers_that_nobody_reads_have_a_bound_and_a_time(triton: TritonServer) -> None:
    item = {"name": "size", "datatype": "INT64", "shape": [1], "data": [BODY]}
    wanted = [{"name": "zeros", "parameters": {"binary_data": True}}]
    body = json.dumps({"inputs": [item], "outputs": wanted}).encode()
    head = b"POST /v2/models/echo/infer HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
    good: Counter[int] = Counter()
    with gateway(triton, write_timeout_s=2) as served, contextlib.ExitStack() as stack:
        host, _, port = served.address.rpartition(":")
        with good_client(served, good):
            for _ in range(24):
                sock = stack.enter_context(socket.socket())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.connect((host, int(port)))
                sock.sendall(head + body)
            deadline = time.monotonic() + 60
            while not served.metric("gateway_memory_refused_total"):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            while served.metric("gateway_memory_bytes") > MIB:  # they were cut off
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert set(good) == {200}, good
        assert served.peak() < footprint_bytes(BOUND, BODY)


def test_connections_have_their_part_of_it(triton: TritonServer) -> None:
    with gateway(triton, memory_bytes=4 * MIB, max_body_bytes=MIB) as served, contextlib.ExitStack() as stack:
        host, _, port = served.address.rpartition(":")
        told = b""
        for _ in range(70):  # a quarter of 4 MiB is 64 of 16 KiB
            sock = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            told = sock.recv(4096)
        assert told.startswith(b"HTTP/1.1 503"), told
        stack.close()
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(ConnectionError, http.client.HTTPException):
                if fetch(f"{served.url}/v2/models/tiny/infer", GOOD)[0] == 200:
                    break
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_messages_beyond_the_bound_are_refused(triton: TritonServer) -> None:
    """Where they come faster than they are read, and half of the bound waits in gRPC's library, by their connection."""
    size = BODY - 4096
    message = messages.ModelInferRequest(
        model_name="files", inputs=[{"name": "file", "datatype": "BYTES", "shape": (1, 1)}],
        raw_input_contents=[struct.pack("<I", size - 4) + bytes(size - 4)],
    )  # fmt: skip
    outcomes: Counter[Any] = Counter()
    with gateway(triton) as served, grpc.insecure_channel(served.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        calls = [stub.ModelInfer.future(message, timeout=120) for _ in range(12)]
        for call in calls:
            outcomes[call.code()] += 1
        refused = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
        assert set(outcomes) - {grpc.StatusCode.OK} <= refused, outcomes
        assert outcomes[grpc.StatusCode.OK] < 12, outcomes
        assert served.peak() < footprint_bytes(BOUND, BODY)
        assert served.process.poll() is None
        deadline = time.monotonic() + 30
        while served.metric("gateway_memory_bytes") > MIB:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_what_would_become_too_large_is_not_read(triton: TritonServer) -> None:
    with gateway(triton) as served:
        lists = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[' + b"[]," * MIB + b"[]]}]}"
        status, told = fetch(f"{served.url}/v2/models/tiny/infer", lists)
        assert (status, told["error"]) == (413, "the request is too large to be read as JSON")
        status, told = fetch(f"{served.url}/predict/tiny", b'{"x":[' + b"[]," * MIB + b"[]]}",
                             content_type="application/json")  # fmt: skip
        assert (status, told["error"]) == (413, "the request is too large to be read as JSON")
        assert served.peak() < footprint_bytes(BOUND, BODY)


def test_lists_in_lists_without_end_are_a_bad_request(triton: TritonServer) -> None:
    deep = b"[" * 900 + b"]" * 900
    with gateway(triton) as served:
        for model, name in (("tiny", b"x"), ("files", b"file")):
            for inner in (b"", b"1", b'"a"'):
                value = deep[:900] + inner + deep[900:]
                url, body = f"{served.url}/predict/{model}", b'{"%b":%b}' % (name, value)
                assert fetch(url, body, content_type="application/json")[0] == 400


@pytest.mark.parametrize("numbers", [6000, 11_000], ids=["read in the event loop", "read in another process"])
def test_numbers_beside_a_long_text_take_no_more_than_they_are_and_others_are_answered(
    triton: TritonServer, numbers: int
) -> None:
    """As texts of one length they would be gigabytes: whoever looks for numbers may not let numpy choose."""
    bomb = json.dumps({"x": [1] * numbers + ["a" * 50_000]}, separators=(",", ":")).encode()
    assert is_dear(bomb) == (numbers > 6000)
    with gateway(triton, memory_bytes=256 * MIB) as served:
        url, answered = f"{served.url}/predict/tiny", list[int]()
        long = json.dumps({"x": [[0.5] * 4] * 8, "none": "a" * 100_000}).encode()
        assert fetch(url, long, content_type="application/json")[0] == 422  # both processes are there
        before = served.peak()
        others = [
            threading.Thread(
                target=lambda: answered.append(fetch(f"{served.url}/v2/models/tiny/infer", GOOD)[0]), name=f"other {at}"
            )
            for at in range(16)
        ]
        for at, other in enumerate(others):
            other.start()
            if at % 4 == 0:
                status, told = fetch(url, bomb, content_type="application/json")
                assert status == 422, told
                assert "this holds a mixture" in told["why"]
        for other in others:
            other.join()
        assert answered == [200] * len(others)
        assert served.peak() - before < 64 * MIB


def test_long_values_are_read_and_written_in_another_process(triton: TritonServer) -> None:
    def seconds(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    body = json.dumps({"file": ["ab" * 8] * 4}).encode()
    assert len(body) < 64 * 1024
    with gateway(triton, memory_bytes=1024 * MIB) as served:
        url = f"{served.url}/predict/files"
        assert fetch(url, body, content_type="application/json")[0] == 200
        before, alone = seconds(served.process.pid), served.processes()
        # Numbers for an input of four: all are read before the shape is seen to be wrong.
        long = b'{"x":[' + b",".join([b"[0.5,1.25,2.0,3.0]"] * (BODY // 32)) + b"]}"
        for _ in range(3):
            status, told = fetch(f"{served.url}/predict/tiny", long, content_type="application/json")
            assert status == 400, told  # beyond the model's largest batch
        readers = set(served.processes()) - set(alone)
        assert readers
        assert sum(map(seconds, readers)) > seconds(served.process.pid) - before
        status, answer = fetch(f"{served.url}/predict/echo", json.dumps({"size": [MIB]}).encode(),
                               content_type="application/json")  # fmt: skip
        assert status == 200
        assert answer["outputs"]["zeros"] == [0] * MIB


def wrong_type() -> tuple[bytes, dict[str, str]]:
    body, headers = large()
    return body.replace(b'"BYTES"', b'"INT32"'), headers


def wrong_name() -> tuple[bytes, dict[str, str]]:
    return long_json().replace(b'"file"', b'"life"'), {}


def packed() -> tuple[bytes, dict[str, str]]:
    return gzip.compress(wrong_name()[0], 1), {"Content-Encoding": "gzip"}


def late() -> tuple[bytes, dict[str, str]]:
    body, headers = large()
    at = int(headers["Inference-Header-Content-Length"]) + 4
    return body[:at] + b"sleep" + body[at + 5 :], headers | {"X-Request-Timeout-Ms": "100"}


@pytest.mark.parametrize(
    ("made", "statuses"),
    [(wrong_type, {400}), (wrong_name, {400}), (packed, {400}), (late, {503, 504})],  # it may be late before it is sent
    ids=["raw", "JSON", "packed", "late"],
)
def test_what_was_refused_is_neither_counted_nor_held(
    triton: TritonServer, made: Callable[[], tuple[bytes, dict[str, str]]], statuses: set[int]
) -> None:
    body, headers = made()

    def refused(times: int) -> None:
        for _ in range(times):
            with contextlib.closing(http.client.HTTPConnection(served.address, timeout=120)) as connection:
                with contextlib.suppress(ConnectionError):  # answered before all was sent
                    connection.request("POST", "/v2/models/files/infer", body, headers)
                assert connection.getresponse().status in statuses

    with gateway(triton, memory_bytes=32 * BOUND) as served:
        refused(4)  # what is kept for the next one is kept once
        held = served.resident()
        refused(16)
        deadline = time.monotonic() + 40
        while served.metric("gateway_memory_bytes") > MIB:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert served.resident() - held < 5 * BODY


def test_a_client_that_leaves_leaves_nothing_behind(triton: TritonServer) -> None:
    body, headers = large()
    told = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST /v2/models/files/infer HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n{told}\r\n".encode()

    def left(times: int) -> None:
        host, _, port = served.address.rpartition(":")
        for number in range(times):
            with socket.create_connection((host, int(port)), timeout=30) as sock:
                sock.sendall(head + body[: len(body) - number % 2])  # with and without its end
                time.sleep(0.05)

    with gateway(triton, memory_bytes=32 * BOUND) as served:
        left(12)
        held = served.resident()
        left(36)
        deadline = time.monotonic() + 40
        while served.metric("gateway_memory_bytes") > MIB:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert served.resident() - held < 5 * BODY + KEPT_BYTES  # which may lie free


def asks_for(size: int) -> bytes:
    """An answer of so many bytes of "echo"."""
    item = {"name": "size", "datatype": "INT64", "shape": [1], "data": [size]}
    return json.dumps({"inputs": [item], "outputs": [{"name": "zeros", "parameters": {"binary_data": True}}]}).encode()


def asked(served: Gateway, key: str, size: int, model: str = "echo") -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection(served.address, timeout=60)) as connection:
        connection.request("POST", f"/v2/models/{model}/infer", asks_for(size), {"x-api-key": key})
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.fixture
def keyed(tmp_path: Path) -> tuple[Path, str, str]:
    path = tmp_path / "keys.json"
    return path, add_key(path, "alice")[0], add_key(path, "bob", admin=True)[0]


def test_an_answer_larger_than_the_bound_ends_with_an_error_that_says_so(
    triton: TritonServer, keyed: tuple[Path, str, str]
) -> None:
    path, alice, _ = keyed
    told = "the model's answer is too large"
    with gateway(triton, keys=path) as served, grpc.insecure_channel(served.grpc_address, LONG) as channel:
        before = served.peak()
        for _ in range(3):
            status, body = asked(served, alice, 2 * BOUND)
            assert (status, json.loads(body)["error"]) == (502, told)
            assert str(BOUND // 2) in json.loads(body)["why"]
            assert "memory_bytes" in json.loads(body)["mend"]
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        metadata = [("x-api-key", alice)]
        with pytest.raises(grpc.RpcError, match=told) as refused:
            stub.ModelInfer(wanted(2 * BOUND), metadata=metadata, timeout=60)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.RpcError, match=told):
            list(stub.ModelStreamInfer(iter([wanted(2 * BOUND)]), metadata=metadata, timeout=60))
        assert served.peak() - before < BOUND // 2
        assert asked(served, alice, MIB)[0] == 200, "the server was not ejected for it"
        assert len(stub.ModelInfer(wanted(MIB), metadata=metadata, timeout=60).raw_output_contents[0]) == MIB


LONG = [("grpc.max_receive_message_length", -1)]


def wanted(size: int) -> Any:
    message = messages.ModelInferRequest(model_name="echo", raw_input_contents=[struct.pack("<q", size)])
    message.inputs.add(name="size", datatype="INT64", shape=[1])
    return message


@pytest.mark.parametrize("way", ["http", "grpc", "stream"])
def test_answers_on_their_way_count_for_the_key_that_asked(
    triton: TritonServer, keyed: tuple[Path, str, str], way: str
) -> None:
    """One key has many long answers come at once; what the other asks is answered meanwhile."""
    path, alice, bob = keyed
    outcomes: Counter[object] = Counter()

    def attack(served: Gateway) -> None:
        if way == "http":
            for _ in range(2):
                outcomes[asked(served, alice, BODY)[0]] += 1
            return
        with grpc.insecure_channel(served.grpc_address, LONG) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            metadata = [("x-api-key", alice)]
            try:
                if way == "grpc":
                    stub.ModelInfer(wanted(BODY // 2), metadata=metadata, timeout=60)
                else:
                    list(stub.ModelStreamInfer(iter([wanted(BODY // 2)]), metadata=metadata, timeout=60))
                outcomes[200] += 1
            except grpc.RpcError as err:
                outcomes[503 if err.code() is grpc.StatusCode.RESOURCE_EXHAUSTED else err.code()] += 1

    with gateway(triton, keys=path, max_in_flight=128) as served:
        assert asked(served, bob, 4 * MIB, "aside")[0] == 200  # a model whose places nobody else takes
        clients = [threading.Thread(target=attack, args=(served,)) for _ in range(12)]
        for client in clients:
            client.start()
        others = []
        while any(client.is_alive() for client in clients):
            others.append(asked(served, bob, 4 * MIB, "aside")[0])
        for client in clients:
            client.join()
        assert set(outcomes) <= {200, 503}, outcomes
        assert outcomes[200] > 0
        assert set(others) <= {200}, others
        if way != "stream":  # of each stream, one answer is there before it can be counted
            assert served.peak() < footprint_bytes(BOUND, BODY)
        deadline = time.monotonic() + 30
        while served.metric("gateway_memory_bytes", bob) > MIB:  # all of it was given back
            assert time.monotonic() < deadline
            time.sleep(0.1)
