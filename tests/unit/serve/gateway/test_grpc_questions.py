"""Questions over gRPC about models that are loaded on demand: what HTTP says, in its words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as messages

from serve.gateway.access.gate import Gate
from serve.gateway.access.keys import add_key
from serve.gateway.errors import ForbiddenError
from serve.gateway.grpc.questions import Questions
from serve.gateway.grpc.status import EndedCallError
from serve.gateway.on_demand.catalogue import catalogue_of
from serve.gateway.on_demand.residency import Residency
from serve.gateway.settings import Settings
from serve.gateway.upstream.loading import Loading
from tests.gateway_models import write_files_model
from tests.serve_http import in_loop
from tests.unit.serve.gateway.test_on_demand import Host


class Context:
    """Of a call with a key."""

    def __init__(self, key: str) -> None:
        self._key = key

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [("x-api-key", self._key)]


class Incoming:
    """Gives a message as it came."""

    def __init__(self, message: Any) -> None:
        self._body: bytes = message.SerializeToString()

    def share(self, _context: object, _identity: object) -> None:
        """Nothing is counted."""

    def patience(self, _context: object) -> float:
        return 1.0

    async def message(self, _context: object, _share: object) -> bytes:
        return self._body

    def answering(self, _context: object, answer: bytes) -> bytes:
        return answer


class Calls:
    """A Triton that has no model loaded."""

    async def ask(self, name: str, *_: object, **__: object) -> bytes:
        assert name == "ModelReady", "it would be past the memory"
        return b""


class Balancer:
    nodes = (None,)


async def answer(folder: Path, question: str, **fields: str) -> bytes:
    """What a key with admin is answered where the model "rests" is not loaded."""
    write_files_model(folder / "models", name="rests")
    key = add_key(folder / "keys.json", "admin", admin=True)[0]
    residency = Residency(Host(), catalogue_of(folder / "models"), 1 << 30, (), lambda _: None)
    gate = Gate(Settings(keys=folder / "keys.json"), residency=residency)
    message = getattr(messages, f"{question}Request")(**fields)
    parts: tuple[Any, ...] = (gate, Balancer(), Calls(), Incoming(message), Loading())
    return await Questions(*parts).answer(question, Context(key))


@pytest.mark.parametrize(("version", "ready"), [("", True), ("1", True), ("9", False)])
@in_loop
async def test_one_that_rests_is_ready_in_the_versions_that_a_request_would_load(
    tmp_path: Path, version: str, ready: bool
) -> None:
    answered = await answer(tmp_path, "ModelReady", name="rests", version=version)
    assert messages.ModelReadyResponse.FromString(answered).ready is ready


@pytest.mark.parametrize("act", ["Load", "Unload"])
@in_loop
async def test_none_is_loaded_or_unloaded_by_hand_and_the_reason_is_that_of_http(tmp_path: Path, act: str) -> None:
    with pytest.raises(EndedCallError) as caught:
        await answer(tmp_path, f"RepositoryModel{act}", model_name="rests")
    assert isinstance(caught.value.refused, ForbiddenError)
    assert "--pin MODEL" in caught.value.status[1]
