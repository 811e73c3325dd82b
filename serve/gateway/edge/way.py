"""The way of a request whose form is not Triton's, once it is one of Triton's: every such route takes it."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from starlette.types import Receive, Scope

from serve.gateway.access.gate import Gate
from serve.gateway.access.identity import Identity
from serve.gateway.access.lists import ListPart
from serve.gateway.edge.asking import ask_model
from serve.gateway.oip.contracts import Contracts
from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.oip.protocol import Message
from serve.gateway.release.release import Release
from serve.gateway.release.released import Released
from serve.gateway.release.releases import Releases
from serve.gateway.upstream.upstream import Upstream
from serve.http.client import Response
from serve.rollout.plan import Target

__all__ = ["Way"]


@dataclass(frozen=True)
class Way:
    """The parts of one gateway that such a request meets."""

    gate: Gate
    releases: Releases
    upstream: Upstream
    contracts: Contracts
    released: Released

    async def metadata(self, model: str, release: Release | None, version: str | None = None) -> ModelMetadata:
        """Of who answers for the model, or of a version of it, under its name; raises GatewayError."""
        kept = Target(model, version) if release is None else release.kept
        return replace(await self.upstream.metadata(kept.model, kept.version), name=model)

    async def ask(
        self,
        model: str,
        release: Release | None,
        message: Message,
        identity: Identity,
        scope: Scope,
        receive: Receive,
        deadline: float,
        draw: bytes | None = None,
        part: ListPart | None = None,
        *,
        speaks: bool = True,
    ) -> Response:
        """Triton's answer, or that of one of the two models under release.

        Args:
            message: the infer request; it is held against the model's contract.
            deadline: on the monotonic clock.
            part: where a part of a list stands.
            draw: what keeps requests with the same model under release where nothing keeps their client; None lets
                each be drawn anew.
            speaks: whether its client gets the answer's id, and may speak of it.

        Raises:
            ClientGoneError: the client left.
            GatewayError: there was no answer.
        """
        plain = Target(model)
        if message.header_length is not None:
            head, tail = message.body[: message.header_length], len(message.body) - message.header_length
            kept = plain if release is None else release.kept
            await self.contracts.read(kept, head, tail, shared_memory=False, digest=identity.digest, deadline=deadline)

        async def ask() -> Response:
            left, came = deadline - time.monotonic(), scope["headers"]
            path = plain.path.encode()
            return await self.released.infer(
                release, path, identity, came, message.headers, message.body, left, draw=draw, speaks=speaks
            )

        return await ask_model(
            self.gate,
            identity,
            model,
            ask,
            scope,
            receive,
            deadline,
            message.body,
            size=len(message.body),
            beside=self.releases.beside(plain, release),
            part=part,
            release=release,
        )
