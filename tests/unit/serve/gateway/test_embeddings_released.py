"""Embeddings of a model under release: vectors of two models are never in one answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from serve.gateway.release.answers import Answers
from serve.http.client import Response
from serve.rollout.plan import Plan, Target
from tests.serve_http import in_loop
from tests.unit.serve.gateway.test_releases import FakeTriton, World, world

pytestmark = pytest.mark.clock
LARGEST = 2
CONFIG = {"max_batch_size": LARGEST, "parameters": {"task": {"string_value": "embeddings"}}}


@dataclass
class Encoders(FakeTriton):
    """Version 1 gives 0s, version 2 1s."""

    async def answered(self, who: str, what: str, body: bytes) -> tuple[str, Any]:
        status, told = await super().answered(who, what, body)
        if what == "":
            told["inputs"] = [{"name": "text", "datatype": "BYTES", "shape": [-1, 1]}]
        if what == "infer" and status == "200 OK":
            head = json.loads(body[: body.rindex(b"}") + 1])
            (count, _) = head["inputs"][0]["shape"]
            told["outputs"][0] |= {"shape": [count, 2], "data": [float(who == "m/2")] * 2 * count}
        return status, told


async def ask(w: World, count: int, length: int = 0) -> Response:
    texts = [f"text {number}".ljust(length, ".") for number in range(count)]
    body = json.dumps({"model": "m", "input": texts}).encode()
    return await w.ask("/v1/embeddings", body, content_type="application/json")


def by(answer: Response) -> set[float]:
    return {number for each in json.loads(answer.body)["data"] for number in each["embedding"]}


@in_loop
async def test_the_parts_of_a_request_are_answered_by_one_of_the_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[Any] = []
    add = Answers.add

    def added(answers: Answers, given: Any) -> Any:
        ids.append(add(answers, given))
        return ids[-1]

    monkeypatch.setattr(Answers, "add", added)
    async with world(tmp_path, Encoders(config=CONFIG)) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0, 90.0), shadow=0.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        answers = [await ask(w, 7 * LARGEST) for _ in range(30)]
        assert {answer.status for answer in answers} == {200}, answers[0].body
        assert all(len(by(answer)) == 1 for answer in answers)
        assert {number for answer in answers for number in by(answer)} == {0.0, 1.0}, "both have answered"
        assert {answer.header(b"served-by") for answer in answers} == {b"m/1", b"m/2"}
        assert {answer.header(b"answer-id") for answer in answers} == {None}, "one could speak of a part only"
        assert not ids, "nor is its key taken for one that may speak"
        assert (await ask(w, LARGEST)).header(b"answer-id")
        before = sum(w.triton.asked.values())
        assert (await ask(w, LARGEST, 4000)).header(b"answer-id"), "parted for its length, it is one request"
        assert sum(w.triton.asked.values()) == before + LARGEST
        assert len(ids) == 2


@in_loop
async def test_what_two_have_answered_all_the_same_is_no_answer(tmp_path: Path) -> None:
    async with world(tmp_path, Encoders(config=CONFIG)) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(90.0, 99.0), shadow=0.0, step_s=3600.0, fallback=True))
        await w.until(lambda row: row.state == "running")
        turn = w.triton.answered

        async def every_other(who: str, what: str, body: bytes) -> tuple[str, Any]:
            if who == "m/2" and b"text 3" in body:
                return "500 Internal Server Error", {"error": "failed"}
            return await turn(who, what, body)

        w.triton.answered = every_other  # type: ignore[method-assign]
        answers = [await ask(w, 2 * LARGEST) for _ in range(8)]  # one in ten is the baseline's alone
        assert all(len(by(answer)) == 1 for answer in answers if answer.status == 200)
        torn = [answer for answer in answers if answer.status != 200]
        assert torn
        for answer in torn:
            assert answer.status == 503, answer.body
            assert json.loads(answer.body)["error"]["type"] == "server_error"
            assert answer.header(b"retry-after") == b"1"
