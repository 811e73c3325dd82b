"""The Open Inference Protocol over gRPC: messages go to Triton and back as they are, with the identity, limits and
admission of the HTTP side.

Over gRPC Triton hears of deadlines and of clients that left: it drops what still waits in its queues. Messages of a
stream (ModelStreamInfer) are each counted against the key, but wait for no place: a sequence may not be torn apart.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, NoReturn

import grpc
from tritonclient.grpc import service_pb2 as messages

from compress.errors import ServerError
from serve.gateway.balancer import Balancer
from serve.gateway.contracts import Contracts
from serve.gateway.deadline import tells
from serve.gateway.elements import check_shape
from serve.gateway.errors import BadRequestError, BodyTooLargeError, GatewayError, UnauthorizedError
from serve.gateway.gate import Gate
from serve.gateway.grpc_channels import GrpcChannels
from serve.gateway.grpc_request import check_message
from serve.gateway.identity import KEY_HEADERS, Identity
from serve.gateway.loading import Loading, overridden
from serve.gateway.memory import CONNECTION_BYTES, MemoryFullError, Share
from serve.gateway.outages import DEAD_STUB, ModelDownError
from serve.gateway.release import Grade, Release
from serve.gateway.released import grade_status, sticky_value
from serve.gateway.sequences import ends_sequence
from serve.gateway.settings import Settings
from serve.gateway.suspects import Flight, StreamFlight
from serve.gateway.telemetry import GRPC_ROUTE, Observed, Telemetry
from serve.gateway.unanswered import FINAL_ASKED, Unanswered
from serve.rollout.plan import Target

__all__ = ["GrpcProxy"]

SERVICE = "/inference.GRPCInferenceService/"
FREE = frozenset(("ServerLive", "ServerReady"))
EMPTY = FREE | {"ServerMetadata"}  # their messages say nothing: they are not read
MOST_QUESTION_BYTES = 64 * 1024  # of a message that is no inference and loads nothing
QUICK_S = 1.0
LOAD = "RepositoryModelLoad"
COSTS = {"ModelMetadata": 2, "ModelStatistics": 5, "RepositoryIndex": 5, LOAD: 10, "RepositoryModelUnload": 10}
OF_MODEL = frozenset(("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"))
ADMIN = frozenset(
    (
        "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings",
        "SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister",
    )
)  # fmt: skip
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
STATUSES = {code: status for status, code in CODES.items() if status not in (408, 413)}
DEAD = re.compile(rb"(?:in ensemble '[^']*', )?" + DEAD_STUB)
MOST_STREAMS = 512  # calls of one connection at a time; its client keeps further ones back
UPSTREAM_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 64 * 1024),
)
Context = Any  # grpc.aio.ServicerContext, whose types are not published


class SlowMessageError(GatewayError):
    """A call's message does not come."""

    status = 408

    def __init__(self) -> None:
        super().__init__("the call's message did not come in time", mend="send it faster, or less of it")


class GrpcProxy(grpc.GenericRpcHandler):  # type: ignore[misc]  # as above
    """Answers the service's calls; those that it does not know are unimplemented.

    Args:
        settings: of the gateway; as many gRPC endpoints as HTTP ones.
        gate: as for HTTP.
        balancer: says which Triton is asked.
        telemetry: counts.
        contracts: of the models, which each request is held against.
        loading: what has to hold before a model is loaded.
        most_connections: of clients at a time.
    """

    def __init__(
        self,
        settings: Settings,
        gate: Gate,
        balancer: Balancer,
        telemetry: Telemetry,
        contracts: Contracts,
        loading: Loading,
        *,
        most_connections: int,
    ) -> None:
        self._settings = settings
        self._loading = loading
        self._contracts = contracts
        self._gate = gate
        self._balancer = balancer
        self._telemetry = telemetry
        self._reading: set[asyncio.Task[Any]] = set()
        self._calls = GrpcChannels(balancer, settings.grpc_upstream, UPSTREAM_OPTIONS)
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
        except RuntimeError as err:
            raise ServerError(
                f"the gateway can't listen on {address} for gRPC", why=str(err), mend="choose another --grpc-port"
            ) from err

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, and give those under way so many seconds."""
        await self._server.stop(grace_s)
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
            return grpc.stream_stream_rpc_method_handler(self._stream)
        # The handler of a unary call is only called with its whole message, which gRPC then holds uncounted. That of a
        # stream reads the message itself, or leaves it alone.
        if name == "ModelInfer":

            async def infer(_: AsyncIterator[bytes], context: Context) -> bytes:
                return await self._counted(context)

            return grpc.stream_unary_rpc_method_handler(infer)
        if name in EMPTY | OF_MODEL | ADMIN:

            async def answer(_: AsyncIterator[bytes], context: Context) -> bytes:
                return await self._plain(name, context)

            return grpc.stream_unary_rpc_method_handler(answer)
        return None

    def _admitted(self, name: str, metadata: Any) -> None:
        """Whether whoever calls may call this at all, and now: told before a byte of the message is read.

        Raises:
            GatewayError: it may not.
        """
        identity = self._gate.keys.identify(_keys(metadata))
        if name == "ModelInfer":
            identity.take()
            return
        identity.ask(COSTS.get(name, 1))
        if name in ADMIN:
            identity.check_admin()

    def _refusing(self, name: str, err: GatewayError) -> Any:
        """A handler that refuses a call without reading its message, as only that of a stream can."""

        async def refuse(_: AsyncIterator[bytes], context: Context) -> bytes:
            if name == "ModelInfer":
                self._telemetry.observe(self._telemetry.begin(GRPC_ROUTE, "", context.peer(), None), err.status)
            await _refuse(context, err)

        return grpc.stream_unary_rpc_method_handler(refuse)

    async def _message(self, context: Context, share: Share) -> bytes:
        """The message of a call that has one.

        What has come of it is gRPC's until all of it has, and can't be counted: a message that takes its time is
        counted for as long as it may be.

        Raises:
            GatewayError: there is no room for it, it does not come in time, or there is none.
        """
        settings = self._settings
        reading = asyncio.ensure_future(context.read())
        self._reading.add(reading)  # not cancelled: gRPC writes into what it holds; the call's end ends it
        reading.add_done_callback(self._read)
        quick_s = min(QUICK_S, settings.body_timeout_s)
        done, _ = await asyncio.wait((reading,), timeout=quick_s)
        if not done:
            before = share.size
            share.take(settings.max_body_bytes)
            done, _ = await asyncio.wait((reading,), timeout=settings.body_timeout_s - quick_s)
            if not done:
                raise SlowMessageError
            share.resize(before)
        body = reading.result()
        if not isinstance(body, bytes):
            raise BadRequestError("the call has no message")
        share.take(len(body))
        return body

    def _read(self, reading: asyncio.Task[Any]) -> None:
        self._reading.discard(reading)
        if not reading.cancelled():
            reading.exception()  # whoever waited for it may have left

    async def _plain(self, name: str, context: Context) -> bytes:
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
                identity = self._gate.keys.identify(_keys(context.invocation_metadata()))
                body = await self._message(context, self._share(context, identity))
                if len(body) > MOST_QUESTION_BYTES and name != LOAD:
                    raise BodyTooLargeError(MOST_QUESTION_BYTES)
                if name in ADMIN:
                    identity.check_admin()
                    if name == LOAD:
                        body = await self._load(body)
                elif name in OF_MODEL:
                    model = _parsed(getattr(messages, f"{name}Request"), body).name
                    if model:
                        identity.check_model(model)
                        if name == "ModelReady":
                            self._gate.incidents.outages.check(model)
                    elif not self._gate.keys.open:
                        identity.check_admin()  # statistics of all
            nodes = self._balancer.nodes if name in ADMIN else [None]
            answer = b""
            for node in nodes:
                answer = await self._calls.ask(name, body, b"", timeout_s=self._patience(context), node=node)
            return answer
        except GatewayError as err:
            await _refuse(context, err)
        except grpc.aio.AioRpcError as err:
            await _abort(context, err.code(), err.details() or "")

    async def _load(self, body: bytes) -> bytes:
        """The message that goes on to Triton, once the repository is checked."""
        asked = _parsed(messages.RepositoryModelLoadRequest, body)
        if self._loading.bare:
            if asked.parameters:
                raise overridden()
            body = messages.RepositoryModelLoadRequest(model_name=asked.model_name).SerializeToString()
        await self._loading.check(asked.model_name)
        return body

    async def _counted(self, context: Context) -> bytes:
        """An inference, counted whatever comes of it."""
        parent = dict(context.invocation_metadata() or ()).get("traceparent", "")
        seen = self._telemetry.begin(GRPC_ROUTE, "", context.peer(), parent.encode())
        code = 500
        try:
            identity = self._gate.keys.identify(_keys(context.invocation_metadata()))
            seen.key = identity.name
            share = self._share(context, identity)
            body = await self._message(context, share)
            seen.received = len(body)
            answer = await self._infer(identity, body, context, seen)
            share.take(len(answer))
            code, seen.sent = 200, len(answer)
            return answer
        except GatewayError as err:
            code = err.status
            await _refuse(context, err)
        except grpc.aio.AioRpcError as err:
            if (dead := DEAD.fullmatch((err.details() or "").encode())) is not None:
                code = 503
                await _refuse(context, ModelDownError(seen.model or "", f"its process {dead[1].decode()} has died"))
            code = STATUSES.get(err.code(), 500)
            await _abort(context, err.code(), err.details() or "")
        except asyncio.CancelledError:
            code = 499
            raise
        finally:
            self._telemetry.observe(seen, code)

    async def _infer(self, identity: Identity, body: bytes, context: Context, seen: Observed) -> bytes:
        request = await self._checked(identity, body)
        seen.model = model = request.model_name
        patience = self._patience(context)
        deadline = time.monotonic() + patience
        places = self._gate.places(model)
        seconds: float | None = None
        answered = entered = False
        started = time.monotonic()
        suspects = self._gate.incidents.suspects
        flight = Flight(identity.id, model, body)
        try:
            if suspects.watches(identity.id, model):
                await suspects.examine(flight, deadline - time.monotonic())
            if not places.try_enter():
                await places.enter(identity.priority, deadline - time.monotonic())
            entered = True
            if seen.trace is not None:
                seen.trace.done("queue")
            started = time.monotonic()
            self._gate.incidents.outages.check(model)
            self._claim(identity, request)
            suspects.take_off(flight)
            release = self._gate.releases.get(model) if not request.model_version else None
            if release is None:
                answer = await self._calls.infer(body, *_about(request), deadline)
            else:
                answer = await self._released(release, identity, request, context, patience, deadline)
            seconds = time.monotonic() - started
            answered = True
            self._gate.known(model)
            return answer
        except grpc.aio.AioRpcError as err:
            answered = err.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            if (dead := DEAD.fullmatch((err.details() or "").encode())) is not None:
                answered = False
                self._gate.incidents.outages.seen(dead[1].decode(), started, request.model_name)
            if err.code() is grpc.StatusCode.DEADLINE_EXCEEDED and tells(patience, self._settings.timeout_s):
                seconds = time.monotonic() - started
            raise
        finally:
            suspects.land(flight, answered=answered)
            if entered:
                places.leave(seconds, len(body))
            if entered and seen.trace is not None:
                seen.trace.done("upstream")

    async def _released(
        self,
        release: Release,
        identity: Identity,
        request: Any,
        context: Context,
        patience: float,
        deadline: float,
    ) -> bytes:
        """Ask one of the two models under release."""

        async def ask(target: Target) -> tuple[Grade, bytes | grpc.aio.AioRpcError]:
            request.model_name, request.model_version = target.model, target.version or ""
            body = request.SerializeToString()
            try:
                if target.model == release.model:
                    return Grade.GOOD, await self._calls.infer(body, *_about(request), deadline)
                with self._gate.incidents.suspects.beside(identity.id, target.model, body):
                    return Grade.GOOD, await self._calls.infer(body, *_about(request), deadline)
            except grpc.aio.AioRpcError as err:
                if err.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    return Grade.LATE if tells(patience, self._settings.timeout_s) else Grade.CUT, err
                told = (err.details() or "").encode()
                return grade_status(STATUSES.get(err.code(), 500), told), err

        came = [(name.encode(), str(value).encode()) for name, value in context.invocation_metadata() or ()]
        movable = "sequence_id" not in request.parameters
        answered = await release.ask(sticky_value(release, identity, came), ask, movable=movable)
        if isinstance(answered.answer, grpc.aio.AioRpcError):
            raise answered.answer
        answer: bytes = answered.answer
        return answer

    async def _stream(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        keys = self._gate.keys
        try:
            key = None if keys.open else keys.key_of(_keys(context.invocation_metadata()))
            share = self._share(context, keys.identify_key(key))
        except GatewayError as err:
            await _refuse(context, err)
        failed: list[GatewayError] = []
        unanswered = Unanswered(share, min(self._settings.max_body_bytes, self._gate.memory.bound // 8))

        about: tuple[bytes, bytes | None] = b"", None

        async def checked() -> AsyncIterator[bytes]:
            nonlocal about
            while True:
                await unanswered.room()
                body = await anext(requests, None)
                if body is None:
                    return
                try:
                    unanswered.take(len(body))
                    identity = keys.identify_key(key)  # it may have been revoked, or its rights changed
                    identity.take()
                    request = await self._checked(identity, body)  # a stream stays with what Triton serves by itself
                    self._claim(identity, request)
                    await flights.sent(identity.id, request.model_name, self._settings.timeout_s)
                except GatewayError as err:
                    failed.append(err)
                    return
                about = _about(request)
                unanswered.asks(request)
                yield body + FINAL_ASKED

        coming = checked()
        flights = StreamFlight(self._gate.incidents.suspects)
        ending: list[Callable[[], object]] = []

        def end() -> None:
            failed.append(UnauthorizedError("the key is no longer valid", mend="ask for a new one"))
            for stop in ending:
                stop()

        try:
            with keys.held(key, end):
                opening = asyncio.ensure_future(anext(coming, None))  # it says which server has its sequence
                ending.append(opening.cancel)
                first = await opening

                async def whole() -> AsyncIterator[bytes]:
                    if first is not None:
                        yield first
                    async for body in coming:
                        yield body

                if first is not None:
                    answers = self._calls.stream(*about, whole(), lambda call: ending.append(call.cancel))
                    async with aclosing(answers):
                        async for came in answers:
                            answer, last = unanswered.read(came)
                            if last:
                                flights.answered()
                            if answer is not None:
                                yield answer
                            if last:
                                unanswered.answered()
        except grpc.aio.AioRpcError as err:
            await _abort(context, err.code(), err.details() or "")
        except asyncio.CancelledError:
            if not failed:
                raise
        finally:
            flights.end()
        if failed:
            await _refuse(context, failed[0])

    def _claim(self, identity: Identity, request: Any) -> None:
        """Raises TakenSequenceError where the request is of a sequence that another key began."""
        if request.parameters and (sequence := _about(request)[1]) is not None:
            ends = ends_sequence(request.parameters)
            self._gate.incidents.claim(identity.id, request.model_name, sequence, ends=ends)

    async def _checked(self, identity: Identity, body: bytes) -> Any:
        """An infer request, after the key's checks.

        Raises:
            GatewayError: it may not be asked, not now, or not this much.
        """
        request = _parsed(messages.ModelInferRequest, body)
        model: str = request.model_name
        identity.check_model(model)
        self._gate.incidents.outages.check(model)
        if self._settings.validate:
            release = self._gate.releases.get(model) if not request.model_version else None
            target = release.kept if release is not None else Target(model, request.model_version or None)
            check = partial(check_message, request, shared_memory=identity.admin)
            await self._contracts.fitting(target, check)
        elif most := self._settings.max_elements:
            for tensor in request.inputs:
                check_shape(tensor.name, tensor.shape, most)
        return request

    def _share(self, context: Context, identity: Identity) -> Share:
        """Counts what a call holds until it is over."""
        share = Share(self._gate.memory, identity.id)
        context.add_done_callback(lambda _: share.close())
        share.take(CONNECTION_BYTES)
        return share

    def _patience(self, context: Context) -> float:
        left = context.time_remaining()
        return self._settings.timeout_s if left is None else min(self._settings.timeout_s, left)


def _parsed(kind: Callable[[], Any], body: bytes) -> Any:
    message = kind()
    try:
        message.ParseFromString(body)
    except Exception as err:  # protobuf's DecodeError, whose class depends on its implementation
        raise BadRequestError("the message can't be read", why=str(err)) from err
    return message


def _bytes(message: Any) -> bytes:
    found: bytes = message.SerializeToString()
    return found


def _about(request: Any) -> tuple[bytes, bytes | None]:
    """Path of the model that an infer request asks for, and the id of its sequence."""
    version = f"/versions/{request.model_version}" if request.model_version else ""
    parameter = request.parameters.get("sequence_id")
    sequence = None
    if parameter is not None:
        text = parameter.string_param or str(parameter.int64_param or parameter.uint64_param or "")
        sequence = text.encode() or None
    return f"/v2/models/{request.model_name}{version}".encode(), sequence


def _keys(metadata: Any) -> dict[bytes, bytes]:
    """The headers that carry a key, from a call's metadata."""
    found: dict[bytes, bytes] = {}
    for name, value in metadata or ():
        header = name.encode()
        # HTTP drops the blanks around a header's value, gRPC keeps them: `-H "x-api-key: KEY"` of a client has one.
        if header in KEY_HEADERS and found.setdefault(header, value.encode().strip()) != value.encode().strip():
            raise BadRequestError(f"the metadata {name} comes twice, with different values")
    return found


async def _refuse(context: Context, err: GatewayError) -> NoReturn:
    parts = [err.error, err.why, err.mend]
    metadata = tuple((name.decode(), value.decode()) for name, value in err.headers)
    code = CODES.get(err.status, grpc.StatusCode.INTERNAL)
    if isinstance(err, MemoryFullError):
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
    await _abort(context, code, "; ".join(part for part in parts if part), metadata)


async def _abort(context: Context, code: Any, told: str, metadata: tuple[tuple[str, str], ...] = ()) -> NoReturn:
    await context.abort(code, told, metadata)
    raise AssertionError("abort raises")


def _options(settings: Settings, most_connections: int) -> Sequence[tuple[str, int]]:
    return (
        ("grpc.max_receive_message_length", settings.max_body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", int(settings.reuse_port)),
        ("grpc.max_metadata_size", 64 * 1024),
        ("grpc.max_allowed_incoming_connections", most_connections),
        ("grpc.max_concurrent_streams", MOST_STREAMS),
        ("grpc.server_handshake_timeout_ms", int(1000 * settings.head_timeout_s)),
        ("grpc.max_connection_idle_ms", 1000 * settings.keep_alive_s),
        ("grpc.keepalive_time_ms", 1000 * settings.keep_alive_s),
        ("grpc.keepalive_timeout_ms", int(1000 * settings.head_timeout_s)),
    )
