"""TLS records that are cheap to send and dear to decrypt, sent to a gateway before a real Triton: they hold up nobody."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.gateway.access.keys import add_key
from serve.gateway.settings import Settings
from serve.triton.launch import Ports, TritonServer
from tests.integration.test_gateway_connections import CONFIG, MODEL
from tests.serve_http import gateway_thread
from tests.tls_records import Speaker, certified, insecure

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate")

HEAD = b"POST /v2/models/quick/infer HTTP/1.1\r\nhost: a\r\ncontent-length: 60000000\r\n%b\r\n"
BODY = json.dumps({"inputs": [{"name": "seconds", "datatype": "FP32", "shape": [1, 1], "data": [[0.0]]}]})
SENDERS = 4
RECORDS = 75_000  # of each: together seconds of a core, far more than the requests alone take
ASKED = 50
FEWEST = 5  # as many times fewer answers as without them: it was hundreds of times


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("records")
    (repository / "quick" / "1").mkdir(parents=True)
    (repository / "quick" / "1" / "model.py").write_text(MODEL)
    (repository / "quick" / "config.pbtxt").write_text(CONFIG % "quick")
    with TritonServer(repository, ports=Ports(0, 0, 0)) as server:
        yield server


@pytest.mark.parametrize("kind", ["of a byte", "of a byte, with a key", "of new keys"])
def test_who_sends_tiny_records_holds_nobody_up(triton: TritonServer, tmp_path: Path, kind: str) -> None:
    keys = tmp_path / "keys.json"
    certificate, private = certified(tmp_path)
    key, greedy = (add_key(keys, name)[0] for name in ("honest", "greedy"))
    settings = Settings(
        upstream=(f"http://{triton.http_address}",), port=0, keys=keys, tls_certificate=certificate, tls_key=private
    )
    with gateway_thread(settings) as url, contextlib.ExitStack() as opened:
        host, port = url.removeprefix("https://").split(":")
        honest = http.client.HTTPSConnection(host, int(port), timeout=60, context=insecure())
        opened.callback(honest.close)

        def ask() -> None:
            honest.request("POST", "/v2/models/quick/infer", BODY, {"authorization": f"Bearer {key}"})
            answer = honest.getresponse()
            answer.read()
            assert answer.status == 200

        def prepared(number: int) -> tuple[socket.socket, bytes]:
            client = opened.enter_context(socket.create_connection((host, int(port)), timeout=60))
            speaker = Speaker(client, tmp_path / f"keys {number}")
            if kind == "of new keys":
                return client, b"".join(speaker.new_keys() for _ in range(RECORDS // 3))
            paid = b"authorization: Bearer %b\r\n" % greedy.encode() if "with a key" in kind else b""
            return client, b"".join((speaker.record(HEAD % paid), *(speaker.record(b" ") for _ in range(RECORDS))))

        def send(client: socket.socket, data: bytes) -> None:
            with contextlib.suppress(OSError):
                client.sendall(data)

        senders = [threading.Thread(target=send, args=prepared(number)) for number in range(SENDERS)]
        ask()
        begun = time.monotonic()
        for _ in range(ASKED):
            ask()
        alone = time.monotonic() - begun
        for each in senders:
            each.start()
        answered, ends = 0, time.monotonic() + alone
        while time.monotonic() < ends:
            ask()
            answered += 1
        opened.close()
        for each in senders:
            each.join()
        assert answered > ASKED / FEWEST
