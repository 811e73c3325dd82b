"""Workers that lie or are strangers: nothing of theirs is among the figures, and they are given nothing."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import orjson
import pytest
import uvloop

from compress.errors import ServerError
from serve.load.run import run_load
from serve.load.send.channel import Channel
from serve.load.send.greeting import COORDINATOR, SPEAKS, WORKER, place, signed
from serve.load.send.wire import WireError, pack
from tests.load_servers import at_once, options, served

pytestmark = pytest.mark.clock

PATIENT = {"warmup": 0, "token": "secret", "max_lateness_ms": 1e6}


def frame(connection: socket.socket) -> dict[str, Any]:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = connection.recv(count - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    text, blob = struct.unpack(">II", exactly(8))
    message: dict[str, Any] = orjson.loads(exactly(text + blob)[:text])
    return message


@contextmanager
def fake_worker(
    *,
    token: str = "secret",
    batches: bytes = b"",
    clock: dict[str, Any] | None = None,
    welcome: Callable[[dict[str, Any]], dict[str, Any]] = lambda message: message,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a worker that says what it is told to, and what it heard."""
    heard: list[dict[str, Any]] = []

    def talk() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(pack({"is": "worker", "speaks": SPEAKS, "challenge": "c"}))
            heard.append(frame(connection))
            assert heard[0]["signed"] == signed("secret", COORDINATOR, "c", heard[0]["challenge"])
            answer = {"is": "welcome", "signed": signed(token, WORKER, "c", heard[0]["challenge"]), "place": place()}
            connection.sendall(pack(welcome(answer)))
            while True:
                heard.append(frame(connection))
                match heard[-1].get("do"):
                    case "clock":
                        connection.sendall(pack(clock or {"is": "clock", "ns": time.perf_counter_ns()}))
                    case "prepare":
                        connection.sendall(pack({"is": "ready"}))
                    case "start":
                        time.sleep(0.2)
                        connection.sendall(batches)

    def run() -> None:
        with suppress(EOFError, OSError):
            talk()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", heard
    thread.join(5)


def test_a_worker_does_not_begin_where_the_address_is_its_own_machines() -> None:
    """It would send to itself, with the key."""

    def elsewhere(message: dict[str, Any]) -> dict[str, Any]:
        return message | {"place": "another machine"}

    with served(at_once) as server, fake_worker(welcome=elsewhere) as (address, heard):
        with pytest.raises(ServerError, match="won't send the load from worker 1"):
            run_load(options(server, rate="50", duration=1, worker=(address,), **PATIENT))
        assert all(message.get("do") != "prepare" for message in heard)


def test_who_does_not_know_the_token_is_given_no_request() -> None:
    with served(at_once) as server, fake_worker(token="guessed") as (address, heard):
        with pytest.raises(ServerError, match="won't send the load to the worker") as caught:
            run_load(options(server, rate="50", duration=1, worker=(address,), key="the-key", **PATIENT))
        assert len(heard) == 1
    assert "does not know the token" in caught.value.why


MS = 1_000_000
FINE = (0, 0, 0, MS, 10, 0, 0)
BATCH: dict[str, Any] = {
    "is": "batch", "kinds": [""], "right": 0, "labelled": 0, "began": 1, "warmup": 0, "waiting": 0, "cpu_s": 0.1,
    "memory_bytes": 1, "ended": "whole",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "records"),
    [
        ({"kinds": ["", ["x"]]}, [FINE]),
        ({"kinds": ["", "\x1b[2Jx"]}, [FINE]),
        ({"kinds": []}, []),
        ({}, [(0, 0, 0, MS, 1, 0, 5)]),
        ({}, [(0, 0, 0, MS, 1, 0, -1)]),
        ({}, [(0, 0, 0, MS, 1, 77, 0)]),
        ({}, [(0, 0, 0, MS, -1, 0, 0)]),
        ({}, [(-(1 << 63), 0, 0, MS, 1, 0, 0)]),
        ({}, [(1000 * MS, 1000 * MS, 1000 * MS, MS, 1, 0, 0)]),
        ({}, [(0, 0, 0, 6 * 10**15, 1, 0, 0)]),
        ({"began": 9}, [(second * 1000 * MS,) * 4 + (1, 0, 0) for second in range(9)]),
        ({}, [FINE, FINE]),
        ({"right": 9, "labelled": 1}, [FINE]),
        ({"began": None}, [FINE]),
        ({"began": True}, [FINE]),
        ({"cpu_s": "NaN"}, [FINE]),
        ({"cpu_s": -1}, [FINE]),
        ({"ended": "maybe"}, [FINE]),
        ({"ended": "cut"}, [FINE]),
    ],
)
def test_figures_that_can_not_be_make_the_run_invalid(changes: dict[str, Any], records: list[tuple[int, ...]]) -> None:
    blob = b"".join(struct.pack("=7q", *record) for record in records)
    good = pack(BATCH | {"began": 0, "ended": ""})
    with served(at_once) as server, fake_worker(batches=good + pack(BATCH | changes, blob)) as (address, _):
        result = run_load(options(server, rate="50", duration=1, worker=(address,), **PATIENT))
    assert any("worker 1" in why and "was lost" in why for why in result.invalid)


def test_more_answers_than_were_due_make_the_run_invalid() -> None:
    blob = struct.pack("=7q", *FINE) * 500
    with served(at_once) as server, fake_worker(batches=pack(BATCH | {"began": 500}, blob)) as (address, _):
        result = run_load(options(server, rate="50", duration=1, worker=(address,), **PATIENT))
    assert any("500 were begun" in why for why in result.invalid)


@pytest.mark.parametrize("clock", [{"is": "clock"}, {"is": "clock", "ns": "soon"}, {"is": "clock", "ns": 1.5}])
def test_a_worker_without_a_clock_is_told(clock: dict[str, Any]) -> None:
    with (
        served(at_once) as server,
        fake_worker(clock=clock) as (address, _),
        pytest.raises(ServerError, match="won't work for us") as caught,
    ):
        run_load(options(server, rate="50", duration=1, worker=(address,), **PATIENT))
    assert "clock" in caught.value.why
    assert "TOKEN" not in caught.value.mend


def test_every_way_in_which_a_connection_ends_is_one_error() -> None:
    async def main() -> list[str]:
        told = []
        peers: list[asyncio.StreamWriter] = []
        for end in ("fin", "rst", "abort", "junk"):
            server = await asyncio.start_server(lambda _, writer: peers.append(writer), "127.0.0.1", 0)
            channel = Channel(*await asyncio.open_connection(*server.sockets[0].getsockname()))
            await asyncio.sleep(0.1)
            writer = peers[-1]
            if end == "rst":
                raw = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            elif end == "fin":
                writer.close()
            elif end == "junk":
                writer.write(b"\0\0\0\2\0\0\0\0[]")
            else:
                channel.lose("it was given up")
            with pytest.raises(WireError) as caught:
                await channel.hear()
            told.append(str(caught.value))
            channel.tell({"do": "stop"})  # says nothing
            await channel.close()
            writer.close()
            server.close()
        return told

    assert uvloop.run(main())[2:] == ["it was given up", "it sent a message that is no object"]
