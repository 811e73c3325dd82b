"""Clients of all kinds in front of two models under release, on a simulated clock: the gateway's own classes decide.

Requests go through `Released` (HTTP) or `Inference` (gRPC) to the `Release` that the gateway has; only what the two
models do, the clients and the clock are made up.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, cast

import grpc
from tritonclient.grpc import service_pb2 as messages

from serve.gateway.access.gate import Gate
from serve.gateway.access.identity import Identity
from serve.gateway.access.keys import Key
from serve.gateway.access.memory import MemoryFullError
from serve.gateway.errors import GatewayError, UpstreamTimeoutError
from serve.gateway.grpc.channels import GrpcChannels
from serve.gateway.grpc.clients import Clients
from serve.gateway.grpc.infer import Inference
from serve.gateway.grpc.message import Incoming
from serve.gateway.grpc.status import EndedCallError
from serve.gateway.observe.telemetry import Telemetry
from serve.gateway.oip.contracts import Contracts, MetadataSource
from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.release.release import Release
from serve.gateway.release.released import Released
from serve.gateway.release.releases import LOOK_S, Releases
from serve.gateway.settings import Settings
from serve.gateway.upstream.deadline import EarlyTimeoutError, tells
from serve.http.client import Response
from serve.rollout.course import Course
from serve.rollout.plan import Plan, Target
from tests.unit.serve.gateway.test_fairness import simulated

__all__ = ["CANDIDATE", "Faults", "Gateway", "Models", "Protocol", "World", "follow"]

Protocol = Literal["HTTP", "gRPC"]
BASELINE, CANDIDATE = Target("m"), Target("n")
SETTINGS = Settings(upstream=("http://127.0.0.1:1",), validate=False, max_wait_s=20.0)
TYPICAL_S, SPREAD = 0.02, 0.3
NEVER_S = 10_000.0
MOST = 1000
ANSWER = b'{"model_name":"m","outputs":[{"name":"y","datatype":"INT64","shape":[1,1],"data":[1]}]}'


@dataclass(frozen=True)
class Faults:
    """Of one of the models, as shares of its requests, whatever these are."""

    fails: float = 0.0
    refuses: float = 0.0
    hangs: float = 0.0


@dataclass(frozen=True)
class World:
    """What both models meet, and what is wrong with the candidate alone.

    Attributes:
        rate: requests a second.
        hurried, hurry_s: share of clients with a deadline of their own, and that deadline.
        leaving, leave_s: share of clients that leave, and after how long.
        poisoned, poison_s: share of inputs that either fails, and how long that takes.
        hanging: share of inputs that neither answers.
        no_room: share of requests for whose answer the gateway has no room.
        slow_s, slower: of each minute both take so many times as long for so many seconds.
        both, extra: faults of either model, and of the candidate besides.
        keys: of clients.
    """

    rate: float = 20.0
    hurried: float = 0.0
    hurry_s: float = 1.0
    leaving: float = 0.0
    leave_s: float = 0.5
    poisoned: float = 0.0
    poison_s: float = TYPICAL_S
    hanging: float = 0.0
    no_room: float = 0.0
    slow_s: float = 0.0
    slower: float = 50.0
    both: Faults = Faults()
    extra: Faults = Faults()
    keys: int = 3


class NoRoomError(MemoryFullError):
    """As the memory's."""

    def __init__(self) -> None:
        super().__init__(0)


class Models:
    """What the two answer, and after how long."""

    def __init__(self, world: World, draw: random.Random) -> None:
        self._world = world
        self._draw = draw

    async def answer(self, *, candidate: bool, kind: str, within_s: float) -> int:
        """A status, 0 where none came in time; raises NoRoomError."""
        status, seconds = self._decide(candidate=candidate, kind=kind)
        await asyncio.sleep(max(0.0, min(seconds, within_s)))
        if seconds > within_s:
            return 0
        if self._draw.random() < self._world.no_room:
            raise NoRoomError
        return status

    def _decide(self, *, candidate: bool, kind: str) -> tuple[int, float]:
        world, draw = self._world, self._draw
        slow = world.slower if time.monotonic() % 60 < world.slow_s else 1.0
        seconds = TYPICAL_S * slow * math.exp(draw.gauss(0, SPREAD))
        if kind == "hangs":
            return 0, NEVER_S
        if kind == "poison":
            return 500, world.poison_s * slow
        for faults in (world.both, world.extra) if candidate else (world.both,):
            if draw.random() < faults.hangs:
                return 0, NEVER_S
            if draw.random() < faults.fails:
                return 500, seconds
            if draw.random() < faults.refuses:
                return 400, seconds
        return 200, seconds


class OverHttp:
    """In the place of `Upstream`."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def infer(self, path: bytes, _: object, body: bytes, timeout_s: float, **__: object) -> Response:
        candidate = path.startswith(f"/v2/models/{CANDIDATE.model}/".encode())
        status = await self._models.answer(candidate=candidate, kind=body.decode(), within_s=timeout_s)
        if not status:
            raise (UpstreamTimeoutError if tells(timeout_s, SETTINGS.timeout_s) else EarlyTimeoutError)("late", why="")
        return Response(status, [], ANSWER if status == 200 else b'{"error":"failed"}', 0)


class OverGrpc:
    """In the place of `GrpcChannels`."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def infer(self, body: bytes, scope: bytes, _: object, deadline: float, *__: object, **___: object) -> bytes:
        request = messages.ModelInferRequest.FromString(body)
        candidate = scope.startswith(f"/v2/models/{CANDIDATE.model}".encode())
        within_s = deadline - time.monotonic()
        status = await self._models.answer(candidate=candidate, kind=request.id, within_s=within_s)
        if status == 200:
            return b""
        codes = {0: grpc.StatusCode.DEADLINE_EXCEEDED, 400: grpc.StatusCode.INVALID_ARGUMENT}
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(codes.get(status, grpc.StatusCode.INTERNAL), nothing, nothing, "failed")


class Call:
    """A call with one message."""

    def __init__(self, kind: str, left_s: float | None) -> None:
        self._body: bytes = messages.ModelInferRequest(model_name="m", id=kind).SerializeToString()
        self._left_s = left_s
        self._over: list[Callable[[object], None]] = []

    async def read(self) -> bytes:
        return self._body

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float | None:
        return self._left_s

    def add_done_callback(self, over: Callable[[object], None]) -> None:
        self._over.append(over)

    def end(self) -> None:
        for over in self._over:
            over(self)


class One:
    """The one release there is."""

    def __init__(self, release: Release) -> None:
        self._release = release

    def get(self, _: str) -> Release:
        return self._release

    def beside(self, *_: object) -> None:
        """Nothing else is a candidate."""

    def rest(self) -> None:
        self._release.rests = True


class Gateway:
    """One protocol's way to the release."""

    def __init__(self, protocol: Protocol, release: Release, models: Models) -> None:
        self._gate = gate = Gate(SETTINGS)
        self._release = release
        self._http = Released(gate, cast("Any", OverHttp(models)), timeout_s=SETTINGS.timeout_s)
        releases = cast("Releases", One(release))
        contracts = Contracts(cast("MetadataSource", None), 0, validate=False)
        incoming = Incoming(SETTINGS, gate, releases, contracts, Clients(MOST, MOST))
        channels = cast("GrpcChannels", OverGrpc(models))
        self._grpc = Inference(SETTINGS, gate, releases, channels, incoming, Telemetry())
        self._ask = self._over_http if protocol == "HTTP" else self._over_grpc

    async def ask(self, kind: str, key: str, left_s: float | None) -> int:
        """The status that a client gets, which has so many seconds of its own."""
        return await self._ask(kind, key, left_s)

    def full_for(self, seconds: float) -> None:
        """All places of the model are taken for so long."""
        places, taken = self._gate.places("m"), 0
        while places.try_enter("another"):
            taken += 1
        for _ in range(taken):
            asyncio.get_running_loop().call_later(seconds, places.leave, None, 0, "another")

    async def _over_http(self, kind: str, key: str, left_s: float | None) -> int:
        who = Identity(Key(id=key, name=key, digest="0" * 64), None)
        due = time.monotonic() + (SETTINGS.timeout_s if left_s is None else left_s)
        places = self._gate.places("m")
        try:
            if not places.try_enter(key):
                await places.enter(5, due - time.monotonic(), key)
        except GatewayError as err:
            return err.status
        try:
            path, within_s = b"/v2/models/m/infer", due - time.monotonic()
            answer = await self._http.infer(self._release, path, who, (), (), kind.encode(), within_s)
        except GatewayError as err:
            return err.status
        finally:
            places.leave(None, 0, key)
        return answer.status

    async def _over_grpc(self, kind: str, _: str, left_s: float | None) -> int:
        call = Call(kind, left_s)
        try:
            await self._grpc.answer(call)
        except (EndedCallError, grpc.aio.AbortError, grpc.RpcError):
            return 500
        finally:
            call.end()
        return 200

    async def close(self) -> None:
        await self._http.close()
        await self._grpc.close()


async def _client(gateway: Gateway, world: World, draw: random.Random) -> None:
    luck = draw.random()
    kind = "hangs" if luck < world.hanging else "poison" if luck < world.hanging + world.poisoned else "good"
    left_s = world.hurry_s if draw.random() < world.hurried else None
    leaves = draw.random() < world.leaving
    asking = gateway.ask(kind, f"k{draw.randrange(world.keys)}", left_s)
    with suppress(TimeoutError):
        async with asyncio.timeout(world.leave_s if leaves else None):
            await asking


async def _follow(world: World, plan: Plan, protocol: Protocol, seed: int, longest_s: float) -> Release:
    draw = random.Random(seed)
    release = Release(seed, "m", BASELINE, CANDIDATE, plan, Course(plan, time.monotonic()))
    release.knows(ModelMetadata("m", ("1",), (), (), batched=True))
    gateway = Gateway(protocol, release, Models(world, draw))
    asked: set[asyncio.Task[None]] = set()
    looked = 0.0
    while release.running and time.monotonic() < longest_s:
        await asyncio.sleep(draw.expovariate(world.rate))
        if time.monotonic() - looked > LOOK_S:
            looked = time.monotonic()
            release.look()
        task = asyncio.create_task(_client(gateway, world, draw))
        asked.add(task)
        task.add_done_callback(asked.discard)
    for task in asked:
        task.cancel()
    for each in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(each, Exception):
            raise each
    await gateway.close()
    return release


def follow(world: World, plan: Plan, protocol: Protocol, seed: int, longest_s: float) -> Release:
    """The release as it ended, or after so long."""
    random.seed(seed)  # who meets the candidate, and what is copied
    release: Release = simulated(_follow(world, plan, protocol, seed, longest_s))
    return release
