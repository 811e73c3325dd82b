"""Frames that are cheap to send and dear to parse, sent to a gateway before a real Triton: they hold up nobody else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.gateway.access.keys import add_key
from serve.gateway.settings import Settings
from serve.triton.launch import Ports, TritonServer
from tests.integration.test_gateway_connections import CONFIG, MODEL, infer
from tests.serve_http import gateway_thread

CHUNKED = b"POST %b HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
FRAMES = {
    "chunks of a byte": b"1\r\n \r\n" * 200_000,
    "short lines": b"10\r\n                \r\n" * 60_000,
}
ASKED = 30
ALONE = 5  # times as long as without them: generous, as it was 20 to 200 times
SLOWEST_S = 3.0


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("frames")
    (repository / "quick" / "1").mkdir(parents=True)
    (repository / "quick" / "1" / "model.py").write_text(MODEL)
    (repository / "quick" / "config.pbtxt").write_text(CONFIG % "quick")
    with TritonServer(repository, ports=Ports(0, 0, 0)) as server:
        yield server


@pytest.mark.parametrize("kind", list(FRAMES))
def test_who_has_no_key_holds_nobody_up_by_its_frames(triton: TritonServer, tmp_path: Path, kind: str) -> None:
    keys, ends = tmp_path / "keys.json", threading.Event()
    key = add_key(keys, "honest")[0]
    with gateway_thread(Settings(upstream=(f"http://{triton.http_address}",), port=0, keys=keys)) as url:
        host, port = url.removeprefix("http://").split(":")

        def send() -> None:
            while not ends.is_set():
                with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=30) as client:
                    client.sendall(CHUNKED % b"/v2/models/quick/infer")
                    while not ends.is_set():
                        client.sendall(FRAMES[kind])

        def ask() -> float:
            started = time.monotonic()
            for _ in range(ASKED):
                assert infer(f"{host}:{port}", key, "quick", 0.0)[0] == 200
            return time.monotonic() - started

        ask()
        alone = ask()
        senders = [threading.Thread(target=send) for _ in range(4)]
        for each in senders:
            each.start()
        try:
            time.sleep(0.5)
            assert ask() < SLOWEST_S + ALONE * alone
        finally:
            ends.set()
            for each in senders:
                each.join()
