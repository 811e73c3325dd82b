"""HTTPS: the gateway's own certificate."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
import uvloop

from compress.errors import ServerError
from serve.gateway import server as server_module
from serve.gateway.access import handshakes
from serve.gateway.server import check_settings, serve_gateway
from serve.gateway.settings import Settings
from tests.certificates import self_signed
from tests.serve_http import gateway_thread, scripted_server
from tests.unit.serve.gateway.test_upstream import echo

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl to make a certificate")

HEAD = b'{"inputs":[{"name":"x","datatype":"UINT8","shape":[300000],"parameters":{"binary_data_size":300000}}]}'


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return self_signed(tmp_path)


def test_requests_are_answered_over_tls_and_over_nothing_less(pair: tuple[Path, Path]) -> None:
    async def main() -> None:
        stop = asyncio.Event()
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        async with scripted_server(echo) as triton:
            settings = Settings(
                upstream=(triton.url,),
                port=0,
                tls_certificate=pair[0],
                tls_key=pair[1],
                drain_delay_s=0,
                validate=False,
            )
            running = asyncio.ensure_future(serve_gateway(settings, stop=stop, on_ready=ready.set_result))
            url = await ready
            assert url.startswith("https://")
            port = int(url.rpartition(":")[2])
            context = ssl.create_default_context(cafile=str(pair[0]))
            for target, body in (("/v2/models/m/infer", HEAD + b"x" * 300_000), ("/healthz", b"")):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
                method = "POST" if body else "GET"
                head = (
                    f"{method} {target} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
                    f"inference-header-content-length: {len(HEAD)}\r\n\r\n"
                )
                writer.write(head.encode() + body)
                answer = await asyncio.wait_for(reader.read(), 10)
                assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
                assert answer.endswith(body or b"}")
                assert (b"strict-transport-security" in answer) == (not body)
                writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
            assert b"200" not in await asyncio.wait_for(reader.read(), 10)
            writer.close()
            stop.set()
            await running

    uvloop.run(main())


def test_connections_that_never_greet_are_bounded_by_address(pair: tuple[Path, Path]) -> None:
    """They are nobody's requests yet: what counts connections hears of one once it has greeted."""

    async def silent(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))

    async def alive(port: int, context: ssl.SSLContext) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        await writer.wait_closed()

    async def main(port: int) -> None:
        context = ssl.create_default_context(cafile=str(pair[0]))
        opened = [await silent(port) for _ in range(60)]
        ends = {asyncio.ensure_future(reader.read()) for reader, _ in opened}
        async with asyncio.timeout(45):  # less than the 60 s that a handshake may take
            while sum(end.done() for end in ends) < 40:
                await asyncio.wait([end for end in ends if not end.done()], return_when=asyncio.FIRST_COMPLETED)
        await alive(port, context)
        for _, each in opened:
            each.close()
        closed = (each.wait_closed() for _, each in opened)
        await asyncio.gather(*ends, *closed, return_exceptions=True)
        await alive(port, context)  # it has seen them close

    settings = Settings(
        upstream=("http://127.0.0.1:1",), port=0, tls_certificate=pair[0], tls_key=pair[1], max_clients=40
    )
    with gateway_thread(settings) as url:
        uvloop.run(main(int(url.rpartition(":")[2])))


@pytest.mark.parametrize(("addresses", "of_each", "head_s"), [(8, 20, 60), (1, 10, 2)], ids=["too many", "too long"])
def test_handshakes_that_are_not_finished_are_bounded_in_number_and_time(
    pair: tuple[Path, Path], addresses: int, of_each: int, head_s: int
) -> None:
    async def main(port: int) -> None:
        context = ssl.create_default_context(cafile=str(pair[0]))
        opened = [
            await asyncio.open_connection("127.0.0.1", port, local_addr=(f"127.0.0.{2 + at}", 0))
            for at in range(addresses)
            for _ in range(of_each)
        ]
        ends = {asyncio.ensure_future(reader.read()) for reader, _ in opened}
        few = 64 if addresses > 1 else 0
        kept_reader, kept = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        kept.write(b"GET /healthz HTTP/1.1\r\n")
        async with asyncio.timeout(45):
            while sum(not end.done() for end in ends) > few:
                await asyncio.wait([end for end in ends if not end.done()], return_when=asyncio.FIRST_COMPLETED)
        if addresses > 1:
            kept.write(b"host: a\r\nconnection: close\r\n\r\n")
            assert (await kept_reader.read()).startswith(b"HTTP/1.1 200"), "who has greeted stays"
        kept.close()
        for _, each in opened:
            each.close()
        await asyncio.gather(*ends, kept.wait_closed(), return_exceptions=True)

    settings = Settings(
        upstream=("http://127.0.0.1:1",), port=0, tls_certificate=pair[0], tls_key=pair[1], max_clients=200,
        head_timeout_s=head_s,
    )  # fmt: skip
    with gateway_thread(settings) as url:
        uvloop.run(main(int(url.rpartition(":")[2])))


def greeting() -> bytes:
    """What a client says first."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    said = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), said)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return said.read()


def test_an_address_that_replays_a_greeting_gets_few_answers_and_others_theirs(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would cost a signature; with what one is taken to cost here, an address has about ten at once."""
    monkeypatch.setattr(handshakes, "AT_ONCE_S", 100.0)
    monkeypatch.setattr(server_module, "handshake_s", lambda _: 2.5)
    replayed = greeting()

    async def answered(port: int) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        try:
            writer.write(replayed)
            return bool(await reader.read(1))
        except ConnectionError:
            return False
        finally:
            writer.transport.abort()

    async def main(port: int) -> None:
        async with asyncio.timeout(60):
            begun = [await answered(port) for _ in range(60)]
            assert all(begun[:9])
            assert sum(begun) < 10 + 60 * 0.1
            context = ssl.create_default_context(cafile=str(pair[0]))
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            writer.write(b"GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            told = await reader.read()
            assert b'gateway_connections_refused_total{why="handshakes"} %d' % begun.count(False) in told
            writer.close()

    settings = Settings(upstream=("http://127.0.0.1:1",), port=0, tls_certificate=pair[0], tls_key=pair[1])
    with gateway_thread(settings) as url:
        uvloop.run(main(int(url.rpartition(":")[2])))


@pytest.mark.parametrize("kind", [["rsa:2048"], ["rsa:4096"], ["ec", "-pkeyopt", "ec_paramgen_curve:P-256"]])
def test_what_a_handshake_costs_is_measured(tmp_path: Path, kind: list[str]) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", *kind, "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    assert 1e-5 < handshakes.handshake_s(context) < 1
    context.verify_mode = ssl.CERT_REQUIRED
    assert handshakes.handshake_s(context) == handshakes.UNKNOWN_S, "it asks for what our client has not"


def test_a_key_with_a_pass_phrase_is_refused_without_asking_for_it(pair: tuple[Path, Path], tmp_path: Path) -> None:
    encrypted = tmp_path / "encrypted.pem"
    command = ["openssl", "pkey", "-in", str(pair[1]), "-aes256", "-passout", "pass:secret", "-out", str(encrypted)]
    subprocess.run(command, check=True, capture_output=True)

    with pytest.raises(ServerError, match="can't use the certificate") as caught:
        check_settings(Settings(upstream=("http://127.0.0.1:1",), tls_certificate=pair[0], tls_key=encrypted))

    assert "unencrypted" in str(caught.value)
