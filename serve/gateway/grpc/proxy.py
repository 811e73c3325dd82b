"""The Open Inference Protocol over gRPC: messages go to Triton and back as they are, with the identity, limits and
admission of the HTTP side.

Triton hears of no deadline, and of no client that left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc

from compress.errors import ServerError
from serve.gateway.access.ending import by_model
from serve.gateway.access.gate import Gate
from serve.gateway.errors import GatewayError
from serve.gateway.grpc.arriving import UNREAD_STAYS
from serve.gateway.grpc.brought import Brought
from serve.gateway.grpc.channels import SERVICE, channels_to
from serve.gateway.grpc.clients import Clients
from serve.gateway.grpc.coming import Coming
from serve.gateway.grpc.infer import Inference
from serve.gateway.grpc.message import UNPACKED_HERE, Incoming
from serve.gateway.grpc.questions import ADMIN, COSTS, EMPTY, FREE, OF_MODEL, Questions
from serve.gateway.grpc.status import Context, keys_of, refuse, streaming, unary
from serve.gateway.grpc.stream import Streams
from serve.gateway.observe.telemetry import GRPC_ROUTE, Telemetry
from serve.gateway.oip.contracts import Contracts
from serve.gateway.release.releases import Releases
from serve.gateway.settings import Settings
from serve.gateway.upstream.balancer import Balancer
from serve.gateway.upstream.loading import Loading

__all__ = ["GrpcProxy"]

MOST_STREAMS = 128  # calls of one connection at a time; its client keeps further ones back
# Calls that have come and wait to be taken up, one by one. Unless it is told otherwise, the library ends any of them,
# whosever they are, where there are more than 1000. It holds some 16 KB for each, and up to 64 KiB sent with it.
MOST_PENDING, LEAST_PENDING, PENDING_BYTES = 4096, 1000, 64 * 1024
LATER_S = 5.0  # as long as whoever stops it may be late
logger = logging.getLogger(__name__)


class GrpcProxy(grpc.GenericRpcHandler):  # type: ignore[misc]  # as above
    """Answers the service's calls; those that it does not know are unimplemented.

    Args:
        settings: of the gateway; as many gRPC endpoints as HTTP ones.
        gate, releases: as for HTTP.
        balancer: says which Triton is asked.
        telemetry: counts.
        contracts: of the models, which each request is held against.
        loading: what has to hold before a model is loaded.
        most_connections: of clients at a time.

    Attributes:
        streams: answers theirs.
    """

    def __init__(
        self,
        settings: Settings,
        gate: Gate,
        releases: Releases,
        balancer: Balancer,
        telemetry: Telemetry,
        contracts: Contracts,
        loading: Loading,
        *,
        most_connections: int,
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._telemetry = telemetry
        self._calls = channels_to(
            balancer, settings.grpc_upstream, gate.memory, gate.long_work, settings.left_timeout_s
        )
        # Of all that there may be, so much that what is left serves the others.
        of_address = max(1, int(most_connections * settings.max_address_share))
        self._brought = Brought(settings.max_body_bytes)
        self._clients = Clients(
            of_address, max(1, settings.max_clients // 4), self._brought, coming=Coming(gate.memory, gate.long_work)
        )
        self._watching: asyncio.Task[None] | None = None
        self._under_way: set[object] = set()
        incoming = Incoming(settings, gate, releases, contracts, self._clients)
        self._inference = Inference(settings, gate, releases, self._calls, incoming, telemetry)
        self.streams = Streams(settings, gate, self._calls, incoming)
        self._questions = Questions(gate, balancer, self._calls, incoming, loading)
        self._server = grpc.aio.server(
            handlers=[self],
            options=_options(settings, most_connections),
            maximum_concurrent_rpcs=settings.max_clients,
        )

    async def start(self) -> None:
        """Listen.

        Raises:
            ServerError: the port can't be had.
        """
        settings = self._settings
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"{host}:{settings.grpc_port}"
        try:
            if settings.tls_certificate is not None and settings.tls_key is not None:
                pair = (settings.tls_key.read_bytes(), settings.tls_certificate.read_bytes())
                self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
            else:
                self._server.add_insecure_port(address)
            await self._server.start()
            self._watching = asyncio.create_task(self._clients.watch(settings.grpc_port))
        except RuntimeError as err:
            raise ServerError(
                f"the gateway can't listen on {address} for gRPC", why=str(err), mend="choose another --grpc-port"
            ) from err

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, and give those under way so many seconds."""
        ending = asyncio.ensure_future(self._server.stop(grace_s + LATER_S))  # it does not say what it cuts
        await asyncio.wait((ending,), timeout=grace_s)
        if not ending.done() and self._under_way:
            logger.warning("the gateway ends; calls over gRPC cut: %d%s", len(self._under_way), by_model(self._gate))
            self._under_way.clear()
        if not ending.done():
            await self._server.stop(0.0)
        await ending
        if self._watching is not None:
            self._watching.cancel()
        await self._inference.close()
        await self._calls.close()

    def service(self, details: Any) -> Any:
        """gRPC asks this for the handler of a call."""
        name = details.method.removeprefix(SERVICE)
        if not details.method.startswith(SERVICE):
            return None
        if name not in FREE:
            try:
                self._admitted(name, details.invocation_metadata)
            except GatewayError as err:
                return self._refusing(name, err)
        if name == "ModelStreamInfer":
            return streaming(self.streams.answer, self._taken_up)
        if name == "ModelInfer":
            return unary(self._inference.answer, self._taken_up)
        if name in EMPTY | OF_MODEL | ADMIN:
            return unary(partial(self._questions.answer, name), self._taken_up)
        return None

    def _taken_up(self, context: Context) -> None:
        client = self._brought.begins(context.peer())
        call = object()
        self._under_way.add(call)

        def over(_: object) -> None:
            self._under_way.discard(call)
            self._brought.ends(client)

        context.add_done_callback(over)

    def _admitted(self, name: str, metadata: Any) -> None:
        """Whether whoever calls may call this at all, and now: told before a byte of the message is read.

        Raises:
            GatewayError: it may not.
        """
        identity = self._gate.keys.identify(keys_of(metadata))
        if name == "ModelInfer":
            identity.take()
            return
        identity.ask(COSTS.get(name, 1), "opening a stream" if name == "ModelStreamInfer" else "this")
        if name in ADMIN:
            identity.check_admin()

    def _refusing(self, name: str, err: GatewayError) -> Any:
        """A handler that refuses a call without reading its message, as only that of a stream can."""

        async def refused(context: Context) -> bytes:
            if name == "ModelInfer":
                self._telemetry.observe(self._telemetry.begin(GRPC_ROUTE, "", context.peer(), None), err.status)
            refuse(err)

        return unary(refused, self._taken_up)


def _options(settings: Settings, most_connections: int) -> Sequence[tuple[str, int]]:
    pending = max(LEAST_PENDING, min(MOST_PENDING, settings.memory_bytes // 4 // PENDING_BYTES))
    return (
        *UNPACKED_HERE,
        UNREAD_STAYS,
        ("grpc.max_receive_message_length", settings.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", int(settings.reuse_port)),
        ("grpc.max_metadata_size", 64 * 1024),
        ("grpc.max_allowed_incoming_connections", most_connections),
        ("grpc.max_concurrent_streams", MOST_STREAMS),
        ("grpc.server.max_pending_requests", pending),
        ("grpc.server.max_pending_requests_hard_limit", pending),
        ("grpc.server_handshake_timeout_ms", int(1000 * settings.head_timeout_s)),
        ("grpc.max_connection_idle_ms", 1000 * settings.keep_alive_s),
        ("grpc.keepalive_time_ms", 1000 * settings.keep_alive_s),
        ("grpc.keepalive_timeout_ms", int(1000 * settings.head_timeout_s)),
    )
