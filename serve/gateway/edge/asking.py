"""A model is asked: a place among the others, the exchange, and what becomes of both when the client leaves."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

from starlette.types import Receive, Scope

from serve.gateway.access.gate import Gate
from serve.gateway.access.identity import Identity
from serve.gateway.access.lists import ListPart
from serve.gateway.access.memory import Share
from serve.gateway.access.slots import Turn
from serve.gateway.edge.extensions import LEAVING
from serve.gateway.errors import ClientGoneError, GatewayError, UpstreamTimeoutError
from serve.gateway.health.flights import ABOARD, Flight
from serve.gateway.observe.tracing import Trace
from serve.gateway.on_demand.lease import Lease
from serve.gateway.release.answering import answering, check_down
from serve.gateway.release.beside import Besides
from serve.gateway.release.release import Release
from serve.gateway.release.released import came_of
from serve.gateway.upstream.deadline import EarlyTimeoutError
from serve.http.body import GrowingBody
from serve.http.client import Response
from serve.http.connection import LEFT, Leaving
from serve.rollout.plan import Target

__all__ = ["CLIENT_LEFT", "ask_model", "unless_client_leaves", "until_loaded", "watch_by_receiving"]

CLIENT_LEFT = 499
T = TypeVar("T")


async def until_loaded(
    gate: Gate, lease: Lease, models: Iterable[str], who: str, deadline: float, scope: Scope, receive: Receive
) -> None:
    """Wait until these are loaded, where models are on demand; raises as `Lease.need`, and ClientGoneError."""
    if gate.residency is not None:
        await unless_client_leaves(scope, receive, lease.need(models, who, deadline))


async def ask_model(
    gate: Gate,
    identity: Identity,
    model: str,
    ask: Callable[[], Awaitable[Response]],
    scope: Scope,
    receive: Receive,
    deadline: float,
    body: bytes | GrowingBody,
    trace: Trace | None = None,
    size: int = 0,
    beside: Besides | None = None,
    turn: Turn | None = None,
    part: ListPart | None = None,
    release: Release | None = None,
    stays: Target | None = None,
) -> Response:
    """Wait for a place, ask Triton, and give the place back.

    Args:
        ask: sends the request.
        deadline: on the monotonic clock.
        body: that is sent, to know the request by where the model's process dies of it.
        trace: gets the parts "queue" and "upstream".
        size: of the request, in bytes.
        beside: is told of it, while it is with Triton.
        turn: of a request of a sequence: one that waits for its slot holds no place.
        part: of a list, which stands in a place of its own kind.
        release: of the model; None for none.
        stays: who has the request's sequence; None for none.

    Raises:
        OverloadedError: there was no place in time, or the model is down.
        RateLimitedError: too many of the key wait for slots of its sequences.
        PoisonError: the model's process has died of this request.
        UnauthorizedError, ForbiddenError: the key may no longer ask the model.
        ClientGoneError: the client left.
        GatewayError: Triton gave no answer.
    """
    places = part or gate.among(model, identity.id, turn)
    started = time.monotonic()
    seconds: float | None = None
    answered = entered = False
    sent = True
    suspects = gate.incidents.suspects
    flight = Flight(identity.id, answering(model, release, stays), body)
    given_up = late = False
    leaving = Leaving()
    try:
        if suspects.watches(identity.id, flight.model):  # before it holds a place, which others could use
            await unless_client_leaves(scope, receive, suspects.examine(flight, deadline - time.monotonic()))
        if not places.try_enter(identity.id, identity.priority):
            await unless_client_leaves(
                scope, receive, places.enter(identity.priority, deadline - time.monotonic(), identity.id)
            )
        entered = True
        if beside is not None:
            beside.enter(identity.id)
        if trace is not None:
            trace.done("queue")
        started = time.monotonic()
        check_down(gate.incidents.outages, model, release)
        gate.keys.again(identity).check_model(model)  # it may have waited, and a list's later parts for minutes
        suspects.take_off(flight)
        gate.board(flight, places.sent, model)
        above, on_left = ABOARD.set(flight), LEFT.set(leaving)
        try:
            response = await unless_client_leaves(scope, receive, ask())
        finally:
            leaving.over = True
            LEFT.reset(on_left)
            ABOARD.reset(above)
        answered = True
        if response.status == 200:
            seconds = time.monotonic() - started
            gate.known(model)
        return response
    except (ClientGoneError, EarlyTimeoutError):
        given_up = flight.left = True
        raise
    except UpstreamTimeoutError:
        flight.left = late = True
        seconds = time.monotonic() - started
        raise
    except GatewayError as err:
        answered, _, sent = came_of(err)
        raise
    finally:
        suspects.land(flight, answered=answered, sent=sent)
        if entered:
            ended = leaving.ended
            if late:
                leaving.linger()
                places.outlast(seconds, size, identity.id, leaving.through, flight.at)
            elif not given_up:
                leaving.close()
                places.leave(seconds, size, identity.id, flight.at)
            elif ended:
                held = Share(gate.memory, identity.id)
                places.leave_after(ended, started, size, held, identity.id, leaving.through, flight.at)
            else:
                places.abandon(time.monotonic() - started, identity.id, leaving.aside, size)
            if beside is not None:
                beside.leave((*flight.going_on, *(ended if given_up else ())))
            if trace is not None:
                trace.done("upstream")


async def unless_client_leaves(scope: Scope, receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`, and cancel it when the client closes its connection meanwhile.

    Raises:
        ClientGoneError: the client left.
    """
    task = asyncio.current_task()
    left = begun = False

    def leave() -> None:
        nonlocal left
        if begun and not left and task is not None:  # it may be told twice: as a connection closes, and once it has
            task.cancel()
        left = True

    watch = scope.get("extensions", {}).get(LEAVING) or partial(watch_by_receiving, receive, [])
    watch(leave)
    try:
        if left:  # before it began: a cancellation would wait for whatever is awaited next, if this has nothing to
            if inspect.iscoroutine(work):
                work.close()
            raise ClientGoneError
        begun = True
        return await work
    except asyncio.CancelledError:
        if left and task is not None and task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        watch(None)


def watch_by_receiving(receive: Receive, watchers: list[asyncio.Task[None]], leave: Callable[[], None] | None) -> None:
    """The client's leaving by ASGI's own means, where the server does not tell: a task that waits for it."""

    async def wait(leave: Callable[[], None]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    if leave is not None:
        watchers.append(asyncio.get_running_loop().create_task(wait(leave)))
        return
    for watcher in watchers:
        watcher.cancel()
