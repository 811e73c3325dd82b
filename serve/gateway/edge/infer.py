"""The inference path: a request's bytes go to Triton, the answer's bytes come back, and no tensor is parsed.

It stands in front of the routes and their layers as plain ASGI: they cost several times as much as the whole exchange.
On its way a request passes, in this order: its key, the key's models and rate, a look at whether it would wait too
long (before its body is read), its body, a place among those with Triton, and the exchange.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from functools import partial

from starlette.types import Receive, Scope, Send

from serve.gateway.access.gate import Gate
from serve.gateway.access.identity import Identity
from serve.gateway.access.memory import Share
from serve.gateway.access.slots import NoSlotError
from serve.gateway.edge.asking import CLIENT_LEFT, ask_model, unless_client_leaves, until_loaded
from serve.gateway.edge.bodies import growing_body, read_body
from serve.gateway.edge.extensions import RESPOND, STILL
from serve.gateway.edge.infer_head import JSON, MOST_DIGITS, PATH, RETURNED, SAFE, answer_lines, split_headers
from serve.gateway.errors import (
    BadRequestError,
    ClientGoneError,
    EndsError,
    GatewayError,
    Refusal,
    SlowBodyError,
    UpstreamTimeoutError,
    bare,
)
from serve.gateway.observe.telemetry import INFER_ROUTE, Observed, Telemetry
from serve.gateway.oip.contracts import Contracts
from serve.gateway.oip.cost import CHEAP_BYTES
from serve.gateway.oip.encoding import Packed, is_long, unpack
from serve.gateway.oip.protocol import BINARY_HEADER
from serve.gateway.oip.sequence import in_answer
from serve.gateway.on_demand.lease import Lease
from serve.gateway.release.answering import check_down, models_of
from serve.gateway.release.released import Released, is_gone
from serve.gateway.release.releases import Releases
from serve.gateway.settings import Settings
from serve.gateway.upstream.deadline import TIMEOUT_HEADER, patience_s
from serve.http.body import GrowingBody
from serve.http.client import Response
from serve.rollout.plan import Target

__all__ = ["InferEndpoint"]

logger = logging.getLogger(__name__)


class InferEndpoint:
    """POST /v2/models/{model}[/versions/{version}]/infer."""

    def __init__(
        self,
        settings: Settings,
        gate: Gate,
        releases: Releases,
        contracts: Contracts,
        released: Released,
        telemetry: Telemetry,
    ) -> None:
        self._settings = settings
        self._contracts = contracts
        self._gate = gate
        self._releases = releases
        self._released = released
        self._telemetry = telemetry

    async def answered(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer the request if it is one for this endpoint."""
        if scope["method"] != "POST" or (match := PATH.fullmatch(scope["raw_path"])) is None:
            return False
        code = 500
        path, model = match[0], match[1].decode()
        version = match[2].decode() if match[2] is not None else None
        client = scope.get("client")
        observed = self._telemetry.begin(
            INFER_ROUTE, model, client[0] if client else "", _parent(scope) if self._telemetry.tracing else None
        )
        try:
            forwarded, read = split_headers(scope["headers"])
            identity = self._gate.keys.identify(read)
            observed.key = identity.name
            state = scope.setdefault("state", {})
            state["identity"] = identity
            state[STILL] = lambda: self._gate.keys.again(identity).check_model(model)
            identity.take()  # what it may not ask is counted, too
            identity.check_model(model)
            check_down(self._gate.incidents.outages, model, self._releases.get(model) if version is None else None)
            if observed.trace is not None:
                observed.trace.done("auth")
            share, lease = Share(self._gate.memory, identity.id), self._gate.lease()
            try:
                code = await self._infer(
                    path, model, version, identity, observed, forwarded, read, scope, receive, send, share, lease
                )
            finally:
                lease.close()
                share.close()
        except GatewayError as err:
            code = err.status
            if err.closes:
                await Refusal(err)(scope, receive, send)
            else:  # cheap, because under overload this is what most requests come to
                bare(err)
                await _answer(scope, send, code, [JSON], err.headers, err.body)
        except ClientGoneError as err:
            bare(err)
            code = CLIENT_LEFT
        except asyncio.CancelledError:
            code = EndsError.status
            raise
        except Exception as err:
            logger.exception("an infer request failed inside the gateway")
            bare(err)
            await Refusal(GatewayError("the gateway failed", why=type(err).__name__))(scope, receive, send)
        finally:
            self._telemetry.observe(observed, code)
        return True

    async def _infer(
        self,
        path: bytes,
        model: str,
        version: str | None,
        identity: Identity,
        observed: Observed,
        forwarded: list[tuple[bytes, bytes]],
        read: Mapping[bytes, bytes],
        scope: Scope,
        receive: Receive,
        send: Send,
        share: Share,
        lease: Lease,
    ) -> int:
        settings = self._settings
        length = read.get(BINARY_HEADER)
        if length is not None and not (length.isdigit() and len(length) < MOST_DIGITS):
            raise BadRequestError("Inference-Header-Content-Length is not a number of bytes")
        header_length = int(length) if length is not None else None
        timeout = read.get(TIMEOUT_HEADER)
        patience = patience_s(timeout, settings.timeout_s)
        deadline = time.monotonic() + patience
        release = self._releases.get(model) if version is None else None
        self._gate.check(model, identity, patience, models_of(model, release))
        body: bytes | GrowingBody | None = None
        if (
            header_length is not None
            and release is None
            and timeout is None
            and not self._gate.incidents.suspects.watches(identity.id, model)
        ):
            body = growing_body(scope, read, header_length, settings.max_body_bytes, share)
        if body is None:
            body = await read_body(scope, read.get(b"content-length"), receive, settings.max_body_bytes, share)
        observed.received = len(body)
        packed: Packed | None = None
        trace = observed.trace
        if trace is not None:
            forwarded = [header for header in forwarded if header[0] != b"traceparent"]
            forwarded.append((b"traceparent", trace.header))
            trace.done("receive")
        if isinstance(body, bytes) and b"content-encoding" in read:
            encoding, most = read[b"content-encoding"], settings.max_body_bytes
            if header_length is None and is_long(body):
                packed = Packed(body, encoding, most)
            else:
                body = await unpack(body, encoding, most, share, self._gate.long_work)
        await until_loaded(self._gate, lease, models_of(model, release), identity.id, deadline, scope, receive)
        kept = release.kept if release is not None else Target(model, version)
        seconds = None if timeout is None else patience
        fitting = self._contracts.fitted(
            kept, body if packed is None else packed, header_length, shared_memory=identity.admin, seconds=seconds,
            digest=identity.digest, deadline=deadline,
        )  # fmt: skip
        size = len(body) if header_length is None else header_length
        if packed is not None or size > CHEAP_BYTES:  # it may have to wait
            fitting = unless_client_leaves(scope, receive, fitting)
        body, changed, sequence = await fitting
        if packed is not None:
            share.take(len(body))
        if changed is not None and changed != header_length:
            forwarded = [header for header in forwarded if header[0] != BINARY_HEADER]
            forwarded.append((BINARY_HEADER, b"%d" % changed))
        if sequence is not None and sequence.renamed:  # its id may have to be read in the answer
            forwarded = [header for header in forwarded if header[0] != b"accept-encoding"]
        place, turn, stays, batcher = None, None, None, None
        if sequence is not None:
            place = sequence.place
            asked = Target(model, version)
            stays, batcher = await self._releases.begun.who(self._contracts, asked, release, sequence)
            await lease.need([stays.model], identity.id, deadline)
            path = stays.path.encode()
            turn = self._gate.slots.asked(batcher, stays, sequence, identity.id)
        for_slot_s = self._gate.slots.longest_s if turn is not None and turn.begins else math.inf
        if for_slot := time.monotonic() + for_slot_s < deadline:
            deadline = time.monotonic() + for_slot_s

        async def ask(body: bytes | GrowingBody) -> Response:
            left = deadline - time.monotonic()
            if turn is not None:
                turn.sends()
            return await self._released.infer(
                release, path, identity, scope["headers"], forwarded, body, left, place, stays,
                waits=turn is not None and turn.waits,
            )  # fmt: skip

        send_it = partial(
            ask_model, self._gate, identity, model, scope=scope, receive=receive, deadline=deadline, size=len(body),
            beside=self._releases.beside(stays or Target(model, version), release), turn=turn, release=release,
            stays=stays,
        )  # fmt: skip
        status: int | None = None
        try:
            try:
                response = await send_it(partial(ask, body), body=body, trace=trace)
            except SlowBodyError:
                if isinstance(body, bytes):
                    raise
                whole = await body.wait()
                response = await send_it(partial(ask, whole), body=whole, trace=trace)
            except UpstreamTimeoutError:
                if for_slot:
                    raise NoSlotError(for_slot_s) from None
                raise
            status = response.status
        finally:
            if turn is not None:
                turn.leave(status)
        if sequence is not None and stays is not None:
            self._releases.begun.answered(
                asked, stays, sequence, batcher, response.status, gone=is_gone(response.status, response.body)
            )
            response = in_answer(sequence, response)
        if response.held is None:  # else it counts for the key already
            self._gate.memory.check_for(identity.id, len(response.body))
        elif release is None:  # a copy may wait to be compared with it
            response.held.close()  # from here on it counts where it waits for its reader
        returned = [header for header in response.headers if header[0] in RETURNED]
        observed.sent = len(response.body)
        await _answer(scope, send, response.status, returned, identity.limits(), response.body)
        return response.status


async def _answer(
    scope: Scope,
    send: Send,
    status: int,
    headers: list[tuple[bytes, bytes]],
    own: list[tuple[bytes, bytes]],
    body: bytes,
) -> None:
    """Answer in one piece where the server can, else by ASGI's messages.

    Args:
        headers: that may come from elsewhere; they are checked.
        own: headers of the gateway's making.
    """
    respond = scope.get("extensions", {}).get(RESPOND)
    if respond is not None and respond(status, answer_lines(headers, own), body):
        return
    headers = [*headers, *own, *SAFE, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _parent(scope: Scope) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == b"traceparent"), None)
