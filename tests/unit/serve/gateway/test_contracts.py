"""What is remembered of requests: the same verdict without reading them again, for as long as the model is the same."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
import pytest

from serve.gateway.access.slots import Batcher
from serve.gateway.errors import BadRequestError
from serve.gateway.oip import contracts as module
from serve.gateway.oip.contracts import Contracts
from serve.gateway.oip.metadata import ModelMetadata, TensorMetadata
from serve.rollout.plan import Target

pytestmark = pytest.mark.clock

TARGET = Target("m", None)


class Told:
    """An upstream whose model can be changed; counts how often it is asked."""

    def __init__(self) -> None:
        self.columns = 4
        self.asked = 0

    async def metadata(self, model: str, _version: str | None = None) -> ModelMetadata:
        self.asked += 1
        x, y = TensorMetadata("x", "FP32", (-1, self.columns)), TensorMetadata("y", "FP32", (-1, 3))
        return ModelMetadata(model, ("1",), (x,), (y,), batched=True, max_batch_size=8)

    def forget(self, _model: str, _version: str | None = None) -> None:
        """Nothing is kept."""


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


def request(columns: int = 4, rows: int = 1, **parameters: Any) -> tuple[bytes, int]:
    size = 4 * rows * columns
    item = {"name": "x", "datatype": "FP32", "shape": [rows, columns], "parameters": {"binary_data_size": size}}
    item["parameters"] |= parameters  # type: ignore[operator]
    head = orjson.dumps({"inputs": [item]})
    return head + bytes(size), len(head)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def contracts(told: Told, clock: Clock) -> Contracts:
    assert clock.now
    return Contracts(told, 0)


def fitted(contracts: Contracts, body: bytes, length: int, *, admin: bool = False) -> tuple[bytes, int | None]:
    found, new, _ = asyncio.run(contracts.fitted(TARGET, body, length, shared_memory=admin, seconds=None))
    assert isinstance(found, bytes)
    return found, new


def test_the_same_json_is_read_once_and_the_model_looked_at_four_times_a_second(
    contracts: Contracts, told: Told, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, length = request()
    assert fitted(contracts, body, length) == (body, length)
    monkeypatch.setattr(module, "read_request", None)
    for _ in range(50):
        clock.now += 0.02
        assert fitted(contracts, body, length) == (body, length)
    assert told.asked == 4


def test_what_came_in_another_spelling_goes_on_as_it_was_read(contracts: Contracts) -> None:
    body, length = request()
    spaced = body[:length].replace(b":", b" : ") + body[length:]
    for _ in range(3):
        assert fitted(contracts, spaced, len(spaced) - 16) == (body, length)


@pytest.mark.parametrize("change", [lambda body: body[:-1], lambda body: body + b"\0", lambda body: body[:-16]])
def test_the_same_json_before_other_data_is_another_request(contracts: Contracts, change: Any) -> None:
    body, length = request()
    fitted(contracts, body, length)
    with pytest.raises(BadRequestError):
        fitted(contracts, change(body), length)


def test_a_length_beyond_the_body_is_refused_though_the_rest_is_known(contracts: Contracts) -> None:
    body, length = request()
    fitted(contracts, body, length)
    with pytest.raises(BadRequestError, match="longer than its body"):
        fitted(contracts, body[:length], length + 16)


def test_what_fits_an_administrator_does_not_fit_others(contracts: Contracts) -> None:
    item = {"name": "x", "datatype": "FP32", "shape": [1, 4]}
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    head = orjson.dumps({"inputs": [item | {"parameters": region}]})
    fitted(contracts, head, len(head), admin=True)
    with pytest.raises(BadRequestError) as caught:
        fitted(contracts, head, len(head))
    assert "for keys with admin" in caught.value.why


def test_what_fitted_the_model_before_it_changed_is_read_again(contracts: Contracts, told: Told, clock: Clock) -> None:
    body, length = request()
    fitted(contracts, body, length)
    told.columns = 5
    clock.now += module.HOLDS_S
    with pytest.raises(BadRequestError, match="does not fit"):
        fitted(contracts, body, length)
    assert fitted(contracts, *request(5))[1] is not None


def test_what_fits_the_model_as_it_is_now_is_not_refused_by_what_was_known(contracts: Contracts, told: Told) -> None:
    fitted(contracts, *request())
    told.columns = 5
    assert fitted(contracts, *request(5))[1] is not None


def test_what_is_remembered_is_bounded(contracts: Contracts, told: Told) -> None:
    for number in range(3 * module.REMEMBERED):
        fitted(contracts, *request(note=number))
        asyncio.run(contracts.of(Target(f"m{number}", None)))
    assert told.asked > 0
    assert len(contracts._fits) <= module.REMEMBERED


def test_contracts_are_remembered_for_as_many_models_as_a_repository_may_have(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(module, "MODELS", 600)
    told = Told()
    known = {f"m{number}": asyncio.run(told.metadata(f"m{number}")) for number in range(700)}

    async def metadata(model: str, _version: str | None = None) -> ModelMetadata:
        return known[model]

    told.metadata = metadata  # type: ignore[method-assign]
    contracts = Contracts(told, 0)

    async def of(*numbers: int) -> list[object]:
        return [await contracts.of(Target(f"m{number}", None)) for number in numbers]

    first = asyncio.run(of(*range(600)))
    clock.now += module.HOLDS_S
    assert all(a is b for a, b in zip(first, asyncio.run(of(*range(600))), strict=True))
    asyncio.run(of(*range(600, 700)))
    assert len(contracts._made) == 600
    assert len(contracts._holding) <= 600


def config(batching: object = None, versions: Sequence[str] = ("1",), **more: Any) -> ModelMetadata:
    told = {"name": "m", "versions": versions, "inputs": [], "outputs": []}
    known = {"max_batch_size": 4, "instance_group": [{"count": 1}], **more}
    return ModelMetadata.parse(
        orjson.dumps(told), orjson.dumps(known | ({"sequence_batching": batching} if batching is not None else {}))
    )


@pytest.mark.parametrize(
    ("metadata", "waits_s"),
    [
        (config(), 0.0),
        (config(dynamic_batching={}), 0.0),
        (config(dynamic_batching={"max_queue_delay_microseconds": "2500"}), 0.0025),
        (config(versions=("1", "2")), 0.0),
        (config(dynamic_batching={"preferred_batch_size": [4], "priority_levels": 0}), 0.0),
        (config(dynamic_batching={"priority_levels": 2}), math.inf),
        (config(response_cache={"enable": True}), math.inf),
        (config(response_cache={"enable": False}), 0.0),
        (config(dynamic_batching={"default_queue_policy": {"timeout_action": "DELAY"}}), math.inf),
        (config({"oldest": {}}), math.inf),
        (config(model_transaction_policy={"decoupled": True}), math.inf),
    ],
)
def test_how_long_batches_are_waited_for_is_known_where_requests_are_worked_on_in_their_order(
    metadata: ModelMetadata, waits_s: float
) -> None:
    assert metadata.waits_s == waits_s


@pytest.mark.parametrize(
    ("metadata", "batcher"),
    [
        (config(), None),
        (config({}), Batcher("m", "1", 4, 1.0)),
        (config({"direct": {}, "max_sequence_idle_microseconds": "2500000"}), Batcher("m", "1", 4, 2.5)),
        (config({"direct": {}}, max_batch_size=0), Batcher("m", "1", 1, 1.0)),
        (config({"oldest": {"max_candidate_sequences": 64}}), Batcher("m", "1", 64, 1.0)),
        (config({}, versions=("9", "10", "2")), Batcher("m", "10", 4, 1.0)),  # which Triton chooses
        (config({}, versions=()), Batcher("m", "", 4, 1.0)),
        (config({}, instance_group=[{"count": 2}, {"count": 1}]), Batcher("m", "1", 12, 1.0)),
        (config({}, instance_group=[{"count": 2, "gpus": [0, 1, 2]}]), Batcher("m", "1", 24, 1.0)),
    ],
)
def test_the_slots_for_sequences_are_those_of_the_configuration(
    metadata: ModelMetadata, batcher: Batcher | None
) -> None:
    assert metadata.batcher == batcher


def test_an_ensemble_has_the_slots_of_its_first_step_that_has_some() -> None:
    step, plain = config({}), config()
    whole = replace(plain, steps=(("plain", None), ("step", "2")))

    class Steps:
        async def metadata(self, model: str, _version: str | None = None) -> ModelMetadata:
            return {"m": whole, "plain": plain, "step": step}[model]

        def forget(self, _model: str, _version: str | None = None) -> None:
            """Nothing is kept."""

    assert asyncio.run(Contracts(Steps(), 0).of(TARGET)).batcher == Batcher("m", "1", 4, 1.0)


def test_the_last_request_of_a_sequence_is_of_zeros_and_fits_the_model() -> None:
    found = Contracts(Told(), 0)
    text = asyncio.run(found.last_request(TARGET, 'a"b'))
    assert text is not None
    assert orjson.loads(text) == {
        "parameters": {"sequence_id": 'a"b', "sequence_end": True},
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0.0] * 4}],
    }


@pytest.mark.parametrize(
    ("outputs", "most", "decoupled", "size"),
    [
        ([("FP32", (-1, 10))], 8, False, 8 * 10 * 4),
        ([("FP32", (-1, 10)), ("INT64", (-1, 1))], 8, False, 8 * 48),
        ([("FP32", (-1, -1))], 8, False, math.inf),
        ([("BYTES", (-1, 1))], 8, False, math.inf),
        ([("UINT8", (3, 4))], 0, False, 12),
        ([("UINT8", (-1,))], 0, False, math.inf),
        ([("FP32", (-1, 10))], 8, True, math.inf),
        ([("FP32", (-1, 10))], 8, None, math.inf),
    ],
)
def test_how_long_an_answer_may_be_is_known_where_nothing_leaves_it_open(
    outputs: list[tuple[str, tuple[int, ...]]], most: int, decoupled: bool | None, size: float
) -> None:
    tensors = tuple(TensorMetadata(f"y{number}", *each) for number, each in enumerate(outputs))
    metadata = ModelMetadata("m", ("1",), (), tensors, batched=most > 0, max_batch_size=most, decoupled=decoupled)
    assert metadata.answer_bytes == size


@pytest.mark.parametrize("version", [None, "2"])
@pytest.mark.parametrize("served", [("2",), ("1", "2")])
def test_it_is_known_of_how_many_versions_one_is_whichever_is_asked(
    served: tuple[str, ...], version: str | None
) -> None:
    """Asked for one, Triton tells of that alone."""

    class Versions(Told):
        async def metadata(self, model: str, _version: str | None = None) -> ModelMetadata:
            found = await super().metadata(model)
            return replace(found, versions=served if _version is None else (_version,), instances=1)

    told: list[bool] = []
    contracts = Contracts(Versions(), 0)
    contracts.works = lambda *_: told.append(bool(_[-1]))
    asyncio.run(contracts.of(Target("m", version)))
    assert told == [len(served) > 1]
