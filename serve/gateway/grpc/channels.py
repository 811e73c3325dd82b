"""The gateway's gRPC calls to Triton: which server gets one, and what its end says of the server."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as messages

from serve.gateway.access.long_work import LONG_BYTES, LongWork
from serve.gateway.access.memory import Memory, Share
from serve.gateway.grpc.arriving import UNREAD_STAYS, Arriving, last_of
from serve.gateway.grpc.parcel import Parcel, contents
from serve.gateway.grpc.relay import OPTIONS as RELAY_OPTIONS
from serve.gateway.grpc.relay import Relays, most_relays
from serve.gateway.grpc.sending import Sending
from serve.gateway.grpc.singly import Singly
from serve.gateway.grpc.way import Way
from serve.gateway.grpc.wire import head_of
from serve.gateway.health.flights import ABOARD
from serve.gateway.health.stream_flight import StreamFlight
from serve.gateway.upstream.balancer import MOST_SENT, STOPPING, Attempt, Balancer, Node
from serve.gateway.upstream.deadline import tells
from serve.gateway.upstream.outliers import Verdict
from serve.gateway.upstream.verdicts import was_hurried
from serve.http.message import Address

__all__ = ["UNREACHED", "GrpcChannels", "channels_to", "chosen_wait"]

UNREACHED = "failed to connect to all addresses"  # gRPC's own words: the message went nowhere
SERVICE = "/inference.GRPCInferenceService/"
LONGEST = 2**31 - 1  # message, as gRPC counts
OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 64 * 1024),
    UNREAD_STAYS,
)
FAILED = frozenset((grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS))


class GrpcChannels:
    """A channel to each server, which stays as long as a call or stream uses it.

    Args:
        balancer: says which server is asked.
        addresses: gRPC endpoints of the servers, in their order; where servers are discovered, the port of the first.
        options: of each channel.
        relays: to Triton, for streams whose answers may be long; None where there are no such.
        long_work: has the turns of long messages; its own by default.
        left_timeout_s: how long Triton may go on with a stream that was left; by default as long as an answer may take.
    """

    def __init__(
        self,
        balancer: Balancer,
        addresses: Sequence[str],
        options: Sequence[tuple[str, int]],
        relays: Relays | None = None,
        long_work: LongWork | None = None,
        left_timeout_s: float = 0.0,
    ) -> None:
        self._balancer = balancer
        self._left_timeout_s = left_timeout_s or balancer.timeout_s
        self._addresses = dict(zip(balancer.nodes, addresses, strict=True))
        self._port = int(addresses[0].rpartition(":")[2])
        self._options = [*options, *_connecting(balancer.connect_s)]
        self._relays = relays
        self._channels: dict[Node, Any] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._left: set[asyncio.Task[Any]] = set()
        self._long_work = long_work or LongWork()
        self._sending = Sending()
        self._arriving = Arriving(self._long_work)

    def channel(self, node: Node) -> Any:
        """To a server; those of servers that are gone are closed once nothing uses them."""
        channel = self._channels.get(node)
        if channel is None:
            channel = self._channels[node] = grpc.aio.insecure_channel(self._address(node), options=self._options)
            for gone in [each for each in self._channels if each not in self._balancer.nodes and not each.in_flight]:
                self._close(self._channels.pop(gone).close())
        return channel

    def _close(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _address(self, node: Node) -> str:
        return self._addresses.get(node) or str(Address(node.address.host, self._port))

    async def close(self) -> None:
        for task in self._left:
            task.cancel()
        for channel in self._channels.values():
            await channel.close()
        await asyncio.gather(*self._closing, *self._left, return_exceptions=True)

    async def ask(
        self,
        name: str,
        body: bytes,
        scope: bytes,
        *,
        timeout_s: float,
        node: Node | None = None,
        words: Sequence[tuple[str, str]] = (),
    ) -> bytes:
        """Anything but inference, of one server.

        Args:
            name: of the call.
            scope: path of the model that it is about; b"" for none.
            node: the server; None for the least busy.
            words: that the server asks for, by header.

        Raises:
            grpc.aio.AioRpcError: as it came.
        """
        attempt = self._balancer.begin(self._balancer.scope(scope)) if node is None else None
        chosen = attempt.node if attempt is not None else node
        assert chosen is not None  # noqa: S101
        asking = asyncio.ensure_future(self._unary(chosen, name, body, words))
        server = Verdict.NOTHING
        try:
            answer = await self._within(asking, timeout_s)
            server = Verdict.GOOD
            return answer
        except grpc.aio.AioRpcError as err:
            server, _ = _verdicts(err, early=True)
            raise
        finally:
            if attempt is not None:
                attempt.end(server, Verdict.NOTHING)

    async def _unary(
        self,
        node: Node,
        name: str,
        body: bytes,
        words: Sequence[tuple[str, str]] = (),
        *,
        may_s: float | None = None,
    ) -> bytes:
        method = self.channel(node).unary_unary(SERVICE + name)
        timeout = self._balancer.timeout_s if may_s is None else may_s
        answer: bytes = await method(body, metadata=words or None, timeout=timeout)
        return answer

    async def _within(self, asking: asyncio.Task[bytes], timeout_s: float) -> bytes:
        """The answer, if it comes in time. A call that nobody waits for any more goes on.

        Triton 24.10 dies of calls that are cancelled, or whose deadlines pass, while it answers them: some thousands
        of either end it (SIGSEGV). So it hears of neither.
        """
        try:
            if timeout_s <= 0:
                asking.cancel()  # it has not begun
            else:
                await asyncio.wait((asking,), timeout=timeout_s)
        except asyncio.CancelledError:
            self._keep(asking)
            raise
        if asking.cancelled():
            raise _error(grpc.StatusCode.UNAVAILABLE, "the connection is given up: the server has fallen silent")
        if asking.done():
            return asking.result()
        self._keep(asking)
        raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _keep(self, asking: asyncio.Task[bytes]) -> None:
        """Hold a call that its client has left until it ends, and look at how, as nobody else does."""
        self._left.add(asking)

        def ended(task: asyncio.Task[bytes]) -> None:
            self._left.discard(task)
            if not task.cancelled():
                task.exception()

        asking.add_done_callback(ended)

    async def infer(
        self,
        body: bytes,
        scope_name: bytes,
        sequence: bytes | None,
        deadline: float,
        share: Share | None = None,
        on_left: Callable[[asyncio.Task[bytes]], None] = lambda _: None,
        counted: Share | None = None,
        *,
        who: str = "",
        lingers_s: float = 0.0,
    ) -> bytes:
        """ModelInfer of one server, and of others while they can't be reached.

        Where the deadline passes, or this is cancelled, the server goes on with it, and its answer is dropped.

        Args:
            scope_name: path of the model.
            sequence: id of its sequence; None for none.
            deadline: on the monotonic clock.
            share: of the call, whose long message gRPC has a copy of until it is sent; None for short ones.
            on_left: is given what is still with the server when nobody waits for it any more.
            counted: counts an answer that may be long; None for one that can't be.
            who: the id of the key that asks.
            lingers_s: how much longer than an answer may take it is waited to know when the server is through.

        Raises:
            grpc.aio.AioRpcError: as it came, or the deadline passed.
            MemoryFullError: there is no room for the answer, or the copy.
        """
        balancer = self._balancer
        scope = balancer.scope(scope_name)
        scope.budget.earn()
        flight = ABOARD.get()
        tried: list[Node] = []
        while True:
            attempt = balancer.begin(scope, tried, sequence, who=who, flight=flight)
            tried.append(attempt.node)
            try:
                return await self._infer(attempt, body, deadline - time.monotonic(), share, counted, on_left, lingers_s)
            except grpc.aio.AioRpcError as err:
                lost = _lost(err)
                if lost:
                    balancer.lost(attempt.node, flight)
                again = (
                    (err.code() is grpc.StatusCode.UNAVAILABLE or _leaving(err) or (attempt.trial and _failed(err)))
                    and sequence is None
                    and len(tried) < min(len(balancer.nodes), MOST_SENT)
                    and not (lost and flight is not None and flight.turn)
                    and not _hurried(err, body)
                )
                if not again or time.monotonic() >= deadline or not scope.budget.spend():
                    raise
            balancer.retried()

    async def _infer(
        self,
        attempt: Attempt,
        body: bytes,
        timeout_s: float,
        share: Share | None,
        counted: Share | None,
        on_left: Callable[[asyncio.Task[bytes]], None],
        lingers_s: float,
    ) -> bytes:
        server = model = Verdict.NOTHING
        wanted = [True]
        may_s = self._balancer.timeout_s + lingers_s
        asking = asyncio.ensure_future(self._asked(attempt.node, body, share, counted, wanted, may_s))
        attempt.node.has(asking)
        try:
            answer = await self._within(asking, timeout_s)
            server = model = Verdict.GOOD
            self._balancer.known(attempt.scope)
            return answer
        except grpc.aio.AioRpcError as err:
            early = not tells(timeout_s, self._balancer.timeout_s) or attempt.was_behind
            server, model = _verdicts(err, early=early)
            if (_leaving(err) and not attempt.scope.known) or _hurried(err, body):
                model = Verdict.NOTHING
            raise
        finally:
            still = None if asking.done() else asking
            if still is not None:
                wanted.clear()
                on_left(still)
            attempt.end(server, model, still)

    async def _asked(
        self,
        node: Node,
        body: bytes,
        share: Share | None,
        counted: Share | None,
        wanted: list[bool],
        may_s: float,
    ) -> bytes:
        """The answer, for which the server has so long; once it is not `wanted` any more, it counts for nobody."""
        method = f"{SERVICE}ModelInfer"
        if share is not None and len(body) >= LONG_BYTES:
            async with self._sending.copy(share, len(body)):
                call = self.channel(node).stream_stream(method)(timeout=may_s)
                with contextlib.suppress(asyncio.InvalidStateError):  # it is over, which reading tells of
                    await self._long_work.steps(share.key, call.write(body), long=True)
                    await call.done_writing()
        elif counted is None:
            return await self._unary(node, "ModelInfer", body, may_s=may_s)
        else:
            call = self.channel(node).unary_stream(method)(body, timeout=may_s)
        if counted is None:
            return await last_of(call, await call.read())
        return await self._arriving.answer(call, counted, wanted)

    async def stream(
        self,
        scope_name: bytes,
        sequence: bytes | None,
        requests: AsyncIterator[Parcel],
        on_call: Callable[[Callable[[], None]], None] = lambda _: None,
        on_left: Callable[[asyncio.Task[int | None]], None] = lambda _: None,
        flights: StreamFlight | None = None,
        share: Share | None = None,
        singly: Callable[[], bytes | None] | None = None,
        heeds: Callable[[], bool] = lambda: False,
        late: asyncio.Future[None] | None = None,
        who: str = "",
    ) -> AsyncGenerator[bytes]:
        """ModelStreamInfer of one server, to its end; it is one of the requests with that server while it lasts.

        Args:
            scope_name, sequence: of the first message.
            on_call: is given what ends the stream as if its client had left, with CancelledError.
            on_left: is given what ends the stream after its client has left, and gives the bytes that were thrown away;
                None where Triton was not through with it in time.
            flights: its messages, the first of which is in flight; they are told of their server.
            share: counts each answer, from when it begins to come until the next one is asked for, and is closed at
                the end; None where answers are short.
            singly: says which sequence the message has that was yielded last, where each goes in a stream of its own;
                None where they go in one.
            heeds: says whether its models end soon where it is cancelled: after the gateway's time-out it is.
            late: done when no answer is waited for any longer, with the reason.
            who: the id of the key that asks.

        Raises:
            GatewayError: there is no room for the stream, or for an answer; what `late` says.
            grpc.aio.AioRpcError: as it came.
        """
        first = None if flights is None else flights.first
        asked = self._balancer.scope(scope_name)
        attempt = self._balancer.begin(asked, (), sequence, who=who, trial=False, flight=first)
        if flights is not None:
            flights.goes_to(attempt.node.name)
            if self._balancer.deaths is not None:
                flights.take_to(attempt.node.name, attempt.node.occupied)
        server = Verdict.NOTHING
        way = Way(late)
        left = False
        try:
            if share is None or self._relays is None:
                channel = self.channel(attempt.node)
            else:
                address = self._address(attempt.node)
                relay = way.relay = await self._relays.open(address, share)
                options = (*self._options, *RELAY_OPTIONS, ("grpc.default_authority", address))
                channel = way.channel = grpc.aio.insecure_channel(relay.target, options=options)
            method = channel.stream_stream(f"{SERVICE}ModelStreamInfer", request_serializer=contents)
            sent = _to_their_end(requests)
            one_by_one = way.relay is not None  # or it would hold several long answers
            call = method(sent) if singly is None else Singly(method, sent, singly, one_by_one=one_by_one)
            way.call = call
            on_call(way.stop)
            while True:
                if share is None:
                    way.reading = asyncio.ensure_future(call.read())
                else:
                    way.reading = asyncio.ensure_future(self._long_work.steps(share.key, call.read(), first=False))
                left = True
                await way.answer()  # where this is cancelled, what reads is not
                left = False
                answer = way.reading.result()
                if answer is grpc.aio.EOF:
                    break
                server = Verdict.GOOD
                left = True
                yield answer
                left = False
                way.taken(len(answer))
        except grpc.aio.AioRpcError as err:
            server, _ = _verdicts(err, early=True)
            if _lost(err):
                self._balancer.lost(attempt.node, None)
            raise
        finally:
            if left:
                task = asyncio.ensure_future(self._read_to_its_end(way, attempt, heeds=heeds()))
                self._left.add(task)
                task.add_done_callback(self._left.discard)
                on_left(task)
            else:
                attempt.end(server, Verdict.NOTHING)
                self._close(way.end())

    async def _read_to_its_end(self, way: Way, attempt: Attempt, *, heeds: bool) -> int | None:
        """See `Way.read_to_its_end`."""
        try:
            return await way.read_to_its_end(self._balancer.timeout_s if heeds else self._left_timeout_s, heeds=heeds)
        finally:
            attempt.end(Verdict.NOTHING, Verdict.NOTHING)
            await way.end()


def _connecting(seconds: float) -> list[tuple[str, int]]:
    """Options of a channel: it is told after so long that a server is not reached, not after gRPC's 20 s."""
    return [("grpc.min_reconnect_backoff_ms", int(1000 * seconds))] if seconds < math.inf else []


def channels_to(
    balancer: Balancer, addresses: Sequence[str], memory: Memory, long_work: LongWork, left_timeout_s: float
) -> GrpcChannels:
    """To a gateway's Tritons, for messages as long as its memory has room for.

    Args:
        balancer, addresses, long_work, left_timeout_s: as of `GrpcChannels`.
        memory: of the gateway.
    """
    longest = min(memory.most_of_one // 2, LONGEST)  # there are two of each: gRPC makes its own, to send it
    options = (*OPTIONS, ("grpc.max_receive_message_length", longest))
    return GrpcChannels(balancer, addresses, options, Relays(most_relays(), longest), long_work, left_timeout_s)


async def _to_their_end(requests: AsyncIterator[Parcel]) -> AsyncGenerator[Parcel]:
    """The same, but that a failure is an end like others, and cancels nothing."""
    with contextlib.suppress(Exception):
        async for request in requests:
            yield request


def _error(code: grpc.StatusCode, told: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), told)


def _leaving(err: grpc.aio.AioRpcError) -> bool:
    """Whether this is how Triton turns requests away when it stops, or does not have the model."""
    return STOPPING.fullmatch((err.details() or "")[:2048].encode()) is not None


def _hurried(err: grpc.aio.AioRpcError, body: bytes) -> bool:
    """Whether its client gave the request too little time in the model's queue."""
    if err.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    return was_hurried(
        (err.details() or "").encode(),
        lambda: b"timeout" in body and chosen_wait(messages.ModelInferRequest.FromString(head_of(body)[0])),
    )


def chosen_wait(request: Any) -> bool:
    """Whether an inference.ModelInferRequest says itself how long it may wait in the model's queue."""
    return "timeout" in request.parameters


def _lost(err: grpc.aio.AioRpcError) -> bool:
    """Whether the server's connection was lost with the message, which may have reached it."""
    told = err.details() or ""
    found_nobody = told.startswith(UNREACHED) or "refused" in told.lower()
    return _verdicts(err, early=True)[0] is Verdict.GATEWAY_FAILURE and not found_nobody


def _failed(err: grpc.aio.AioRpcError) -> bool:
    return err.code() in FAILED


def _verdicts(err: grpc.aio.AioRpcError, *, early: bool) -> tuple[Verdict, Verdict]:
    """What an error says of the server, and of the model there."""
    code, told = err.code(), (err.details() or "").lower()
    if code is grpc.StatusCode.UNAVAILABLE and ("connect" in told or "socket" in told or "goaway" in told):
        return Verdict.GATEWAY_FAILURE, Verdict.NOTHING
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Verdict.NOTHING, Verdict.NOTHING if early else Verdict.GATEWAY_FAILURE
    if code is grpc.StatusCode.CANCELLED:
        return Verdict.NOTHING, Verdict.NOTHING
    if code is grpc.StatusCode.UNAVAILABLE or _leaving(err):
        return Verdict.GOOD, Verdict.GATEWAY_FAILURE
    return Verdict.GOOD, Verdict.SERVER_ERROR if _failed(err) else Verdict.GOOD
