"""A client that leaves, or whose own time is over, while its model is at work: the same over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, cast

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages

from serve.gateway.access.admission import Admission, Bounds
from serve.gateway.access.gate import Gate
from serve.gateway.access.memory import Share
from serve.gateway.access.uncounted import goes_on
from serve.gateway.edge.asking import ask_model
from serve.gateway.edge.extensions import LEAVING
from serve.gateway.errors import ClientGoneError, GatewayError, UpstreamTimeoutError
from serve.gateway.grpc.channels import GrpcChannels
from serve.gateway.grpc.clients import Clients
from serve.gateway.grpc.infer import Inference
from serve.gateway.grpc.message import Incoming
from serve.gateway.grpc.status import EndedCallError
from serve.gateway.observe.telemetry import Telemetry
from serve.gateway.oip.contracts import Contracts, MetadataSource
from serve.gateway.release.beside import Beside, Besides
from serve.gateway.release.releases import Releases
from serve.gateway.settings import Settings
from serve.gateway.upstream.deadline import EarlyTimeoutError
from serve.http.client import Response
from tests.serve_http import in_loop

HOUR_S = 3600.0
BODY: bytes = messages.ModelInferRequest(model_name="m").SerializeToString()
SETTINGS = Settings(upstream=("http://127.0.0.1:1",), validate=False)


class NoReleases:
    def get(self, _: str) -> None:
        """Nothing is under release."""

    def beside(self, *_: object) -> None:
        """Nor is anything a candidate."""


class Hourly:
    """A gate whose model takes an hour for an answer, as it has seen."""

    def __init__(self) -> None:
        self.gate = Gate(SETTINGS)
        clock = itertools.count()
        self.places = Admission("m", Bounds(), lambda: float(next(clock)))
        for _ in range(8):
            self.places.try_enter()
            self.places.leave(HOUR_S)
        self.gate._places["m"] = self.places
        self.asked = asyncio.Event()
        self.ends: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def ask(self, *_: Any) -> Any:
        self.asked.set()
        return await self.ends


Left = Callable[[], object]


async def http(held: Hourly, leave: list[Left]) -> None:
    """Ask, with what makes the client leave in `leave`."""
    scope = {"extensions": {LEAVING: lambda call: leave.append(call) if call is not None else None}}
    identity = held.gate.keys.identify({})
    deadline = asyncio.get_running_loop().time() + HOUR_S
    await ask_model(held.gate, identity, "m", held.ask, scope, cast("Any", None), deadline, BODY)


class Call:
    """A call with one message, without a deadline."""

    def __init__(self, left_s: float | None) -> None:
        self._left_s = left_s

    async def read(self) -> bytes:
        return BODY

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float | None:
        return self._left_s

    def add_done_callback(self, _: object) -> None:
        """It never ends."""


async def over_grpc(held: Hourly, left_s: float | None = None) -> None:
    class Calls:
        async def infer(self, *given: Any, who: str, lingers_s: float) -> Any:
            try:
                return await held.ask()
            except BaseException:
                on_left = given[-2]  # before what counts the answer
                on_left(asyncio.get_running_loop().create_future())  # Triton goes on with it
                raise

    contracts = Contracts(cast("MetadataSource", None), 0, validate=False)
    releases = cast("Releases", NoReleases())
    incoming = Incoming(SETTINGS, held.gate, releases, contracts, Clients(1, 1))
    inference = Inference(SETTINGS, held.gate, releases, cast("GrpcChannels", Calls()), incoming, Telemetry())
    await inference.answer(Call(left_s))


async def blamed(held: Hourly) -> tuple[list[str], int]:
    """The models of the requests that a death is blamed on, and the places that are held."""
    return [suspect.model for suspect in await held.gate.incidents.suspects.died(["m"])], held.places.in_flight


@pytest.mark.parametrize("way", ["http", "grpc"])
@in_loop
async def test_who_leaves_keeps_its_place_for_as_long_as_the_model_is_at_work_and_no_model_loaded(way: str) -> None:
    held = Hourly()
    leave: list[Left] = []
    asking = asyncio.ensure_future(http(held, leave) if way == "http" else over_grpc(held))
    await asyncio.wait((asking, asyncio.ensure_future(held.asked.wait())), return_when=asyncio.FIRST_COMPLETED)
    assert held.gate.holds("m")
    leave[-1]() if way == "http" else asking.cancel()
    with pytest.raises(ClientGoneError if way == "http" else asyncio.CancelledError):
        await asking
    assert await blamed(held) == (["m"], 1)
    assert not held.gate.holds("m")
    held.places.try_enter()
    assert held.gate.holds("m")


@in_loop
async def test_what_goes_on_with_a_candidate_meets_it_until_that_is_through() -> None:
    held, met = Hourly(), Beside()
    going_on: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    held.ends.set_result(Response(200, [], b"", 0))

    async def ask() -> Any:
        goes_on(held.places, "/v2/models/n", cast("asyncio.Task[Any]", going_on), Share(held.gate.memory), len(BODY))
        return await held.ask()

    scope = {"extensions": {LEAVING: lambda _: None}}
    identity = held.gate.keys.identify({})
    deadline = asyncio.get_running_loop().time() + HOUR_S
    beside = Besides((met,))
    await ask_model(held.gate, identity, "m", ask, scope, cast("Any", None), deadline, BODY, beside=beside)
    assert met.now == 1
    going_on.set_result(None)
    await asyncio.sleep(0)
    assert met.now == 0


def ended(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, "")


@pytest.mark.parametrize("way", ["http", "grpc"])
@pytest.mark.parametrize("early", [True, False])
@in_loop
async def test_a_place_is_kept_where_the_client_gave_the_model_no_time(way: str, early: bool) -> None:
    held = Hourly()
    if way == "http":
        held.ends.set_exception((EarlyTimeoutError if early else UpstreamTimeoutError)("late"))
        asking = asyncio.ensure_future(http(held, []))
    else:
        held.ends.set_exception(ended(grpc.StatusCode.DEADLINE_EXCEEDED))
        asking = asyncio.ensure_future(over_grpc(held, 1.0 if early else None))
    with pytest.raises(GatewayError if way == "http" else EndedCallError):
        await asking
    assert await blamed(held) == (["m"], int(early))
