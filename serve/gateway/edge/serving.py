"""uvicorn's server: without its signal handlers, with an acceptor of our own, and telling of what it cuts."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import uvicorn
from uvicorn.config import STARTUP_FAILURE

from serve.gateway.access.addresses import plain
from serve.gateway.access.handshakes import Handshakes
from serve.gateway.access.memory import Memory
from serve.gateway.edge.accepting import Acceptor
from serve.gateway.edge.records import RecordsContext

__all__ = ["Serving", "first"]

FRESH_S, LOOKS = 0.2, 20
logger = logging.getLogger(__name__)


class Serving(uvicorn.Server):
    """uvicorn without its signal handlers (`serve up` has a Triton to stop, too), which tells of what it cuts.

    Args:
        config: uvicorn's.
        direct: how many requests are on the short way, which is no task.
        models: whose requests are in flight, in words.
        memory: counts connections that are refused.
        handshakes: bounds those of TLS.
        greeting_s: that one may take, in seconds.
        busy: whether requests are under way, for which those who take connections leave time.

    Attributes:
        listening: set once it does.
        hurry: to be set where it ends, and is not to wait for requests any longer.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        direct: Callable[[], int],
        models: Callable[[], str],
        memory: Memory,
        handshakes: Callable[[ssl.SSLContext], Handshakes],
        greeting_s: float,
        busy: Callable[[], bool],
    ) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.hurry = asyncio.Event()
        self._direct = direct
        self._models = models
        self._memory = memory
        self._handshakes = handshakes
        self._greeting_s = greeting_s
        self._busy = busy

    def greeted(self) -> set[tuple[str, int]]:
        """Addresses and ports of the clients whose connections are made, over TLS after the handshake."""
        clients = (getattr(each, "client", None) for each in self.server_state.connections)
        return {(plain(client[0]), client[1]) for client in clients if client is not None}

    async def stop_listening(self) -> None:
        """Take what the system holds of connections, and let each say what it came for, which it does at once."""
        acceptors: list[Acceptor] = self.servers  # type: ignore[assignment]
        for each in acceptors:
            each.take_the_rest()
        for _ in range(LOOKS):
            if not any(each.beginning for each in acceptors) and not any(
                getattr(each, "is_fresh", False) for each in self.server_state.connections
            ):
                break
            await asyncio.sleep(FRESH_S / LOOKS)

    async def _wait_tasks_to_complete(self) -> None:
        waiting = asyncio.ensure_future(super()._wait_tasks_to_complete())
        try:
            await first(waiting, self.hurry)
        except asyncio.CancelledError:
            self._tell_of_cut(f"after drain_timeout_s = {self.config.timeout_graceful_shutdown}")
            raise
        finally:
            waiting.cancel()
        if self.hurry.is_set():  # not uvicorn's own way, which leaves out what the app has to end
            self._tell_of_cut("at once, as it was told to")
            for task in self.server_state.tasks:
                task.cancel()

    def _tell_of_cut(self, when: str) -> None:
        waiting = sum(len(getattr(each, "pipeline", ())) for each in self.server_state.connections)
        cut = len(self.server_state.tasks) + self._direct() + waiting
        if cut:
            logger.warning("the gateway ends %s; requests cut: %d%s", when, cut, self._models())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, but for who takes the connections."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        config = self.config
        tls = None
        if config.ssl_certfile is not None:  # a context of our own, as uvicorn makes one
            tls = RecordsContext(config.ssl_version)
            tls.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        handshakes = None if tls is None else self._handshakes(tls)
        protocol: Any = config.http_protocol_class
        make = partial(protocol, config=config, server_state=self.server_state, app_state=self.lifespan.state)
        acceptors: list[Any] = [
            Acceptor(
                each,
                make,
                self._memory,
                backlog=config.backlog,
                tls=tls,
                handshakes=handshakes,
                greeting_s=self._greeting_s,
                busy=self._busy,
            )
            for each in sockets or ()
        ]
        self.servers = acceptors  # of which uvicorn asks no more than that they close
        self.started = True
        self.listening.set()

    def capture_signals(self) -> Any:
        return nullcontext()


async def first(running: asyncio.Future[None], event: asyncio.Event, *, timeout_s: float | None = None) -> None:
    """Wait for the server to end by itself, the event, or the time."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((running, waiting), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
