"""One request over a connection of its own, and who asks by it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from compress.errors import ServerError
from serve.http.ask import config_of
from serve.http.message import Address
from serve.http.once import ask_once
from serve.triton.control import list_models


@contextmanager
def answering(said: bytes) -> Iterator[tuple[Address, list[bytes]]]:
    """A socket that says the same to each who connects; what these sent."""
    sent: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    sent.append(connection.recv(65536))
                    connection.sendall(said)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Address(*server.getsockname()), sent
        server.shutdown(socket.SHUT_RDWR)
    thread.join(60)


def test_status_and_body() -> None:
    with answering(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone") as (address, sent):
        assert ask_once(address, "POST", "/path", b"body", {"X-A": "b"}, timeout_s=60.0) == (404, b"none")
    (head,) = sent
    assert head.startswith(b"POST /path HTTP/1.1\r\n")
    assert b"\r\nX-A: b\r\n" in head


@pytest.mark.parametrize("said", [b"", b"no http\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"])
def test_what_is_no_whole_answer_is_one_error_for_all_who_ask(said: bytes) -> None:
    with answering(said) as (address, _):
        with pytest.raises(ConnectionError):
            ask_once(address, "GET", "/", timeout_s=60.0)
        with pytest.raises(ServerError, match="can't reach the gateway"):
            config_of(f"http://{address}", "tiny")
        with pytest.raises(ServerError, match="can't reach Triton"):
            list_models(f"http://{address}")


def test_triton_is_found_without_a_scheme_but_not_by_another() -> None:
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]") as (address, _):
        assert list_models(str(address)) == []
        with pytest.raises(ServerError, match="can't reach Triton") as caught:
            list_models(f"https://{address}")
        assert "does not start with http://" in caught.value.why
