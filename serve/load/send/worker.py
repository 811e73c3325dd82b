"""A generator process: told what to send over a socket, hands on what it measured.

    python -m serve.load.send.worker FD     a child of `serve load`, on a socket that it was given
    serve load worker --port 9200           on another machine

A worker that listens proves nothing to strangers and does nothing for them: each conversation begins with a number that
it draws, which the other side must return signed with the token that both know (HMAC-SHA256).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

from compress.errors import ServerError
from serve.http.tls import server_context
from serve.load.ask.target import is_loopback
from serve.load.send.generator import Generator
from serve.load.send.job import Job
from serve.load.send.wire import MOST_BYTES, WireError, frame_of_batch, pack, read

__all__ = ["listen", "signed"]

GREETING_BYTES, GREETING_S = 4096, 10
START_LATEST_NS = 60 * 1_000_000_000


def signed(token: str, challenge: str) -> str:
    """The answer to a worker's challenge."""
    return hmac.new(token.encode(), challenge.encode(), hashlib.sha256).hexdigest()


async def serve_conversation(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, allow_remote: bool = True
) -> None:
    """Prepare and run load after load, until the other side leaves.

    Args:
        allow_remote: whether to send load to other machines than this one.
    """
    generator: Generator | None = None
    running: asyncio.Task[None] | None = None
    try:
        while True:
            message, blob = await read(reader)
            match message.get("do"):
                case "clock":
                    writer.write(pack({"is": "clock", "ns": time.perf_counter_ns()}))
                case "prepare":
                    generator = None
                    try:
                        job = Job.from_wire(message["job"], blob)
                        if not allow_remote and not await is_loopback(job.host):
                            why = f"this worker sends load to its own machine only, not to {job.host}"
                            raise ValueError(f"{why}; start it with --allow-remote")
                        made = Generator(
                            job,
                            lambda batch: writer.write(frame_of_batch(batch)),
                            part=int(message["part"]),
                            parts=int(message["parts"]),
                        )
                        await made.prepare()
                    except (ValueError, KeyError, TypeError, OSError, ImportError) as err:
                        writer.write(pack({"is": "failed", "why": str(err)}))
                        continue
                    generator = made
                    writer.write(pack({"is": "ready"}))
                case "start" if generator is not None:
                    at_ns = int(message["at_ns"])
                    if at_ns - time.perf_counter_ns() > START_LATEST_NS:
                        raise WireError("told to start too late")
                    running = asyncio.ensure_future(generator.run(at_ns))
                case "stop":
                    if generator is not None:
                        generator.stop()
                case _:
                    raise WireError("a message that makes no sense here")
    except WireError:
        pass
    finally:
        if generator is not None:
            generator.stop()
        if running is not None:
            await asyncio.gather(running, return_exceptions=True)
        writer.close()


async def _child(fd: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd), limit=MOST_BYTES)
    await serve_conversation(reader, writer)


def listen(
    host: str,
    port: int,
    *,
    token: str,
    allow_remote: bool,
    on_event: Callable[[str], None],
    tls: tuple[Path, Path] | None = None,
    once: bool = False,
) -> None:
    """Wait for coordinators, one at a time, until interrupted.

    Args:
        host, port: to listen at; port 0 takes a free one.
        token: that a coordinator must know.
        allow_remote: whether to send load to other machines.
        on_event: told where it listens, and who comes.
        tls: PEM files of its certificate and of the key; None for none.
        once: end when the first coordinator has left.

    Raises:
        ServerError: it may not listen there, or can't.
    """
    context = None if tls is None else server_context(*tls)
    uvloop.run(
        _listen(host, port, token=token, allow_remote=allow_remote, on_event=on_event, context=context, once=once)
    )


async def _listen(
    host: str,
    port: int,
    *,
    token: str,
    allow_remote: bool,
    on_event: Callable[[str], None],
    context: ssl.SSLContext | None,
    once: bool,
) -> None:
    if not token and not await is_loopback(host):
        raise ServerError(
            f"won't listen at {host}",
            why="whoever reaches a worker there could send load with it",
            mend="set SERVE_LOAD_TOKEN to the same long random text here and for `serve load`",
        )
    stop = asyncio.Event()
    turn = asyncio.Lock()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = (writer.get_extra_info("peername") or ("?",))[0]
        if turn.locked():
            writer.write(pack({"is": "failed", "why": "the worker is busy with another load"}))
            writer.close()
            return
        async with turn:
            challenge = secrets.token_hex(16)
            writer.write(pack({"is": "worker", "challenge": challenge}))
            try:
                async with asyncio.timeout(GREETING_S):
                    message, _ = await read(reader, GREETING_BYTES)
            except (WireError, TimeoutError):
                writer.close()
                return
            if not hmac.compare_digest(str(message.get("signed", "")), signed(token, challenge)):
                writer.write(pack({"is": "failed", "why": "the token is another one"}))
                writer.close()
                on_event(f"turned {peer} away: the token is another one")
                return
            writer.write(pack({"is": "welcome"}))
            on_event(f"sending load for {peer}")
            await serve_conversation(reader, writer, allow_remote=allow_remote)
            on_event(f"done for {peer}")
            if once:
                stop.set()

    try:
        waits = None if context is None else GREETING_S
        server = await asyncio.start_server(
            talk, host, port, limit=MOST_BYTES, ssl=context, ssl_handshake_timeout=waits
        )
    except OSError as err:
        raise ServerError(
            f"can't listen at {host}:{port}", why=err.strerror or str(err), mend="name another --port or --host"
        ) from err
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    how = "" if context is None else " over TLS"
    on_event(f"worker listens{how} at {host}:{server.sockets[0].getsockname()[1]}")
    await stop.wait()
    server.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which asks for what was measured so far
    if len(sys.argv) > 2:
        os.sched_setaffinity(0, {int(sys.argv[2])})
    uvloop.run(_child(int(sys.argv[1])))


if __name__ == "__main__":
    main()
