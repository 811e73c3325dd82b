"""ModelStreamInfer over gRPC: each message is counted against the key, and takes a place of its model.

A sequence may not be torn apart: all of a stream goes to one server.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial

import grpc

from serve.gateway.access.gate import Gate
from serve.gateway.access.memory import MemoryFullError, Share
from serve.gateway.access.slots import Turn
from serve.gateway.errors import BadRequestError, GatewayError, UpstreamBrokenError, bare
from serve.gateway.grpc.channels import GrpcChannels
from serve.gateway.grpc.expected import HELD_BYTES, Expected, Expecting
from serve.gateway.grpc.first import First
from serve.gateway.grpc.message import Incoming, SlowMessageError, about, path_of
from serve.gateway.grpc.parcel import Parcel
from serve.gateway.grpc.placed import Placed
from serve.gateway.grpc.places import Places
from serve.gateway.grpc.status import Context, EndedCallError, keys_of, refuse, too_large
from serve.gateway.grpc.unanswered import FINAL_ASKED, Unanswered
from serve.gateway.health.stream_flight import StreamFlight
from serve.gateway.on_demand.lease import Lease
from serve.gateway.settings import Settings

__all__ = ["Streams"]


class Streams:
    """Answers them.

    Args:
        settings: of the gateway.
        gate: as for HTTP.
        calls: to Triton.
        incoming: counts and checks messages.
        beside: other streams of the same keys, which have one bound with these; None where there are none.
    """

    def __init__(
        self,
        settings: Settings,
        gate: Gate,
        calls: GrpcChannels,
        incoming: Incoming,
        beside: Streams | None = None,
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._calls = calls
        self._incoming = incoming
        # As much as one key may have here, and as many as one model of one gateway has over HTTP.
        room = gate.memory.bound // 2
        self._expected: Expected = beside._expected if beside else Expected(room, settings.max_in_flight)
        self._places: Places = beside._places if beside else Places(gate, settings.timeout_s)

    async def answer(self, context: Context, *, paid: bool = False) -> AsyncGenerator[bytes, None]:
        """Answer a stream.

        Args:
            context: of its call.
            paid: whether its key was charged for the messages.
        """
        keys = self._gate.keys
        try:
            key = None if keys.open else keys.key_of(keys_of(context.invocation_metadata()))
            holding = self._incoming.held(context, keys.identify_key(key))
            holding.check_left()
        except GatewayError as err:
            refuse(err)
        share, release = holding.share, holding.hold()
        work = self._gate.long_work
        failed: list[GatewayError] = []
        coming = Share(self._gate.memory, share.key)
        expected = Expecting(self._expected, share.key)
        ending: list[Callable[[], object]] = []

        def end(why: GatewayError) -> None:
            failed.append(why)
            for stop in ending:
                stop()

        placed = Placed(self._places, share.key, end)
        begun = First(self._gate.slots.longest_s)
        unanswered = Unanswered(share, min(self._settings.max_body_bytes, self._gate.memory.bound // 8))

        turns: deque[Turn | None] = deque()  # of the messages that are not answered, in the order of their answers
        leases: deque[Lease] = deque()  # of the same
        scope: tuple[bytes, bytes | None] = b"", None
        kind: object = None
        relayed: bool | None = None  # by the first message's model
        read = room_for_one = False
        heeds = True
        leaving: asyncio.Task[int | None] | None = None

        def left(ending: asyncio.Task[int | None]) -> None:
            nonlocal leaving
            leaving = ending
            holding.left(ending, self._settings.timeout_s)

        async def checked() -> AsyncIterator[Parcel]:
            nonlocal scope, kind, read, relayed, room_for_one, heeds
            while True:
                await unanswered.room()
                body = await work.steps(share.key, context.read())
                if not isinstance(body, bytes):
                    return
                self._incoming.came(context, body)
                try:
                    read = True
                    with Share(self._gate.memory, share.key) as unpacking:
                        body = await self._incoming.plain(body, unpacking)
                    await self._incoming.crowded.take(share, len(body))
                    unanswered.takes(len(body))
                    identity = keys.identify_key(key)  # it may have been revoked, or its rights changed
                    if not paid:
                        identity.take()
                    # A stream stays with what Triton serves by itself.
                    lease = self._gate.lease()
                    leases.append(lease)
                    until = time.monotonic() + self._settings.timeout_s
                    request, body, sequence = await self._incoming.request(identity, body, share, lease, until)
                    kind, before = await self._incoming.kind(request), kind
                    if before not in (None, kind):  # Triton 24.10 writes both at once, and aborts
                        raise BadRequestError(
                            "a stream is for models that are decoupled, or for others, not for both",
                            mend="open one for each",
                        )
                    shortly = await self._incoming.streams_shortly(request)
                    if relayed is None:
                        relayed = not shortly
                    elif not (shortly or relayed or room_for_one):
                        # Its answers are read one by one, and each is counted for as long as it may be.
                        share.take(self._gate.memory.most_of_one // 2)
                        room_for_one = True
                    heeds = heeds and await self._incoming.heeds_cancellation(request)
                    turn = None
                    if sequence is not None:
                        turn = await self._incoming.turn_of_stream(identity, request, sequence)
                    turns.append(turn)
                    with placed.held_up(request.model_name, turn):
                        long = "" if shortly else request.model_name
                        patience_s = self._settings.timeout_s
                        await expected.enter(long, ahead=kind is not False, turn=turn, patience_s=patience_s)
                    unanswered.of(sequence)
                    place = partial(
                        placed.enter, identity, request.model_name, len(body), turn,
                        of_sequence=sequence is not None, decoupled=kind if isinstance(kind, bool) else None,
                        beside=self._incoming.beside(request), path=path_of(request),
                    )  # fmt: skip
                    await flights.sent(
                        identity.id, request.model_name, self._settings.timeout_s, place,
                        partial(self._gate.board, sent=self._gate.places(request.model_name).sent), path_of(request),
                    )  # fmt: skip
                    self._gate.incidents.outages.check(request.model_name)  # it may have waited long
                except GatewayError as err:
                    failed.append(bare(err))
                    return
                scope = about(request)
                unanswered.asks(request)
                if turn is not None:
                    turn.sends()
                    begun.sent(turn)
                await work.copy(share.key, 2 * len(body))  # here, and by the library
                parcel = Parcel(body + FINAL_ASKED)
                del body, request
                yield parcel

        messages = checked()
        flights = StreamFlight(self._gate.incidents.suspects)
        try:
            with keys.held(key, end, placed.check):
                opening = self._incoming.kept(asyncio.ensure_future(anext(messages, None)))
                ending.append(opening.cancel)
                if not (await asyncio.wait((opening,), timeout=self._settings.body_timeout_s))[0]:
                    if not read:
                        raise SlowMessageError
                    await asyncio.wait((opening,))
                first = opening.result()  # it says which server has its sequence

                async def whole() -> AsyncIterator[Parcel]:
                    if first is not None:
                        yield first
                    async for parcel in messages:
                        yield parcel

                if first is not None:
                    answers = self._calls.stream(
                        *scope, whole(), ending.append, left, flights, coming if relayed else None,
                        singly=None if kind is True else lambda: scope[1], heeds=lambda: heeds, late=begun.late,
                        who=share.key,
                    )  # fmt: skip
                    async with aclosing(answers):
                        async for came in answers:
                            answer, last, failed_at_triton = unanswered.read(came)
                            expected.came(len(came) + HELD_BYTES, last=last, model=unanswered.model)
                            counted = 1 if relayed else 2  # gRPC has a copy of its own until it is read
                            if not last:
                                placed.goes_on(unanswered.model)
                            if last:
                                placed.answered(unanswered.model, good=not failed_at_triton, at=flights.at)
                                flights.answered()
                                if leases:
                                    leases.popleft().close()
                                if turns and (turn := turns.popleft()) is not None:
                                    begun.answered(turn)
                                    # An error has no status here: it may be that the sequence was refused.
                                    turn.leave(400 if failed_at_triton else 200)
                            if answer is not None:
                                try:
                                    share.take(counted * len(answer))
                                except MemoryFullError as err:
                                    failed.append(bare(err))
                                    break
                                await work.copy(share.key, len(answer))
                                writing, since = self._incoming.writing(context, len(answer)), time.monotonic()
                                expected.shown()
                                try:
                                    yield answer
                                finally:
                                    writing.cancel()
                                    expected.read()
                                    placed.took(time.monotonic() - since)
                                    share.resize(max(0, share.size - counted * len(answer)))
                            if last:
                                unanswered.answered()
                                expected.taken(unanswered.model)
                    if unanswered.some and not failed:  # Triton 24.10 ends a stream so, just before it dies
                        told = "the model server ended the stream before its last answer"
                        failed.append(UpstreamBrokenError(told, mend="ask again what has no answer"))
        except GatewayError as err:
            failed.append(bare(err))
        except grpc.aio.AioRpcError as err:
            flights.end(left=False)
            if (longer := too_large(err)) is not None:
                refuse(longer)
            raise EndedCallError(err.code(), err.details() or "") from None
        except asyncio.CancelledError:
            if not failed:
                raise
        finally:
            flights.end()
            begun.end()
            for lease in leases:
                lease.close()
            for turn in turns:
                if turn is not None:
                    turn.leave(None)
            expected.end(leaving)
            placed.end(leaving, flights.at)
            unanswered.end()
            release(None)
        if failed:
            refuse(failed[0])
