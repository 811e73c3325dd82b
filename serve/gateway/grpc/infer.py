"""ModelInfer over gRPC: one request, one answer, with the limits, admission and releases of the HTTP side."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextvars import Token
from functools import partial
from typing import Any, TypeAlias

import grpc
from tritonclient.grpc import service_pb2 as messages

from serve.gateway.access.asides import JUDGED
from serve.gateway.access.gate import Gate
from serve.gateway.access.identity import Identity
from serve.gateway.access.left_behind import OVERDUE_S, hold_until_through, waited_for
from serve.gateway.access.memory import Share
from serve.gateway.access.slots import NoSlotError
from serve.gateway.errors import GatewayError, OverloadedError, bare
from serve.gateway.grpc.channels import UNREACHED, GrpcChannels, chosen_wait
from serve.gateway.grpc.message import Incoming, about, asked_of, parsed
from serve.gateway.grpc.parcel import Parcel
from serve.gateway.grpc.request import in_reply
from serve.gateway.grpc.status import DEAD, STATUSES, Context, EndedCallError, keys_of, refuse, too_large
from serve.gateway.grpc.wire import head_of, whole
from serve.gateway.health.flights import ABOARD, Came, Flight
from serve.gateway.health.outages import ModelDownError
from serve.gateway.observe.telemetry import GRPC_ROUTE, Observed, Telemetry
from serve.gateway.oip.sequence import Named
from serve.gateway.on_demand.lease import Lease
from serve.gateway.release.answering import answering, check_down
from serve.gateway.release.beside import Besides
from serve.gateway.release.grades import Grade
from serve.gateway.release.release import Release
from serve.gateway.release.released import at_home, grade_status, graded_down, instead, is_gone, keep_on, sticky_value
from serve.gateway.release.released import came_of as came_over_http
from serve.gateway.release.releases import Releases
from serve.gateway.settings import Settings
from serve.gateway.upstream.deadline import tells
from serve.rollout.plan import Target

__all__ = ["Inference"]

Reply: TypeAlias = bytes | grpc.aio.AioRpcError | GatewayError
LINGERS_BYTES = 1 << 16  # of a request, up to which it is held until Triton is through with it, once it is over


class Inference:
    """Answers it.

    Args:
        settings: of the gateway.
        gate, releases: as for HTTP.
        calls: to Triton.
        incoming: reads messages.
        telemetry: counts.
    """

    def __init__(
        self,
        settings: Settings,
        gate: Gate,
        releases: Releases,
        calls: GrpcChannels,
        incoming: Incoming,
        telemetry: Telemetry,
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._releases = releases
        self._calls = calls
        self._incoming = incoming
        self._telemetry = telemetry
        self._going_on: set[asyncio.Task[Any]] = set()  # with candidates, whose clients have the baseline's answer

    async def close(self) -> None:
        """Give up what is under way for nobody."""
        self._releases.rest()
        for task in [*self._going_on]:
            task.cancel()
        await asyncio.gather(*self._going_on, return_exceptions=True)

    async def answer(self, context: Context) -> bytes:
        """An inference, counted whatever comes of it."""
        parent = dict(context.invocation_metadata() or ()).get("traceparent", "")
        seen = self._telemetry.begin(GRPC_ROUTE, "", context.peer(), parent.encode())
        code = 500
        sequences: list[Named] = []
        lease = self._gate.lease()
        try:
            identity = self._gate.keys.identify(keys_of(context.invocation_metadata()))
            seen.key = identity.name
            share = self._incoming.share(context, identity)
            body = await self._incoming.message(context, share)
            identity = self._gate.keys.again(identity)
            seen.received = len(body)
            before = share.size
            parcel = Parcel(body)
            del body
            answer = await self._infer(identity, parcel, context, seen, sequences, share, lease)
            # gRPC has a copy of its own until it is read; the first may be counted already.
            share.take(max(0, before + 2 * len(answer) - share.size))
            code, seen.sent = 200, len(answer)
            await self._gate.long_work.copy(share.key, len(answer))
            return self._incoming.answering(context, answer)
        except GatewayError as err:
            code = err.status
            refuse(bare(err))
        except grpc.aio.AioRpcError as err:
            bare(err)
            if (dead := DEAD.fullmatch((err.details() or "").encode())) is not None:
                code = 503
                refuse(ModelDownError(seen.model or "", f"its process {dead[1].decode()} has died"))
            if (longer := too_large(err)) is not None:
                code = longer.status
                refuse(longer)
            code = STATUSES.get(err.code(), 500)
            details = err.details() or ""
            raise EndedCallError(err.code(), sequences[0].told(details) if sequences else details) from None
        except asyncio.CancelledError:
            code = 499
            raise
        finally:
            lease.close()
            self._telemetry.observe(seen, code)

    async def _infer(
        self,
        identity: Identity,
        parcel: Parcel,
        context: Context,
        seen: Observed,
        sequences: list[Named],
        share: Share,
        lease: Lease,
    ) -> bytes:
        """Ask; `sequences` gets the request's, whose name an error of Triton's may say."""
        patience = self._incoming.patience(context)
        deadline = time.monotonic() + patience
        request, body, sequence = await self._incoming.request(identity, parcel.take(), share, lease, deadline)
        if sequence is not None:
            sequences.append(sequence)
        seen.model = model = request.model_name
        counted = None if await self._incoming.answers_shortly(request) else share
        seconds: float | None = None
        answered = entered = given_up = late = False
        sent = True
        left: list[asyncio.Task[bytes]] = []  # calls that Triton is still at work on
        aside: list[asyncio.Task[bytes]] = []  # the same, of those that keep no place
        asked, turn, stays, batcher = asked_of(request), None, None, None
        if sequence is not None:
            stays, batcher = await self._incoming.who(request, sequence)
            await lease.need([stays.model], identity.id, deadline)
            turn = self._gate.slots.asked(batcher, stays, sequence, identity.id)
        for_slot_s = self._gate.slots.longest_s if turn is not None and turn.begins else math.inf
        if for_slot := time.monotonic() + for_slot_s < deadline:
            deadline = time.monotonic() + for_slot_s
        waits = turn is not None and turn.waits
        places = self._gate.among(model, identity.id, turn)
        status: int | None = None
        started = time.monotonic()
        suspects = self._gate.incidents.suspects
        release: Release | None = self._releases.get(model) if not request.model_version else None
        flight = Flight(identity.id, answering(model, release, stays), body)
        above: Token[Flight | None] | None = None
        beside: Besides | None = None
        try:
            if suspects.watches(identity.id, flight.model):
                await suspects.examine(flight, deadline - time.monotonic())
            if not places.try_enter(identity.id, identity.priority):
                await places.enter(identity.priority, deadline - time.monotonic(), identity.id)
            entered = True
            self._gate.keys.again(identity).check_model(model)  # it may have waited
            if seen.trace is not None:
                seen.trace.done("queue")
            started = time.monotonic()
            release = self._releases.get(model) if not request.model_version else None  # it may have waited
            if flight.suspect is None:
                flight.model = answering(model, release, stays)
            check_down(self._gate.incidents.outages, model, release)
            suspects.take_off(flight)
            self._gate.board(flight, places.sent, model)
            above = ABOARD.set(flight)
            beside = self._releases.beside(stays or asked, release)
            if beside is not None:
                beside.enter(identity.id)
            if turn is not None:
                turn.sends()
            if release is None:
                if stays is not None and stays != asked:
                    body = await self._renamed(body, stays, share)
                if sequence is None:
                    answer = await self._calls.infer(
                        body, *about(request), deadline, share, left.append, counted, who=identity.id,
                        lingers_s=OVERDUE_S if identity.id and len(body) <= LINGERS_BYTES else 0.0,
                    )  # fmt: skip
                else:
                    path, of_model = asked_of(request).path, self._gate.places(model)
                    self._gate.asides.check(of_model, path, identity.id, waits=waits)
                    kept = share, counted
                    answer = await self._aside(
                        identity,
                        asked_of(request),
                        about(request)[1],
                        body,
                        deadline,
                        kept,
                        aside,
                        waits=waits,
                        lingers=bool(identity.id),
                    )
            else:
                kept = share, counted
                answer = await self._released(
                    release, identity, request, body, context, deadline, stays, kept, aside, waits=waits
                )
            seconds = time.monotonic() - started
            answered = True
            status = 200
            self._gate.known(model)
            if sequence is not None and stays is not None:
                self._releases.begun.answered(asked, stays, sequence, batcher, status, gone=False)
            return answer if sequence is None else in_reply(sequence, answer)
        except grpc.aio.AioRpcError as err:
            answered, _, sent = came_of(err)
            late_or_gone = err.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            status = None if late_or_gone else STATUSES.get(err.code(), 500)
            if release is not None:
                sent = flight.reached
            else:  # it is told already where there is one
                self._saw_dead(err, started, model)
            if sequence is not None and stays is not None and status is not None:
                gone = is_gone(status, (err.details() or "").encode())
                self._releases.begun.answered(asked, stays, sequence, batcher, status, gone=gone)
            if err.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                flight.left = True
                given_up = for_slot or not tells(patience, self._settings.timeout_s)
                late = not given_up
                seconds = None if given_up else time.monotonic() - started
                if for_slot:
                    raise NoSlotError(for_slot_s) from None
            raise
        except GatewayError as err:
            answered, _, sent = came_of(err)
            if release is not None:
                sent = flight.reached
            raise
        except asyncio.CancelledError:
            given_up = flight.left = True
            raise
        finally:
            if turn is not None:
                turn.leave(status)
            if above is not None:
                ABOARD.reset(above)
            suspects.land(flight, answered=answered, sent=sent)
            until = started + self._settings.timeout_s
            ended = [waited_for(each, until - time.monotonic()) for each in left]
            if beside is not None:
                beside.leave((*flight.going_on, *(ended if given_up else ())))
            hold_until_through(left, Share(self._gate.memory, share.key), len(body))
            if entered:
                if given_up and left:
                    places.leave_after(ended, started, len(body), None, identity.id, left, flight.at)
                elif given_up:
                    places.abandon(time.monotonic() - started, identity.id, aside, len(body))
                elif late:
                    through = left or ([] if release else aside)
                    places.outlast(seconds, len(body), identity.id, through, flight.at)
                else:
                    places.leave(seconds, len(body), identity.id, flight.at)
            if entered and seen.trace is not None:
                seen.trace.done("upstream")

    async def _released(
        self,
        release: Release,
        identity: Identity,
        request: Any,
        asked: bytes,
        context: Context,
        deadline: float,
        stays: Target | None,
        kept: tuple[Share, Share | None],
        aside: list[asyncio.Task[bytes]],
        *,
        waits: bool,
    ) -> bytes:
        """Ask one of the two models under release."""
        sequence = about(request)[1]
        suspects, aboard = self._gate.incidents.suspects, ABOARD.get()

        async def ask(target: Target) -> tuple[Grade, Reply]:
            if target != release.candidate:
                return await ask_with(target, kept)
            with Share(self._gate.memory, kept[0].key) as own:  # it may go on when the request is over
                return await ask_with(target, (own, None if kept[1] is None else own))

        async def ask_with(target: Target, kept: tuple[Share, Share | None]) -> tuple[Grade, Reply]:
            request.model_name, request.model_version = target.model, target.version or ""
            if (down := graded_down(self._gate.incidents.outages, target)) is not None:
                return down
            candidate = target == release.candidate
            try:
                of_model, least = self._gate.places(target.model), JUDGED if candidate else 1
                self._gate.asides.check(of_model, target.path, identity.id, least=least, waits=waits)
                body = await self._renamed(asked, target, kept[0])
            except OverloadedError as err:
                err.sent = False  # also where there was no room for another copy
                return Grade.no_room(candidate=candidate), err
            until = whole_time if candidate else deadline
            asking = partial(self._aside, identity, target, sequence, body, until, kept, aside, waits=waits)
            if aboard is None or target.model == aboard.model:
                at = aboard or Flight(identity.id, target.model, body)
                return await at_home(suspects, at, graded(asking, target, until), came_of)
            left_s, asked_it = until - time.monotonic(), partial(graded, asking, target, until)
            return await instead(suspects, identity.id, target, body, left_s, asked_it, came_of, candidate=candidate)

        async def graded(asking: Callable[[], Awaitable[bytes]], target: Target, until: float) -> tuple[Grade, Reply]:
            started = time.monotonic()
            try:
                return Grade.GOOD, await asking()
            except OverloadedError as err:  # for its answer
                return Grade.no_room(candidate=target == release.candidate), err
            except grpc.aio.AioRpcError as err:
                self._saw_dead(err, started, target.model)
                if err.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    return Grade.timed_out(until - started, self._settings.timeout_s), err
                told = (err.details() or "").encode()
                return grade_status(STATUSES.get(err.code(), 500), told, lambda: chosen_wait(request)), err

        came = [(name.encode(), str(value).encode()) for name, value in context.invocation_metadata() or ()]
        movable = "sequence_id" not in request.parameters
        # What a candidate has goes on when the client's own time is over: that says nothing of it.
        whole_time = deadline
        if movable and release.weight < 1 and release.plan.fallback:
            whole_time = max(deadline, time.monotonic() + self._settings.timeout_s)
        sticky = sticky_value(release, identity, came)

        def on_slow(task: asyncio.Task[Any]) -> None:
            keep_on(self._gate, release, identity.id, asked, task, came_of)
            self._going_on.add(task)
            task.add_done_callback(self._going_on.discard)

        answered = await release.ask(
            sticky, ask, movable=movable, stays=stays, goes_on=on_slow, key=identity.id,
            left_s=deadline - time.monotonic(),
        )  # fmt: skip
        if isinstance(answered.answer, Exception):
            raise answered.answer
        answer: bytes = answered.answer
        return answer

    def _saw_dead(self, err: grpc.aio.AioRpcError, started: float, model: str) -> None:
        """Tell of a process of the model's, or of one that it asks, that has died, where it is said so."""
        if (dead := DEAD.fullmatch((err.details() or "").encode())) is not None:
            self._gate.incidents.outages.seen(dead[1].decode(), started, model)

    async def _aside(
        self,
        identity: Identity,
        target: Target,
        sequence: bytes | None,
        body: bytes,
        deadline: float,
        kept: tuple[Share, Share | None],
        aside: list[asyncio.Task[bytes]],
        *,
        waits: bool,
        lingers: bool = False,
    ) -> bytes:
        """Ask where a request that is left keeps no place; what is at work on it still goes to `aside`.

        There it counts for its key for longer, where it `lingers`.
        """
        until, held = time.monotonic() + self._settings.timeout_s, Share(self._gate.memory, kept[0].key)
        with self._gate.asides.call(target.path, identity.id, len(body), waits=waits) as keep:

            def on_left(call: asyncio.Task[bytes]) -> None:
                ended = waited_for(call, until - time.monotonic())
                keep(ended)
                ended.add_done_callback(
                    lambda _: hold_until_through([call] if not call.done() else (), held, len(body))
                )
                aside.append(call)

            scope = f"/v2/models/{target.within_models}".encode()
            return await self._calls.infer(
                body, scope, sequence, deadline, kept[0], on_left, kept[1], who=identity.id,
                lingers_s=OVERDUE_S if lingers and len(body) <= LINGERS_BYTES else 0.0,
            )  # fmt: skip

    async def _renamed(self, body: bytes, target: Target, share: Share) -> bytes:
        """The request as it goes to a model; raises MemoryFullError where there is no room for another copy."""
        head, raws = head_of(body)
        request = parsed(messages.ModelInferRequest, head)
        request.model_name, request.model_version = target.model, target.version or ""
        share.check(len(body))
        async with self._gate.long_work.alone(share.key, len(body)):
            return whole(request, raws)


def came_of(answer: Reply) -> Came:
    """What has come of a request, by its answer."""
    if isinstance(answer, bytes):
        return Came(answered=True)
    if isinstance(answer, GatewayError):
        return came_over_http(answer)
    late = answer.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    lost = answer.code() is grpc.StatusCode.UNAVAILABLE or DEAD.fullmatch((answer.details() or "").encode()) is not None
    return Came(not late and not lost, late, sent=not (answer.details() or "").startswith(UNREACHED))
