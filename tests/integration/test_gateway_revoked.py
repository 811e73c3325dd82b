"""What a key may no longer ask is not answered, though its request had begun to come while it might."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest

from serve.gateway.access.keys import add_key, revoke_key
from serve.gateway.settings import Settings
from serve.triton.launch import TritonServer
from tests.gateway_models import served_models
from tests.serve_http import gateway_thread

pytestmark = pytest.mark.integration
LAST = 5  # bytes of a body, which come later
READ_S = 1.5  # the file of keys is looked at every half a second
TINY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()
LARGE = 400_000
HEAD = json.dumps(
    {"inputs": [{"name": "file", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": LARGE + 4}}]}
).encode()
BINARY = HEAD + LARGE.to_bytes(4, "little") + b"a" * LARGE
OF_BINARY = f"Inference-Header-Content-Length: {len(HEAD)}\r\n"
SETTINGS = "/v2/logging"
ROUTES = {
    "short": ("/v2/models/tiny/infer", "", TINY),
    "large": ("/v2/models/files/infer", OF_BINARY, BINARY),
    "predict": ("/predict/tiny", "Content-Type: application/json\r\n", b'{"x": [1, 2, 3, 4]}'),
    "feedback": ("/feedback", "Content-Type: application/json\r\n", b'{"id": "a", "correct": true}'),
    "admin": (SETTINGS, "", b"{}      "),
}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with served_models(tmp_path_factory.mktemp("revoked")) as server:
        yield server


def revoke(file: Path, secret: str) -> None:
    revoke_key(file, "changing")


def narrow(file: Path, secret: str) -> None:
    """The same key may ask another model, and nothing else."""
    told = json.loads(file.read_text())
    for key in told["keys"]:
        if key["name"] == "changing":
            key.update(models=["other"], admin=False, feedback=False)
    file.write_text(json.dumps(told))


def nothing(file: Path, secret: str) -> None:
    """The key stays as it is."""


@pytest.mark.parametrize(("change", "status"), [(revoke, 401), (narrow, 403), (nothing, 200)])
def test_a_body_that_comes_after_its_key_changed_is_held_against_what_it_may_now(
    triton: TritonServer, tmp_path: Path, change: Callable[[Path, str], None], status: int
) -> None:
    """Whichever way it is asked: the first halves of all have come as the key changes."""
    file = tmp_path / "keys.json"
    secret = add_key(file, "changing", admin=True)[0]
    add_key(file, "other")
    settings = Settings(upstream=(f"http://{triton.http_address}",), port=0, keys=file, state=tmp_path / "none.db")
    with gateway_thread(settings) as url, ExitStack() as stack:
        host, port = url.removeprefix("http://").split(":")
        connections = {}
        for route, (path, headers, body) in ROUTES.items():
            connection = stack.enter_context(closing(socket.create_connection((host, int(port)))))
            connection.sendall(
                f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {secret}\r\nContent-Length: {len(body)}\r\n"
                f"{headers}Connection: close\r\n\r\n".encode()
            )
            connection.sendall(body[:-LAST])
            connections[route] = connection
        time.sleep(0.2)
        change(file, secret)
        time.sleep(READ_S)
        told = {}
        for route, connection in connections.items():
            connection.sendall(ROUTES[route][2][-LAST:])
            told[route] = b"".join(iter(partial(connection.recv, 65536), b""))
    expected = {200: "200|404|400"}.get(status, str(status))  # of the models there are, not all can be asked so
    wrong = {
        route: answer[:300]
        for route, answer in told.items()
        if not re.match(rf"HTTP/1.1 (?:{expected}) ".encode(), answer)
    }
    assert not wrong
