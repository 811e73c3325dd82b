"""TLS records that are cheap to send and dear to decrypt: they are in turns, and those that bring nothing end it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve.gateway.access.memory import Memory
from serve.gateway.edge.parsing import Parsing
from serve.gateway.edge.records import (
    FREE_RECORDS,
    MOST_GREETING,
    MOST_RECORDS,
    MOST_SILENT,
    SMALL_BYTES,
    RecordsContext,
)
from serve.gateway.settings import Settings
from tests.serve_http import gateway_thread, in_loop
from tests.tls_records import ALERT, Speaker, certified, insecure

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate")

HEALTH = b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certified(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def context(pair: tuple[Path, Path]) -> RecordsContext:
    made = RecordsContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(*pair)
    return made


class Transport:
    """What is asked of one."""

    closing = False
    resumed = 0

    def is_closing(self) -> bool:
        return self.closing

    def is_reading(self) -> bool:
        return True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        self.resumed += 1


class Pair:
    """A client and a server that have greeted; no network, no event loop's transport."""

    def __init__(self, context: RecordsContext, turns: Parsing, address: str = "a") -> None:
        self.incoming, self.back = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.said = ssl.MemoryBIO()
        self.server = context.wrap_bio(self.incoming, self.back, server_side=True)
        self.client = insecure().wrap_bio(self.back, self.said)
        self.transport = Transport()
        done = 0
        while done < 2:
            done = 0
            for side in (self.client, self.server):
                try:
                    side.do_handshake()
                    done += 1
                except ssl.SSLWantReadError:
                    self.incoming.write(self.said.read())
        self.incoming.write(self.said.read())
        given_as: Any = self.transport
        self.server.bind(turns, address, given_as)

    def write(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.client.write(piece)
        self.incoming.write(self.said.read())

    def read(self) -> bytes:
        """As uvloop does in one go."""
        found = b""
        with contextlib.suppress(ssl.SSLWantReadError):
            while self.incoming.pending or self.server.pending():
                found += self.server.read(1 << 18)
        return found


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([1, 2, 100, 1000, 1024, 16384]), max_size=30), st.integers(1, 30_000), st.booleans())
def test_what_was_written_is_read_in_whatever_pieces_it_comes(
    context: RecordsContext, sizes: list[int], piece: int, busy: bool
) -> None:
    async def main() -> None:
        turns = Parsing(Memory(1 << 30), 16)
        both = Pair(context, turns)
        written = b"".join(bytes([at]) * size for at, size in enumerate(sizes))
        for at, size in enumerate(sizes):
            both.client.write(bytes([at]) * size)
        sent, found = both.said.read(), b""
        turns.spend(100 * busy)
        for at in range(0, len(sent), piece):
            both.incoming.write(sent[at : at + piece])
            found += both.read()
        async with asyncio.timeout(20):
            while len(found) < len(written):
                await asyncio.sleep(0.001)
                found += both.read()
        assert found == written
        assert turns.waiting == 0

    asyncio.run(main())


@in_loop
async def test_many_small_records_wait_for_their_turn_and_large_ones_for_none(pair: Any) -> None:
    context = RecordsContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    memory = Memory(1 << 30)
    turns = Parsing(memory, MOST_RECORDS)
    tiny, other, large = (Pair(context, turns, address) for address in "abc")
    tiny.write(*[b"x"] * 11_000)
    first = len(tiny.read())
    assert FREE_RECORDS <= first <= MOST_RECORDS + 64
    assert memory.used > 200_000, "what waits is counted"
    assert turns.waiting == 1
    other.write(*[b"y"] * FREE_RECORDS)
    assert len(other.read()) == FREE_RECORDS, "a few wait for nobody"
    large.write(*[b"z" * SMALL_BYTES] * 60)
    assert len(large.read()) == 60 * SMALL_BYTES
    assert not tiny.read()
    rounds, found = 0, first
    async with asyncio.timeout(60):
        while found < 11_000:
            before = tiny.transport.resumed
            while tiny.transport.resumed == before:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0)
            got = len(tiny.read())
            assert got <= MOST_RECORDS
            found, rounds = found + got, rounds + 1
    assert rounds > 11_000 / (2 * MOST_RECORDS)
    assert memory.used == 0
    assert turns.waiting == 0


@in_loop
async def test_what_waits_at_the_end_is_thrown_away_undecrypted(pair: Any) -> None:
    context = RecordsContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    memory = Memory(1 << 30)
    turns = Parsing(memory, 8)
    for gone in (False, True):
        both = Pair(context, turns)
        turns.spend(1000)
        both.write(*[b"x"] * 3000)
        both.read()
        assert memory.used > 0
        both.transport.closing = not gone
        if gone:
            both.server.leave()
        else:
            both.write(*[b"x"] * 3000)
            assert not both.read()
            assert both.incoming.pending == 0
        assert memory.used == 0
        assert turns.waiting == 0


@in_loop
async def test_where_too_much_waits_the_connection_ends(pair: Any) -> None:
    context = RecordsContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    memory = Memory(1 << 20)
    both = Pair(context, Parsing(memory, 8))
    both.write(*[b"x"] * 11_000)
    with pytest.raises(ssl.SSLError, match="too much waits"):
        both.read()
    assert memory.refused_frames == 1
    assert memory.used == 0


def test_a_greeting_in_tiny_records_is_refused(context: RecordsContext) -> None:
    said, incoming = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        insecure().wrap_bio(ssl.MemoryBIO(), said).do_handshake()
    greeting = said.read()[5:]
    for pieces in (8, MOST_GREETING + 10):
        server = context.wrap_bio(incoming, ssl.MemoryBIO(), server_side=True)
        size = len(greeting) // pieces
        parts = [greeting[at : at + size] for at in range(0, len(greeting), size)]
        incoming.write(b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in parts))
        with pytest.raises(ssl.SSLError, match="too many records" if pieces > 8 else "operation did not complete"):
            server.do_handshake()


def test_what_is_no_record_ends_the_greeting(context: RecordsContext) -> None:
    incoming = ssl.MemoryBIO()
    server = context.wrap_bio(incoming, ssl.MemoryBIO(), server_side=True)
    incoming.write(HEALTH)
    with pytest.raises(ssl.SSLError, match="no record"):
        server.do_handshake()


def told(connection: socket.socket) -> bytes:
    """What the server says until it closes."""
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionError:
        pass
    return found


@pytest.mark.parametrize("kind", ["new keys", "padding alone", "alerts"])
def test_a_connection_whose_records_bring_nothing_is_ended(pair: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    with gateway_thread(_settings(pair)) as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            speaker = Speaker(client, tmp_path / "keys")
            for at in range(10 * MOST_SILENT):
                if kind == "new keys":
                    said = speaker.new_keys()
                elif kind == "alerts":
                    said = speaker.record(b"\x01\x5a", ALERT)
                else:
                    said = speaker.record(b"" if at % 20 else b"\n")
                try:
                    client.sendall(said)
                except ConnectionError:
                    break
            told(client)


def test_new_keys_now_and_then_are_nobodys_end(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with gateway_thread(_settings(pair)) as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            speaker = Speaker(client, tmp_path / "keys")
            answers, found = MOST_SILENT // 2, b""
            for _ in range(answers):
                client.sendall(speaker.new_keys() + speaker.record(HEALTH))
            while found.count(b"\x17\x03\x03") < answers:
                part = client.recv(65536)
                assert part, "it was cut"
                found += part


def test_small_pieces_written_slowly_or_by_the_thousand_are_answered(pair: tuple[Path, Path]) -> None:
    """Over uvloop's own transport, with others beside it: none is cut."""

    async def main(port: int) -> None:
        async def slowly(size: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=insecure())
            for _ in range(3):
                head = b"POST /predict/m HTTP/1.1\r\nhost: a\r\ncontent-length: 20000\r\n\r\n"
                for at in range(0, len(head), size):
                    writer.write(head[at : at + size])
                    await asyncio.sleep(0.001)
                for _ in range(20_000 // size):
                    writer.write(b" " * size)
                found = await reader.readuntil(b"\r\n\r\n")
                length = int(found.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
            writer.close()
            await writer.wait_closed()

        async with asyncio.timeout(120):
            await asyncio.gather(*(slowly(size) for size in (1, 10, 100, 1000)))

    with gateway_thread(_settings(pair)) as url:
        asyncio.run(main(int(url.rpartition(":")[2])))


def _settings(pair: tuple[Path, Path]) -> Settings:
    return Settings(upstream=("http://127.0.0.1:1",), port=0, tls_certificate=pair[0], tls_key=pair[1])
