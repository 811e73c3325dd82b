"""What is asked over gRPC besides inference: health, metadata, statistics, and what is an administrator's."""

from __future__ import annotations

import time
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as messages

from serve.gateway.access.gate import Gate
from serve.gateway.errors import BodyTooLargeError, GatewayError
from serve.gateway.grpc.channels import GrpcChannels
from serve.gateway.grpc.message import Incoming, parsed
from serve.gateway.grpc.status import Context, EndedCallError, keys_of, refuse
from serve.gateway.upstream.balancer import Balancer
from serve.gateway.upstream.loading import Loading, overridden
from serve.gateway.upstream.upstream import model_path

__all__ = ["ADMIN", "COSTS", "EMPTY", "FREE", "OF_MODEL", "Questions"]

RESTRICTED = "triton-grpc-protocol-"  # is how Triton wants the names of such headers over gRPC
FREE = frozenset(("ServerLive", "ServerReady"))
EMPTY = FREE | {"ServerMetadata"}  # their messages say nothing: they are not read
MOST_QUESTION_BYTES = 64 * 1024  # of a message that is no inference and loads nothing
LOAD, UNLOAD = "RepositoryModelLoad", "RepositoryModelUnload"
COSTS = {"ModelMetadata": 2, "ModelStatistics": 5, "RepositoryIndex": 5, LOAD: 10, UNLOAD: 10}
OF_MODEL = frozenset(("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"))
ADMIN = frozenset(
    (
        "RepositoryIndex", LOAD, UNLOAD, "TraceSetting", "LogSettings",
        "SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister",
    )
)  # fmt: skip


class Questions:
    """Answers them.

    Args:
        gate: as for HTTP.
        balancer: knows which servers there are.
        calls: to them.
        incoming: reads messages.
        loading: what has to hold before a model is loaded.
    """

    def __init__(
        self, gate: Gate, balancer: Balancer, calls: GrpcChannels, incoming: Incoming, loading: Loading
    ) -> None:
        self._gate = gate
        self._balancer = balancer
        self._calls = calls
        self._incoming = incoming
        self._loading = loading
        self._words = tuple((f"{RESTRICTED}{name}", word) for name, word in gate.incidents.control.items())

    async def answer(self, name: str, context: Context) -> bytes:
        """Everything but inference."""
        try:
            if name == "ServerReady":
                _, ready = await self._balancer.health()
                return _bytes(messages.ServerReadyResponse(ready=ready))
            if name == "ServerLive":
                live, _ = await self._balancer.health()
                return _bytes(messages.ServerLiveResponse(live=live))
            body = b""
            if name not in EMPTY:
                identity = self._gate.keys.identify(keys_of(context.invocation_metadata()))
                body = await self._incoming.message(context, self._incoming.share(context, identity))
                identity = self._gate.keys.again(identity)
                if len(body) > MOST_QUESTION_BYTES and name != LOAD:
                    raise BodyTooLargeError(MOST_QUESTION_BYTES)
                if name in ADMIN:
                    identity.check_admin()
                    if name in (LOAD, UNLOAD):
                        self._gate.check_control()
                    if name == LOAD:
                        body = await self._load(body)
                elif name in OF_MODEL:
                    asked = parsed(getattr(messages, f"{name}Request"), body)
                    model = asked.name
                    if model:
                        identity.check_model(model)
                        model_path(model, asked.version or None)
                        if name == "ModelReady":
                            self._gate.incidents.outages.check(model)
                            if self._gate.will_come(model, asked.version or None):
                                return _bytes(messages.ModelReadyResponse(ready=True))
                        elif name in ("ModelMetadata", "ModelConfig"):  # to ask about one is to ask for it
                            until = time.monotonic() + self._incoming.patience(context)
                            await self._gate.bring(model, identity.id, until)
                    elif not self._gate.keys.open:
                        identity.check_admin()  # statistics of all
            nodes = self._balancer.nodes if name in ADMIN else [None]
            words = self._words if name in ADMIN - {LOAD, UNLOAD} else ()
            answer = b""
            for node in nodes:
                answer = await self._calls.ask(
                    name, body, b"", timeout_s=self._incoming.patience(context), node=node, words=words
                )
            return self._incoming.answering(context, answer)
        except GatewayError as err:
            refuse(err)
        except grpc.aio.AioRpcError as err:
            raise EndedCallError(err.code(), err.details() or "") from None

    async def _load(self, body: bytes) -> bytes:
        """The message that goes on to Triton, once the repository is checked."""
        asked = parsed(messages.RepositoryModelLoadRequest, body)
        model_path(asked.model_name)
        if self._loading.bare:
            if asked.parameters:
                raise overridden()
            body = messages.RepositoryModelLoadRequest(model_name=asked.model_name).SerializeToString()
        await self._loading.check(asked.model_name)
        return body


def _bytes(message: Any) -> bytes:
    found: bytes = message.SerializeToString()
    return found
