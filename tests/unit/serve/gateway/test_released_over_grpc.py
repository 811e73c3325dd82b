"""What a candidate's error over gRPC says of its process."""

from __future__ import annotations

from typing import Any, cast

import grpc
import pytest

from serve.gateway.access.gate import Gate
from serve.gateway.access.identity import Identity
from serve.gateway.errors import UnauthorizedError
from serve.gateway.grpc.channels import GrpcChannels
from serve.gateway.grpc.clients import Clients
from serve.gateway.grpc.infer import Inference
from serve.gateway.grpc.message import Incoming
from serve.gateway.grpc.status import EndedCallError
from serve.gateway.observe.telemetry import Telemetry
from serve.gateway.oip.contracts import Contracts, MetadataSource
from serve.gateway.release.release import Release
from serve.gateway.release.releases import Releases
from serve.rollout.plan import Plan, Target
from tests.serve_http import in_loop
from tests.unit.serve.gateway.test_left import SETTINGS, Call

Code = grpc.StatusCode
DEAD = "Stub process 'n_0_0' is not healthy."


class One:
    """A release whose candidate has taken over."""

    def __init__(self, candidate: Target) -> None:
        self._release = Release(1, "m", Target("m", "1"), candidate, Plan(), weight=1.0)

    def get(self, _: str) -> Release:
        return self._release

    def beside(self, *_: object) -> None:
        """Nothing else is a candidate."""


@pytest.mark.parametrize("candidate", [Target("n"), Target("m", "2")])
@pytest.mark.parametrize(
    ("code", "told", "suspected", "down"),
    [
        (Code.INTERNAL, "the model says so", False, False),
        (Code.INVALID_ARGUMENT, "the model says so", False, False),
        (Code.UNAVAILABLE, "Socket closed", True, False),
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", True, False),
        (Code.INTERNAL, DEAD, True, True),
    ],
)
@in_loop
async def test_who_was_answered_with_an_error_is_not_suspected_of_a_death(
    candidate: Target, code: grpc.StatusCode, told: str, suspected: bool, down: bool
) -> None:
    class Calls:
        async def infer(self, *_: object, **__: object) -> Any:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(code, nothing, nothing, told)

    gate = Gate(SETTINGS)
    seen: list[tuple[str, str]] = []
    gate.incidents.outages.seen = lambda stub, _, model: seen.append((stub, model))
    releases = cast("Releases", One(candidate))
    incoming = Incoming(
        SETTINGS, gate, releases, Contracts(cast("MetadataSource", None), 0, validate=False), Clients(1, 1)
    )
    inference = Inference(SETTINGS, gate, releases, cast("GrpcChannels", Calls()), incoming, Telemetry())
    with pytest.raises((EndedCallError, grpc.aio.AbortError, grpc.RpcError)):
        await inference.answer(Call(None))
    assert bool(await gate.incidents.suspects.died([candidate.model])) is suspected
    assert seen == ([("n_0_0", candidate.model)] if down else [])


@in_loop
async def test_a_key_that_is_revoked_while_its_request_waits_in_line_is_refused() -> None:
    class Calls:
        async def infer(self, *_: object, **__: object) -> Any:
            raise AssertionError("it is not asked")

    gate = Gate(SETTINGS)
    looked: list[Identity] = []

    def again(identity: Identity) -> Identity:
        looked.append(identity)
        if len(looked) > 1:  # once it has its message, and once it has its place
            raise UnauthorizedError("the key was revoked", mend="ask for another")
        return identity

    cast("Any", gate.keys).again = again
    releases = cast("Releases", One(Target("n")))
    contracts = Contracts(cast("MetadataSource", None), 0, validate=False)
    incoming = Incoming(SETTINGS, gate, releases, contracts, Clients(1, 1))
    inference = Inference(SETTINGS, gate, releases, cast("GrpcChannels", Calls()), incoming, Telemetry())
    with pytest.raises(EndedCallError) as caught:
        await inference.answer(Call(None))
    assert caught.value.status[0] is Code.UNAUTHENTICATED
    assert gate.places("m").in_flight == 0
