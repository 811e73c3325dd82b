"""A generator process: told what to send over a socket, hands on what it measured.

    python -m serve.load.send.worker FD     a child of `serve load`, on a socket that it was given
    serve load worker --port 9200           on another machine

A worker that listens proves nothing to strangers and does nothing for them, and no stranger keeps it from its
coordinators: who has not shown yet that it knows the token has no turn.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import uvloop

from compress.errors import ServerError
from serve.http.tls import server_context
from serve.load.ask.target import is_loopback
from serve.load.send.channel import Channel
from serve.load.send.conversation import Conversation
from serve.load.send.greeting import BUSY, COORDINATOR, SPEAKS, TOKEN, WORKER, place, same, signed
from serve.load.send.wire import WireError

__all__ = ["listen"]

GREETING_BYTES, GREETING_S = 4096, 10
MOST_GREETINGS = 64
LEAVE_S = 5.0


async def _child(fd: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    await Conversation(Channel(reader, writer)).hold()


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
        once: end when the first coordinator that had a load sent has left.

    Raises:
        ServerError: it may not listen there, or can't.
    """
    context = None if tls is None else server_context(*tls)
    worker = _Worker(token, allow_remote=allow_remote, on_event=on_event, once=once)
    uvloop.run(worker.listen(host, port, context))


class _Worker:
    def __init__(self, token: str, *, allow_remote: bool, on_event: Callable[[str], None], once: bool) -> None:
        self._token = token
        self._allow_remote = allow_remote
        self._on_event = on_event
        self._once = once
        self._stop = asyncio.Event()
        self._greetings: dict[Channel, None] = {}
        self._conversation: Conversation | None = None

    async def listen(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        if not self._token and not await is_loopback(host):
            raise ServerError(
                f"won't listen at {host}",
                why="whoever reaches a worker there could send load with it",
                mend="set SERVE_LOAD_TOKEN to the same long random text here and for `serve load`",
            )
        try:
            waits = None if context is None else GREETING_S
            server = await asyncio.start_server(self._talk, host, port, ssl=context, ssl_handshake_timeout=waits)
        except OSError as err:
            raise ServerError(
                f"can't listen at {host}:{port}", why=err.strerror or str(err), mend="name another --port or --host"
            ) from err
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        how = "" if context is None else " over TLS"
        self._on_event(f"worker listens{how} at {host}:{server.sockets[0].getsockname()[1]}")
        await self._stop.wait()
        server.close()
        if self._conversation is not None:  # what was measured goes to its coordinator, as far as that takes it
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._conversation.leave()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = (writer.get_extra_info("peername") or ("?",))[0]
        channel = Channel(reader, writer)
        try:
            if await self._is_known(channel, peer):
                await self._serve(channel, peer)
        except WireError:
            pass
        finally:
            await channel.close()

    async def _serve(self, channel: Channel, peer: str) -> None:
        conversation = self._conversation = Conversation(channel, allow_remote=self._allow_remote)
        try:
            self._on_event(f"sending load for {peer}")
            await conversation.hold()
            self._on_event(f"done for {peer}")
        finally:
            self._conversation = None
            if self._once and conversation.began:
                self._stop.set()

    async def _is_known(self, channel: Channel, peer: str) -> bool:
        """Whether it knows the token, and it is its turn; it is told.

        Raises:
            WireError: it left.
        """
        if len(self._greetings) >= MOST_GREETINGS:
            next(iter(self._greetings)).lose("it took too long")
        self._greetings[channel] = None
        ours = secrets.token_hex(16)
        try:
            channel.tell({"is": "worker", "speaks": SPEAKS, "challenge": ours})
            async with asyncio.timeout(GREETING_S):
                message, _ = await channel.hear(GREETING_BYTES)
        except TimeoutError:
            return False
        finally:
            self._greetings.pop(channel, None)
        theirs = str(message.get("challenge", ""))
        if not same(message.get("signed"), signed(self._token, COORDINATOR, ours, theirs)):
            channel.tell({"is": "failed", "about": TOKEN, "why": "the token is another one"})
            self._on_event(f"turned {peer} away: the token is another one")
            return False
        if self._conversation is not None or self._stop.is_set():
            channel.tell({"is": "failed", "about": BUSY, "why": "the worker is busy with another load"})
            return False
        channel.tell({"is": "welcome", "signed": signed(self._token, WORKER, ours, theirs), "place": place()})
        return True


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which asks for what was measured so far
    if len(sys.argv) > 2:
        os.sched_setaffinity(0, {int(sys.argv[2])})
    uvloop.run(_child(int(sys.argv[1])))


if __name__ == "__main__":
    main()
