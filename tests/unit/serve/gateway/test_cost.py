"""JSON that is dear to read is told by its bytes, and read where it holds up nobody."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.gateway.access.loop_time import LoopTime
from serve.gateway.errors import BadRequestError, GatewayError
from serve.gateway.oip import contracts as module
from serve.gateway.oip.contract import Contract, UnfitError
from serve.gateway.oip.contracts import Contracts
from serve.gateway.oip.cost import CHEAP_BYTES, LONG_JSON, is_dear
from serve.gateway.oip.encoding import Packed
from serve.gateway.oip.metadata import ModelMetadata, TensorMetadata
from serve.gateway.oip.request import read_request
from serve.rollout.plan import Target
from tests.serve_http import in_loop

X, Y = TensorMetadata("x", "FP32", (-1, -1)), TensorMetadata("y", "FP32", (-1, 3))
MODEL = ModelMetadata("m", ("1",), (X,), (Y,), batched=True, max_batch_size=8)
GOOD = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2]}
MANY = {f"a{at}": 1 for at in range(60)}
# What reading has to make, at most, of JSON that is read in the event loop: about a millisecond of the dearest kind.
MOST_LISTS, MOST_TEXTS, MOST_VALUES = 1000, 1250, 10_000


def made_of(value: Any) -> tuple[int, int, int]:
    """Lists and objects, texts, and all values that a JSON becomes."""
    lists = texts = values = 0
    todo = [value]
    while todo:
        each = todo.pop()
        values += 1
        texts += isinstance(each, str)
        if isinstance(each, dict):
            texts += len(each)
            todo += each.values()
        elif isinstance(each, list):
            todo += each
        lists += isinstance(each, dict | list)
    return lists, texts, values


LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=20)
)
UNITS = st.recursive(LEAVES, lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text(max_size=4), parts))


@given(UNITS, st.integers(1, 5000), st.booleans(), st.sampled_from([b"", b" ", b"\n\t"]))
def test_what_is_not_dear_is_little_work(unit: Any, times: int, escaped: bool, blank: bytes) -> None:
    text = orjson.dumps(unit)
    if escaped:
        text = text.replace(b'a"', b'\\u0061"')  # in texts alone
    times = max(1, min(times, LONG_JSON // (len(text) + len(blank) + 1)))
    body = b"[" + (b"," + blank).join([text] * times) + b"]"
    if is_dear(body):
        assert len(body) > CHEAP_BYTES
        return
    lists, texts, values = made_of(orjson.loads(body))
    assert lists <= max(MOST_LISTS, CHEAP_BYTES / 2)
    assert texts <= max(MOST_TEXTS, CHEAP_BYTES / 2)
    assert values <= MOST_VALUES + MOST_LISTS


DEAR: dict[str, Any] = {
    "many outputs of many parameters": {"inputs": [GOOD], "outputs": [{"name": "y", "parameters": MANY}] * 80},
    "many inputs": {"inputs": [GOOD] * 800},
    "empty lists": {"inputs": [GOOD | {"data": [[]] * 20_000}]},
    "numbers in lists of their own": {"inputs": [GOOD | {"data": [[1]] * 10_000}]},
    "texts": {"inputs": [GOOD | {"data": ["a"] * 10_000}]},
    "objects where nobody looks": {"inputs": [GOOD], "more": [{"b": 1}] * 4000},
    "short numbers": {"inputs": [GOOD | {"data": [1] * 30_000}]},
    "names": {"inputs": [GOOD], **{f"n{at}": 1 for at in range(5000)}},
}
CHEAP: dict[str, Any] = {
    "one text": {"inputs": [GOOD], "id": "a" * 60_000},
    "numbers": {"inputs": [GOOD | {"data": [0.123456789] * 3500}]},
    "a picture's rows": {"inputs": [GOOD | {"data": [[0.5] * 28] * 28}]},
    "a hundred texts": {"inputs": [GOOD | {"data": ["some words " * 20] * 100}]},
}


@pytest.mark.parametrize("kind", [*DEAR, *CHEAP])
def test_the_length_alone_does_not_tell(kind: str) -> None:
    body = orjson.dumps((DEAR | CHEAP)[kind])
    assert CHEAP_BYTES < len(body) <= LONG_JSON
    assert is_dear(body) == (kind in DEAR)


class Told:
    async def metadata(self, _model: str, _version: str | None = None) -> ModelMetadata:
        return MODEL

    def forget(self, _model: str, _version: str | None = None) -> None:
        """Nothing is kept."""


def size_of(values: Any) -> int:
    return len(values)


@pytest.mark.parametrize("kind", [*DEAR, *CHEAP, "packed"])
@in_loop
async def test_what_is_dear_is_read_apart_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    contracts, apart = Contracts(Told(), 0), list[object]()

    async def call(_who: object, _deadline: object, work: Callable[..., Any], *arguments: Any) -> Any:
        apart.append(work)
        return work(*arguments)

    monkeypatch.setattr(contracts.apart, "call", call)
    body = orjson.dumps((DEAR | CHEAP).get(kind, {"inputs": [GOOD]}))
    came = Packed(gzip.compress(body + b" " * 1_000_000), b"gzip", 1 << 21) if kind == "packed" else body
    with contextlib.suppress(BadRequestError):
        await contracts.fitted(Target("m"), came, None, shared_memory=False, seconds=None)
    assert await contracts.read_json("", 0.0, size_of, came) == len(orjson.loads(body))
    dear = kind not in CHEAP
    assert set(apart) == ({module._read_in_child, module._made_in_child} if dear else set())
    assert contracts.at_hand(Target("m"), body, None, shared_memory=False) is None or not is_dear(body)


class Noting(LoopTime):
    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def use(self, who: str, seconds: float) -> None:
        self.noted.append(who)
        super().use(who, seconds)


@in_loop
async def test_what_is_read_in_the_event_loop_counts_for_its_key_and_be_it_refused() -> None:
    time = Noting()
    contracts = Contracts(Told(), 0, loop_time=time)
    body = orjson.dumps({"inputs": [GOOD]})
    for who, came in (("a", body), ("b", body.replace(b"FP32", b"INT8")), ("c", b"no JSON")):
        with contextlib.suppress(BadRequestError):
            await contracts.fitted(Target("m"), came, None, shared_memory=False, seconds=None, digest=who)
    assert list(dict.fromkeys(time.noted)) == ["a", "b", "c"]
    with pytest.raises(BadRequestError):
        await contracts.read_json("d", 0.0, size_of, b"no JSON")
    assert time.noted[-1] == "d"


def test_a_packed_json_is_held_to_the_bound_where_it_is_unpacked() -> None:
    came = Packed(gzip.compress(b" " * 1_000_000), b"gzip", 10_000)
    with pytest.raises(GatewayError, match="too large"):
        module._made_in_child(size_of, came, 1 << 30, ())


@pytest.mark.parametrize("more", [{"inputs": [GOOD, 5]}, {"inputs": [5, 5]}, {"outputs": [5, 5]}])
def test_how_many_there_are_is_looked_at_before_any_of_them(more: dict[str, Any]) -> None:
    with pytest.raises(UnfitError) as caught:
        read_request(orjson.dumps({"inputs": [GOOD]} | more), None, Contract.of(MODEL))
    assert "it has 2" in (caught.value.why or "")
