"""The message of a call over gRPC: read within its bounds, and counted for as long as its call lasts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from tritonclient.grpc import service_pb2 as messages

from serve.gateway.access.gate import Gate
from serve.gateway.access.identity import Identity
from serve.gateway.access.long_work import LONG_BYTES, Steps
from serve.gateway.access.memory import CONNECTION_BYTES, SMALL_BYTES, Memory, Share
from serve.gateway.access.slots import Batcher, Turn
from serve.gateway.errors import BadRequestError, GatewayError, OverloadedError
from serve.gateway.grpc.brought import client_of
from serve.gateway.grpc.clients import Clients, address_of
from serve.gateway.grpc.crowded import Crowded
from serve.gateway.grpc.request import check_message, rename, walked_bytes
from serve.gateway.grpc.status import Context
from serve.gateway.grpc.wire import HEAD_COST, head_of, whole
from serve.gateway.oip.contract import Contract, check_id
from serve.gateway.oip.contracts import Contracts
from serve.gateway.oip.encoding import unpack
from serve.gateway.oip.sequence import Named
from serve.gateway.on_demand.lease import Lease
from serve.gateway.release.answering import check_down, models_of
from serve.gateway.release.beside import Besides
from serve.gateway.release.release import Release
from serve.gateway.release.releases import Releases
from serve.gateway.settings import Settings
from serve.gateway.upstream.upstream import model_path
from serve.rollout.plan import Target

__all__ = ["UNPACKED_HERE", "Held", "Incoming", "SlowMessageError", "about", "asked_of", "parsed", "without_contents"]

UNPACKED_HERE = (
    ("grpc.per_message_decompression", 0),
    ("grpc.compression_enabled_algorithms_bitset", 1 << 0 | 1 << 2),  # none and gzip: a packed message tells itself
)
GZIP = b"\x1f\x8b"
FIRST_S = 0.02
DELIVERED_BYTES = 64 * 1024 * 1024  # that a connection may bring in a second, as far as it is counted
SLOWEST_BYTES = 256 * 1024  # that a client has to read in a second


class SlowMessageError(GatewayError):
    """A call's message does not come."""

    status = 408

    def __init__(self) -> None:
        super().__init__("the call's message did not come in time", mend="send it faster, or less of it")


class TooManyLongError(OverloadedError):
    """The messages of a key are long, and others of them are read first."""

    def __init__(self) -> None:
        super().__init__(
            "the key's long messages wait for each other",
            why="they are read one at a time, so that others are answered meanwhile",
            mend="send fewer long messages at a time",
        )


class Held:
    """What a call counts for, until all that it set going is over.

    Args:
        memory: of the gateway.
        clients: whose calls are bounded.
        caller: a key's id, or an address.

    Attributes:
        share: what it holds.

    Raises:
        GatewayError: its client has too many calls, or there is no room.
    """

    def __init__(self, memory: Memory, clients: Clients, caller: str) -> None:
        clients.enter(caller)
        self._clients = clients
        self._caller = caller
        self._holders = 0
        self.share = Share(memory, caller)

    def hold(self) -> Callable[[object], None]:
        """It counts until what this gives was called, once, with whatever."""
        self._holders += 1
        return self._release

    def check_left(self) -> None:
        """Whether its client may begin a stream; raises TooManyLeftError."""
        self._clients.check_left(self._caller)

    def left(self, ending: asyncio.Task[int | None], sent_s: float) -> None:
        """Its client has left, and it is over once this task is; its messages are sent by then, or after so long."""
        sent = asyncio.get_running_loop().call_later(sent_s, self._sent)
        ending.add_done_callback(lambda _: sent.cancel())
        self._clients.left(self._caller, 1)
        ending.add_done_callback(lambda _: self._clients.left(self._caller, -1))
        ending.add_done_callback(self.hold())

    def _sent(self) -> None:
        self.share.resize(min(self.share.size, CONNECTION_BYTES))

    def _release(self, _: object) -> None:
        self._holders -= 1
        if not self._holders:
            self.share.close()
            self._clients.leave(self._caller)


class Incoming:
    """Reads what calls send.

    Args:
        settings: of the gateway.
        gate: has the memory that is counted.
        releases: say who answers for a model.
        contracts: of the models, which each request is held against.
        clients: whose connections and calls are bounded.

    Attributes:
        crowded: counts messages that were read.
    """

    def __init__(
        self, settings: Settings, gate: Gate, releases: Releases, contracts: Contracts, clients: Clients
    ) -> None:
        self._clients = clients
        self._settings = settings
        self._gate = gate
        self._releases = releases
        self._contracts = contracts
        self.crowded = Crowded(gate.memory)
        self._reading: set[asyncio.Task[Any]] = set()

    def share(self, context: Context, identity: Identity) -> Share:
        """Counts what a call holds until it is over; raises GatewayError where its client has too many calls."""
        return self.held(context, identity).share

    def held(self, context: Context, identity: Identity) -> Held:
        """The same, for a call that may go on without its client.

        Whoever has no key is known by the address.
        """
        held = Held(self._gate.memory, self._clients, identity.id or f"@{address_of(client_of(context.peer()))}")
        context.add_done_callback(held.hold())
        if self._clients.coming is not None:
            context.add_done_callback(self._clients.coming.calls(context.peer(), held.share.key))
        held.share.take(CONNECTION_BYTES)
        return held

    def writing(self, context: Context, size: int) -> asyncio.TimerHandle:
        """Give the client its time to read an answer; to be cancelled once it has.

        A call can't be ended while its answer waits (the library has no such thing): its connection is.
        """
        if self._clients.coming is not None:
            self._clients.coming.moved(context.peer(), 0, size)
        seconds = self._settings.write_timeout_s + size / SLOWEST_BYTES
        return asyncio.get_running_loop().call_later(seconds, self._clients.give_up, context.peer())

    def answering(self, context: Context, answer: bytes) -> bytes:
        """The one answer of a call, which its client has its time to read."""
        timer = self.writing(context, len(answer))
        context.add_done_callback(lambda _: timer.cancel())
        return answer

    def patience(self, context: Context) -> float:
        """Seconds that a call may take."""
        left = context.time_remaining()
        return self._settings.timeout_s if left is None else min(self._settings.timeout_s, left)

    async def message(self, context: Context, share: Share) -> bytes:
        """The message of a call that has one.

        What has come of it is gRPC's until all of it has, and can't be seen: a message that is on its way is counted
        for as much as its time lets it be, unless its connection is known to bring little.

        Raises:
            GatewayError: there is no room for it, it does not come in time, or there is none.
        """
        steps = self._gate.long_work.steps(share.key, context.read())
        reading = self.kept(asyncio.ensure_future(steps))
        coming = self._clients.coming
        before, waited, step = share.size, 0.0, min(FIRST_S, self._settings.body_timeout_s)
        try:
            await asyncio.wait((reading,), timeout=step)
            if not (steps.begun or reading.done()):
                await self._turn(steps, reading)
                await asyncio.wait((reading,), timeout=step)
            while not reading.done():
                waited += step
                if waited >= self._settings.body_timeout_s:
                    raise SlowMessageError
                step = min(waited, self._settings.body_timeout_s - waited)
                if coming is None or coming.unread(context.peer()) > SMALL_BYTES:
                    most = min(self._settings.max_body_bytes, int(DELIVERED_BYTES * (waited + step)))
                    await self.crowded.take(share, max(0, before + most - share.size))
                await asyncio.wait((reading,), timeout=step)
        except BaseException:
            if not steps.begun:
                reading.cancel()
            elif coming is not None and not reading.done():  # what has come of it is there until it was read
                reading.add_done_callback(coming.stays(context.peer()))
            raise
        share.resize(before)
        body = reading.result()
        if not isinstance(body, bytes):
            raise BadRequestError("the call has no message")
        self.came(context, body)
        await self.crowded.take(share, len(body))
        return await self.plain(body, share)

    async def _turn(self, steps: Steps[Any], reading: asyncio.Task[Any]) -> None:
        """Wait until a message is read: its key has had long ones, and others are read before it."""
        until = time.monotonic() + self._settings.timeout_s
        while not (steps.begun or reading.done()):
            if time.monotonic() > until:
                raise TooManyLongError
            await asyncio.wait((reading,), timeout=FIRST_S)

    def came(self, context: Context, message: bytes) -> None:
        """A message was read: its connection has brought it for a call."""
        if self._clients.brought is not None:
            self._clients.brought.message(context.peer(), len(message))
        if self._clients.coming is not None:
            self._clients.coming.moved(context.peer(), len(message))

    async def plain(self, body: bytes, share: Share) -> bytes:
        """A message as it was before it was packed, of which its call's share then holds the bytes.

        The library would unpack messages before any of it can be counted: its own part in this is turned off
        (`UNPACKED_HERE`). No message of the service begins as gzip does: there is no field 3 of wire type 7.

        Raises:
            GatewayError: there is no room for it, it is too long, or damaged.
        """
        if not body.startswith(GZIP):
            return body
        return await unpack(body, b"gzip", self._settings.max_body_bytes, share, self._gate.long_work)

    def kept(self, reading: asyncio.Task[Any]) -> asyncio.Task[Any]:
        """A task that reads, kept to its end though nobody waits for it any more.

        It is not cancelled: gRPC writes into what it holds; the call's end ends it.
        """
        self._reading.add(reading)
        reading.add_done_callback(self._read)
        return reading

    def _read(self, reading: asyncio.Task[Any]) -> None:
        self._reading.discard(reading)
        if not reading.cancelled():
            reading.exception()  # whoever waited for it may have left

    async def request(
        self, identity: Identity, body: bytes, share: Share, lease: Lease, deadline: float
    ) -> tuple[Any, bytes, Named | None]:
        """An infer request after the key's checks, as it goes on, the same in bytes, and its sequence.

        Args:
            share: of its call; what is made of the message is asked for before it is made.
            lease: holds the models that it needs.
            deadline: on the monotonic clock, for those that have to be loaded.

        Raises:
            GatewayError: it may not be asked, not now, or not this much.
        """
        head, raws = head_of(body)
        if len(head) >= LONG_BYTES:
            share.check(HEAD_COST * len(head))
        async with self._gate.long_work.alone(share.key, len(head)):
            request = parsed(messages.ModelInferRequest, head)
        head_bytes = len(head)
        del head
        model: str = request.model_name
        identity.check_model(model)
        model_path(model, request.model_version or None)  # raises for a name that is none, however long
        check_id(request.id)
        check_down(self._gate.incidents.outages, model, self._release(request))
        await lease.need(models_of(model, self._release(request)), identity.id, deadline)
        target = self._target(request)

        def check(contract: Contract, rest: Callable[[], object]) -> None:
            check_message(request, contract, rest, shared_memory=identity.admin, raws=raws)

        await self._contracts.fitting(target, check, share.key, walked_bytes(request, head_bytes, raws))
        sequence = rename(request, identity.digest)
        if sequence is not None and sequence.renamed:
            share.check(len(body))
            async with self._gate.long_work.alone(share.key, len(body)):
                body = whole(request, raws)
        return without_contents(request), body, sequence

    async def answers_shortly(self, request: Any) -> bool:
        """Whether the model's answers can't be long."""
        return await self._contracts.answers_shortly(self._target(request))

    async def streams_shortly(self, request: Any) -> bool:
        """The same of a message of a stream, which goes where Triton chooses by itself."""
        return await self._contracts.answers_shortly(asked_of(request))

    async def heeds_cancellation(self, request: Any) -> bool:
        """Whether the model of a stream's message says that it ends soon once this is cancelled."""
        return await self._contracts.heeds_cancellation(asked_of(request))

    async def who(self, request: Any, sequence: Named) -> tuple[Target, Batcher | None]:
        """Who has a request's sequence, and the batcher there; see `Begun.who`."""
        return await self._releases.begun.who(self._contracts, asked_of(request), self._release(request), sequence)

    def beside(self, request: Any) -> Besides | None:
        """Where to tell of a stream's message that may be with a candidate; see `Releases.beside`."""
        return self._releases.beside(asked_of(request))

    async def turn_of_stream(self, identity: Identity, request: Any, sequence: Named) -> Turn | None:
        """A message of a sequence, counted for its key: it goes where Triton chooses by itself.

        Raises:
            RateLimitedError: it has no slot any more, or too many of its key wait for one.
        """
        target = asked_of(request)
        if sequence.start:
            self._releases.begun.forget(target.model, sequence)
        return self._gate.slots.asked((await self._contracts.of(target)).batcher, target, sequence, identity.id)

    def _target(self, request: Any) -> Target:
        release = self._release(request)
        return release.kept if release is not None else asked_of(request)

    def _release(self, request: Any) -> Release | None:
        return self._releases.get(request.model_name) if not request.model_version else None

    async def kind(self, request: Any) -> object:
        """Of which kind an infer request's model is: requests for one kind may share a stream."""
        target = asked_of(request)
        decoupled = await self._contracts.decoupled(target)
        return target if decoupled is None else decoupled


def parsed(kind: Callable[[], Any], body: bytes) -> Any:
    """A message of the service, read; raises BadRequestError."""
    message = kind()
    try:
        message.ParseFromString(body)
    except Exception as err:  # protobuf's DecodeError, whose class depends on its implementation
        raise BadRequestError("the message can't be read", why=str(err)) from err
    return message


def without_contents(request: Any) -> Any:
    """What an infer request says of itself, without its tensors: those are held as bytes already."""
    light = messages.ModelInferRequest(
        model_name=request.model_name, model_version=request.model_version, id=request.id
    )
    light.parameters.MergeFrom(request.parameters)
    return light


def asked_of(request: Any) -> Target:
    """What an infer request asks for, by its own words."""
    return Target(request.model_name, request.model_version or None)


def path_of(request: Any) -> str:
    """The model that an infer request asks for, by its name, with its version where that is asked for."""
    return asked_of(request).within_models


def about(request: Any) -> tuple[bytes, bytes | None]:
    """Path of the model that an infer request asks for, and the id of its sequence."""
    parameter = request.parameters.get("sequence_id")
    sequence = None
    if parameter is not None:
        text = parameter.string_param or str(parameter.int64_param or parameter.uint64_param or "")
        sequence = text.encode() or None
    return f"/v2/models/{path_of(request)}".encode(), sequence
