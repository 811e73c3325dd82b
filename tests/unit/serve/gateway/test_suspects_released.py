"""Under a release to a model of another name: who is suspected of what, and asked where, the same over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from serve.gateway.access.gate import Gate
from serve.gateway.access.memory import MemoryFullError
from serve.gateway.edge.asking import ask_model
from serve.gateway.edge.extensions import LEAVING
from serve.gateway.errors import (
    GatewayError,
    HasItsConnectionsError,
    OverloadedError,
    UpstreamBrokenError,
    UpstreamDownError,
    UpstreamTimeoutError,
)
from serve.gateway.grpc.channels import UNREACHED, GrpcChannels
from serve.gateway.grpc.clients import Clients
from serve.gateway.grpc.infer import Inference
from serve.gateway.grpc.message import Incoming
from serve.gateway.grpc.status import EndedCallError
from serve.gateway.grpc.wire import head_of
from serve.gateway.health.flights import ABOARD, Flight
from serve.gateway.health.incidents import Incidents
from serve.gateway.health.suspects import PoisonError, Suspects
from serve.gateway.observe.telemetry import Telemetry
from serve.gateway.oip.contracts import Contracts, MetadataSource
from serve.gateway.release.grades import Grade
from serve.gateway.release.release import Release
from serve.gateway.release.released import Released, at_home, came_of
from serve.gateway.release.releases import Releases
from serve.gateway.upstream.deaths import Deaths
from serve.gateway.upstream.node import Node
from serve.gateway.upstream.upstream import Upstream
from serve.http.client import Response
from serve.rollout.plan import Plan, Target
from tests.serve_http import in_loop
from tests.unit.serve.gateway.test_left import BODY, SETTINGS, Call

Code = grpc.StatusCode
Answer = Callable[[str], Awaitable[None]]
PROMOTED, STEP = 1.0, 0.5


def lost(code: grpc.StatusCode, told: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, told)


class One:
    """A gateway with a release of m, whose candidate is n, or m's next version; whoever can meet it does."""

    def __init__(self, weight: float, answer: Answer, candidate: Target = Target("n")) -> None:  # noqa: B008
        self.release = Release(1, "m", Target("m", "1"), candidate, Plan(steps=(50.0,)), weight=weight)
        cast("Any", self.release).place = lambda _: 0.0
        self.gate = Gate(SETTINGS)
        self.suspects = self.gate.incidents.suspects
        self.asked: Counter[str] = Counter()
        self._answer = answer

    def get(self, _: str) -> Release:
        return self.release

    def beside(self, *_: object) -> None:
        """Nothing else is a candidate."""

    async def _model(self, name: str) -> None:
        self.asked[name] += 1
        await self._answer(name)

    async def http(self) -> None:
        """Ask; raises GatewayError."""
        one = self

        class Triton:
            async def infer(self, path: bytes, *_: object, **__: object) -> Response:
                await one._model(path.decode().split("/")[3])
                return Response(200, [], b"{}", 0)

        released = Released(self.gate, cast("Upstream", Triton()))
        who = self.gate.keys.identify({})
        scope = {"extensions": {LEAVING: lambda _: None}}

        async def ask() -> Response:
            return await released.infer(self.release, b"/v2/models/m/infer", who, (), (), BODY, 20.0)

        deadline = asyncio.get_running_loop().time() + 20.0
        await ask_model(
            self.gate, who, "m", ask, scope, cast("Any", None), deadline, BODY, release=self.release
        )  # fmt: skip

    async def grpc(self) -> None:
        """The same."""
        one = self

        class Calls:
            async def infer(self, body: bytes, path: bytes, *_: object, **__: object) -> bytes:
                assert head_of(body)
                await one._model(path.decode().split("/")[3])
                return BODY

        releases = cast("Releases", self)
        contracts = Contracts(cast("MetadataSource", None), 0, validate=False)
        incoming = Incoming(SETTINGS, self.gate, releases, contracts, Clients(1, 1))
        calls = cast("GrpcChannels", Calls())
        await Inference(SETTINGS, self.gate, releases, calls, incoming, Telemetry()).answer(Call(None))


WAYS = pytest.mark.parametrize("way", ["http", "grpc"])


def deadly(one: list[One], way: str) -> Answer:
    """A model n that dies of what it is asked."""

    async def answer(name: str) -> None:
        if name == "n":
            await one[0].suspects.died(["n"])
            if way == "http":
                raise UpstreamBrokenError("the model server's answer broke off")
            raise lost(Code.UNAVAILABLE, "Socket closed")

    return answer


@WAYS
@in_loop
async def test_who_kills_what_was_promoted_by_the_name_that_it_took_over_is_refused(way: str) -> None:
    held: list[One] = []
    held.append(one := One(PROMOTED, deadly(held, way)))
    for _ in range(2):
        with pytest.raises((GatewayError, EndedCallError)):
            await getattr(one, way)()
    with pytest.raises((PoisonError, EndedCallError)):
        await getattr(one, way)()
    assert one.asked == {"n": 2}
    assert one.suspects.refused == {"n": 1}
    with pytest.raises(PoisonError):
        await one.suspects.examine(Flight("", "n", BODY), 1.0)


@WAYS
@in_loop
async def test_at_a_step_the_baseline_answers_what_kills_the_candidate_and_that_is_asked_it_twice(way: str) -> None:
    held: list[One] = []
    held.append(one := One(STEP, deadly(held, way)))
    for _ in range(4):
        await getattr(one, way)()
    assert one.asked == {"n": 2, "m": 4}


@WAYS
@in_loop
async def test_a_promoted_model_answers_though_the_one_before_it_is_down_or_had_died_of_this(way: str) -> None:
    async def answer(_: str) -> None:
        pass

    one = One(PROMOTED, answer)
    for _ in range(2):
        flight = Flight("", "m", BODY)
        if one.suspects.watches("", "m"):
            await one.suspects.examine(flight, 1.0)
        one.suspects.take_off(flight)
        await one.suspects.died(["m"])
        one.suspects.land(flight, answered=False)
    one.gate.incidents.outages.begin("m", ["m"], "it died")
    await getattr(one, way)()
    assert one.asked == {"n": 1}
    one.gate.incidents.outages.begin("n", ["n"], "it died")
    with pytest.raises((OverloadedError, EndedCallError)):
        await getattr(one, way)()
    assert one.asked == {"n": 1}


UNSENT: dict[str, Callable[[], Exception]] = {
    "http: share": lambda: HasItsConnectionsError("x"),
    "http: refused": lambda: UpstreamDownError("x"),
    "http: no room for the answer": lambda: MemoryFullError(1),
    "grpc: refused": lambda: lost(Code.UNAVAILABLE, UNREACHED),
    "grpc: no room for the answer": lambda: MemoryFullError(1),
}
SENT: dict[str, Callable[[], Exception]] = {
    "http: lost": lambda: UpstreamBrokenError("x"),
    "grpc: lost": lambda: lost(Code.UNAVAILABLE, "Socket closed"),
}


@pytest.mark.parametrize("candidate", [Target("n"), Target("m", "2")], ids=str)
@pytest.mark.parametrize("case", [*UNSENT, *SENT])
@in_loop
async def test_what_was_never_sent_or_was_answered_is_suspected_of_no_later_death(case: str, candidate: Target) -> None:
    async def answer(_: str) -> None:
        raise {**UNSENT, **SENT}[case]()

    one = One(PROMOTED, answer, candidate)
    with pytest.raises((GatewayError, EndedCallError)):
        await getattr(one, case[:4])()
    assert bool(await one.suspects.died(None)) is (case in SENT)


@WAYS
@pytest.mark.parametrize("candidate", [Target("n"), Target("m", "2")], ids=str)
@in_loop
async def test_nor_is_what_a_key_was_refused_that_has_left_too_much(way: str, candidate: Target) -> None:
    async def answer(_: str) -> None:
        pass

    def refuse(*_: object, **__: object) -> None:
        raise OverloadedError("x")

    one = One(PROMOTED, answer, candidate)
    cast("Any", one.gate.asides).check = refuse
    with pytest.raises((OverloadedError, EndedCallError)):
        await getattr(one, way)()
    assert not one.asked
    assert await one.suspects.died(None) == []


async def in_turn(suspects: Suspects) -> Flight:
    """A request of key a's in its turn, after a death that it shared with key b."""
    there = [Flight(key, "m", b"poison") for key in "ab"]
    for flight in there:
        suspects.take_off(flight)
        flight.server = "A"
        suspects.lose(flight, "A")
    await suspects.died(None, "A")
    for flight in there:
        suspects.land(flight, answered=False)
    suspects.began(None, math.inf, "A")
    flight = Flight("a", "m", b"poison")
    await suspects.examine(flight, 1.0)
    assert flight.turn
    suspects.take_off(flight)
    return flight


@in_loop
async def test_one_in_its_turn_is_asked_of_the_isolated_server_whatever_model_answers_for_its_own() -> None:
    incidents = Incidents()
    nodes = [cast("Node", SimpleNamespace(name=name, ready=True, in_flight=0)) for name in "AB"]
    deaths = Deaths(incidents, lambda: nodes)
    suspects = incidents.suspects
    flight = await in_turn(suspects)
    above = ABOARD.set(flight)
    async with suspects.instead("a", "n", b"poison", 1.0) as other:
        assert ABOARD.get() is other
        chosen, _ = deaths.choose(other, nodes, None, ())
        assert [node.name for node in chosen] == [suspects.fleet and suspects.fleet.isolated()]
    ABOARD.reset(above)
    suspects.land(flight, answered=True)


@in_loop
async def test_its_turn_lasts_until_the_model_is_through_that_it_went_to_instead() -> None:
    suspects = Suspects()
    flight = await in_turn(suspects)
    above = ABOARD.set(flight)
    async with suspects.instead("a", "n", b"poison", 1.0):
        suspects.land(flight, answered=True)  # its client has the baseline's answer
        waits = asyncio.create_task(suspects.examine(next_ := Flight("b", "m", b"poison"), 5.0))
        await asyncio.sleep(0.02)
        assert not waits.done()
    ABOARD.reset(above)
    async with asyncio.timeout(1.0):
        await waits
    suspects.take_off(next_)
    suspects.land(next_, answered=True)
    assert not suspects._turns.holding


@pytest.mark.parametrize("own", [False, True])
@in_loop
async def test_another_model_s_answer_clears_it_of_nothing_unless_its_own_has_answered_too(own: bool) -> None:
    suspects = Suspects()
    first = Flight("a", "m", b"poison")
    suspects.take_off(first)
    await suspects.died(["m"])
    suspects.land(first, answered=False)
    flight = Flight("a", "m", b"poison")
    await suspects.examine(flight, 1.0)
    suspects.take_off(flight)
    above = ABOARD.set(flight)
    async with suspects.instead("a", "n", b"poison", 1.0):
        assert await suspects.died(["m"]) == [], "that has not got it"
    if own:
        suspects.at_home(flight)
    ABOARD.reset(above)
    suspects.land(flight, answered=True)
    assert suspects.watches("a", "m") is not own


@pytest.mark.parametrize("what", ["lost", "late", "cancelled", "answered"])
@in_loop
async def test_what_its_own_model_has_not_answered_is_suspected_there_though_another_has(what: str) -> None:
    suspects = Suspects()
    flight = Flight("a", "m", b"poison")
    suspects.take_off(flight)

    async def asked() -> tuple[Grade, Response | GatewayError]:
        if what == "cancelled":
            raise asyncio.CancelledError
        errors = {"lost": UpstreamBrokenError("it is gone", why="reset"), "late": UpstreamTimeoutError("late", why="")}
        return Grade.FAILED, errors.get(what, Response(500, [], b"", 0))

    with suppress(asyncio.CancelledError):
        await at_home(suspects, flight, asked(), came_of)
    suspects.land(flight, answered=True)  # its client has the other's answer
    found = await suspects.died(["m"])
    assert [each.key for each in found] == ["a"] * (what != "answered")
    assert flight.left is (what in ("late", "cancelled"))
