"""Long lists of texts at one model: who comes alone waits for few of their parts, and lists take turns. By order, not time."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from serve.gateway.access.admission import Admission, Bounds
from serve.gateway.access.keys import add_key, revoke_key
from serve.gateway.access.lists import LEAST, ListPart, Lists, Turns
from serve.gateway.edge.listed import AT_ONCE
from serve.gateway.errors import OverloadedError
from serve.gateway.oip.protocol import parse_request
from serve.http.client import Response
from tests.serve_http import in_loop
from tests.unit.serve.gateway.test_embeddings_released import Encoders
from tests.unit.serve.gateway.test_releases import World, world

LARGEST, LONG, COUNT = 32, 900, 2000
CONFIG = {"max_batch_size": LARGEST, "parameters": {"task": {"string_value": "embeddings"}}}


@dataclass
class OneInstance(Encoders):
    """Answers one request at a time, in the order in which they came.

    Attributes:
        order: the first letter of what was asked, and how many texts.
    """

    config: dict[str, Any] = field(default_factory=lambda: CONFIG)
    order: list[tuple[str, int]] = field(default_factory=list)
    free: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def answered(self, who: str, what: str, body: bytes) -> tuple[str, Any]:
        if what != "infer":
            return await super().answered(who, what, body)
        if b"!" in body:
            texts = parse_request(body, body.rindex(b"}") + 1)[0].data.ravel()
            at = next(at for at, each in enumerate(texts) if b"!" in each)
            return "400 Bad Request", {"error": f"text {at} is wrong"}
        async with self.free:
            start = body.rindex(b"}") + 1
            (count, _) = json.loads(body[:start])["inputs"][0]["shape"]
            self.order.append((body[start + 4 : start + 5].decode(), count))
            await asyncio.sleep(0.001)
            return await super().answered(who, what, body)


@dataclass
class Judges(OneInstance):
    """Gives each pair 0."""

    config: dict[str, Any] = field(
        default_factory=lambda: CONFIG | {"parameters": {"task": {"string_value": "sequence-classification"}}}
    )

    async def answered(self, who: str, what: str, body: bytes) -> tuple[str, Any]:
        status, told = await super().answered(who, what, body)
        if what == "":
            told["inputs"] = [{"name": name, "datatype": "BYTES", "shape": [-1, 1]} for name in ("text", "text_pair")]
            told["outputs"][0]["shape"] = [-1, 1]
        if what == "infer" and status == "200 OK":
            (count, _) = told["outputs"][0]["shape"]
            told["outputs"][0] |= {"shape": [count, 1], "data": [0.0] * count}
        return status, told


def text(letter: str, length: int = LONG) -> str:
    return letter * length


async def ask(
    w: World, texts: list[str], key: str = "", patience_ms: int = 120_000, route: str = "/v1/embeddings"
) -> Response:
    headers = {"content_type": "application/json", "x_request_timeout_ms": str(patience_ms)}
    asked = {"input": texts} if route == "/v1/embeddings" else {"query": "q", "documents": texts}
    body = json.dumps({"model": "m"} | asked).encode()
    return await w.ask(route, body, **headers, **({"x_api_key": key} if key else {}))


async def until_asked(triton: OneInstance, parts: int) -> None:
    while len(triton.order) < parts:  # noqa: ASYNC110 - of another task
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("lists", [1, 3])
@in_loop
async def test_a_short_text_is_answered_before_the_later_parts_of_long_lists(tmp_path: Path, lists: int) -> None:
    triton = OneInstance()
    async with world(tmp_path, triton, timeout_s=120.0) as w:
        listings = [asyncio.create_task(ask(w, [text("l")] * COUNT)) for _ in range(lists)]
        for number in range(5):
            await until_asked(triton, 30 * (number + 1))
            before = len(triton.order)
            answer = await ask(w, [text("s", 20)])
            assert answer.status == 200, answer.body
            assert triton.order.index(("s", 1), before) - before <= 2 * AT_ONCE * lists
        assert not any(listing.done() for listing in listings)
        for listing in listings:
            assert (await listing).status == 200


@in_loop
async def test_no_part_of_a_list_is_longer_than_the_bound_and_nothing_is_lost(tmp_path: Path) -> None:
    triton = OneInstance()
    async with world(tmp_path, triton, timeout_s=120.0) as w:
        answer = await ask(w, [text("l"), text("s", 20)] * 50)
        assert [each["index"] for each in json.loads(answer.body)["data"]] == [*range(100)]
        assert sum(count for _, count in triton.order) == 100
        assert max(count for letter, count in triton.order if letter == "l") <= LEAST // LONG
        assert sum(LONG * count for letter, count in triton.order if letter == "l") == LONG * 50, "short ones go apart"


@in_loop
async def test_a_text_that_is_refused_is_told_by_its_place_in_the_request(tmp_path: Path) -> None:
    async with world(tmp_path, OneInstance()) as w:
        for at in (0, 7, 38, 39):
            texts = [text("l", 300 + 20 * (number % 5)) for number in range(40)]
            texts[at] = "!" + texts[at][1:]
            answer = await ask(w, texts)
            assert answer.status == 400
            assert f"input {at} is wrong" in json.loads(answer.body)["error"]["message"]


@in_loop
async def test_two_lists_take_turns_whether_of_one_key_or_two(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    one, two = (add_key(keys, name, models=("m",), rate=1e6, burst=10**6)[0] for name in ("one", "two"))
    for first, second in ((one, one), (one, two)):
        triton = OneInstance()
        async with world(tmp_path, triton, timeout_s=120.0, keys=keys) as w:
            long = asyncio.create_task(ask(w, [text("a")] * COUNT, first))
            await until_asked(triton, 20)
            before = len(triton.order)
            assert (await ask(w, [text("b")] * 200, second)).status == 200
            meanwhile = [letter for letter, _ in triton.order[before:]]
            assert meanwhile.count("a") <= 2 * meanwhile.count("b")
            assert not long.done()
            assert (await long).status == 200


@in_loop
async def test_a_list_of_long_texts_costs_a_key_as_many_requests_as_the_largest_batch_makes_of_it(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys.json"
    key = add_key(keys, "slow", models=("m",), rate=1e-6, burst=4)[0]
    triton = OneInstance()
    async with world(tmp_path, triton, keys=keys) as w:
        assert (await ask(w, [text("l")] * (LARGEST + 1), key)).status == 200
        assert len(triton.order) > 4
        assert (await ask(w, [text("l")] * (LARGEST + 1), key)).status == 200
        assert (await ask(w, [text("s", 20)], key)).status == 429


def narrow(keys: Path) -> None:
    """Have the one key of a file ask another model."""
    told = json.loads(keys.read_text())
    (key,) = told["keys"]
    key["models"] = ["other"]
    keys.write_text(json.dumps(told))


@pytest.mark.parametrize("route", ["/v1/embeddings", "/v1/rerank"])
@pytest.mark.parametrize(
    ("change", "status"), [(lambda keys: revoke_key(keys, "one"), 401), (narrow, 403)], ids=["revoked", "narrowed"]
)
@in_loop
async def test_no_part_of_a_list_is_begun_once_its_key_may_not_ask_any_more(
    tmp_path: Path, route: str, change: Callable[[Path], Any], status: int
) -> None:
    keys = tmp_path / "keys.json"
    key = add_key(keys, "one", models=("m",), rate=1e6, burst=10**6)[0]
    triton = Judges() if route == "/v1/rerank" else OneInstance()
    async with world(tmp_path, triton, timeout_s=120.0, keys=keys) as w:
        listing = asyncio.create_task(ask(w, [text("l")] * COUNT, key, route=route))
        await until_asked(triton, 10)
        async with triton.free:  # no part is answered until the gateway knows of it
            change(keys)
            while (await w.ask("/predict/m", x_api_key=key)).status != status:  # noqa: ASYNC110 - of the gateway
                await asyncio.sleep(0.02)
            before = len(triton.order)
        answer = await listing
        assert answer.status == status, answer.body
        assert len(triton.order) - before <= AT_ONCE, "those that were with the model"


def places(most: int = 8) -> tuple[Admission, Lists]:
    alone = Admission("m", Bounds(most=most, least=min(2, most), wait_s=0.5), lambda: 0.0)
    return alone, Lists(alone)


def test_both_kinds_together_are_no_more_than_may_be_in_flight() -> None:
    alone, lists = places(most=3)
    assert [lists.places.try_enter() for _ in range(4)] == [True] * 3 + [False]
    assert not alone.try_enter()
    lists.places.leave(None)
    assert alone.try_enter()
    assert not lists.places.try_enter()


@in_loop
async def test_where_one_may_be_in_flight_the_two_kinds_take_turns() -> None:
    alone, lists = places(most=1)
    order: list[str] = []

    async def one(kind: Admission, name: str) -> None:
        await kind.enter(5, math.inf, patient=True)
        order.append(name)
        await asyncio.sleep(0)
        kind.leave(None)

    works = [one(alone, "alone") for _ in range(4)] + [one(lists.places, "list") for _ in range(4)]
    await asyncio.gather(*works)
    assert order == ["alone", "list"] * 4


def test_lists_leave_most_places_while_something_that_came_alone_is_with_the_model() -> None:
    alone, lists = places()
    assert [lists.places.try_enter() for _ in range(5)] == [True] * 4 + [False]
    for _ in range(4):
        lists.places.leave(None)
    assert alone.try_enter()
    assert [lists.places.try_enter() for _ in range(2)] == [True, False], "one may always run"


@in_loop
async def test_what_lists_left_is_theirs_again_once_nothing_alone_is_left() -> None:
    alone, lists = places()
    assert alone.try_enter()
    assert lists.places.try_enter()
    waiting = [asyncio.create_task(lists.places.enter(5, math.inf, patient=True)) for _ in range(3)]
    await asyncio.sleep(0)
    assert lists.places.waiting == 3
    alone.leave(None)
    await asyncio.gather(*waiting)
    assert lists.places.in_flight == 4


@in_loop
async def test_of_one_list_a_part_waits_at_a_time_and_is_patient_once_the_list_has_begun() -> None:
    _, lists = places()
    lists.places.limit = 1.0
    turns = Turns(lists, 4)
    parts = [ListPart(turns, 100) for _ in range(6)]
    assert parts[0].try_enter()
    lists.places.latency = 60.0  # nobody new would be let wait
    with pytest.raises(OverloadedError):
        Turns(lists, 4).check(5, math.inf, "")
    entering = [asyncio.create_task(part.enter(5, math.inf)) for part in parts[1:]]
    for part in parts:
        await asyncio.sleep(0)
        assert lists.places.waiting <= 1
        await asyncio.sleep(0)
        part.leave(1.0, 100)
        await asyncio.sleep(0)
    await asyncio.gather(*entering)
    assert (lists.places.in_flight, lists.places.waiting) == (0, 0)


@in_loop
async def test_what_comes_alone_is_not_turned_away_for_the_time_of_parts() -> None:
    now = [0.0]
    alone = Admission("m", Bounds(most=64, wait_s=0.5), lambda: now[0])
    lists = Lists(alone, lambda: now[0])

    def answers(kind: Admission, seconds: float, size: int) -> None:
        for _ in range(40):
            assert kind.try_enter()
            now[0] += 0.05
            kind.leave(seconds, size)

    answers(alone, 0.01, 100)
    limit = alone.limit
    answers(lists.places, 0.4, 4000)
    lists.places.take()
    answers(alone, 0.3, 100)  # each behind a part
    assert alone.limit >= limit
    lists.places.leave(0.4, 4000)
    answers(alone, 0.3, 100)
    assert alone.limit < limit, "by themselves they are slow"


def test_parts_are_as_long_as_the_model_is_fast() -> None:
    _, lists = places()
    assert lists.budget == LEAST
    lists.learn(4000, 1.0)
    assert lists.budget == LEAST, "no shorter"
    lists.learn(4000, 0.004)
    assert lists.budget == 100_000
    lists.learn(4000, 0.4)  # it has waited for others
    assert lists.budget == 95_000
    for _ in range(100):
        lists.learn(4000, 1.0)
    assert lists.budget == LEAST
