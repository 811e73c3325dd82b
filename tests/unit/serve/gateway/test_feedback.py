"""What clients say of answers: read strictly, matched with who gave them, counted once, and judged."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve.gateway.access.keys import add_key
from serve.gateway.access.memory import Memory
from serve.gateway.errors import GatewayError
from serve.gateway.oip.protocol import build_request
from serve.gateway.oip.tensors import DATATYPES, Tensor
from serve.gateway.release.answers import ENTRY_BYTES, KEPT_BYTES, Answers, Given
from serve.gateway.release.feedback import MOST_BYTES, Feedback, Said
from serve.http.client import Response
from serve.rollout.plan import Plan, Target
from tests.serve_http import in_loop
from tests.unit.serve.gateway.test_releases import INFER, FakeTriton, World, ended, world

pytestmark = pytest.mark.clock


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"id": "a", "correct": true}', Said("a", correct=True)),
        ('{"correct": false, "id": "a"}', Said("a", correct=False)),
        ('{"id": "a", "label": "cat"}', Said("a", label="cat")),
        ('{"id": "a", "label": 7, "output": "y"}', Said("a", label="7", output="y")),
    ],
)
def test_feedback_is_read(body: str, said: Said) -> None:
    assert Said.parse(body.encode()) == said


@pytest.mark.parametrize(
    "body",
    [
        "", "{}", "[]", "null", '"a"', "{", '{"id": "a"}', '{"correct": true}', '{"id": 1, "correct": true}',
        '{"id": "", "correct": true}', '{"id": "a", "correct": 1}', '{"id": "a", "correct": "true"}',
        '{"id": "a", "correct": null}', '{"id": "a", "correct": true, "label": "x"}', '{"id": "a", "label": true}',
        '{"id": "a", "label": 1.5}', '{"id": "a", "label": null}', '{"id": "a", "label": ["x"]}',
        '{"id": "a", "correct": true, "output": "y"}', '{"id": "a", "label": "x", "output": 1}',
        '{"id": "a", "correct": true, "key": "k"}', '{"id": "a", "id": "b", "correct": true}',
        '{"id": "a", "correct": true, "correct": false}', '{"id": "a", "label": NaN}', "[" * 2000, '{"id": "a\xff"',
        '{"id": "' + "a" * 600 + '", "correct": true}', '{"id": "a", "label": "' + "x" * 600 + '"}',
        '{"id": "a", "label": ' + "1" * 600 + "}",
    ],
)  # fmt: skip
def test_what_is_not_just_that_is_refused(body: str) -> None:
    with pytest.raises(GatewayError) as err:
        Said.parse(body.encode("latin-1"))
    assert err.value.status == 400
    assert "Answer" in err.value.mend or "id" in err.value.mend


def given(key: str = "", body: bytes | None = None, **more: Any) -> Given:
    return Given(key, "m", "m/2", (1, 0.0), "candidate", body, **more)


def kept(answers: Answers, key: str = "", body: bytes | None = None) -> str:
    id_ = answers.add(given(key, body))
    assert id_ is not None
    return id_


def test_the_last_answers_are_kept_and_a_key_drives_out_its_own() -> None:
    memory = Memory(1 << 30)
    answers = Answers(8, 60.0, memory)
    loud = [kept(answers, "loud") for _ in range(50)]
    quiet = [kept(answers, "quiet") for _ in range(2)]
    loud += [kept(answers, "loud") for _ in range(50)]
    assert [id_ for id_ in loud if answers.find(id_, "loud")] == loud[-2:], "a quarter"
    assert all(answers.find(id_, "quiet") for id_ in quiet)
    assert not answers.find(quiet[0], "loud"), "a key speaks of its own"
    for number in range(20):
        kept(answers, f"key {number}")
    assert len(answers) == 8
    assert memory.used == 8 * ENTRY_BYTES
    assert len(set(loud + quiet)) == 102


def test_not_even_many_keys_drive_out_the_answers_of_one_that_asks_now_and_then() -> None:
    answers = Answers(100, 60.0)
    quiet = [kept(answers, "quiet") for _ in range(3)]
    for number in range(2000):
        kept(answers, f"loud {number % 20}")
    assert all(answers.find(id_, "quiet") for id_ in quiet)
    assert len(answers) == 100
    assert len(answers._of_key) == 21


def test_answers_are_forgotten_in_time_and_what_they_held_is_given_back() -> None:
    now = [0.0]
    memory = Memory(1 << 30)
    answers = Answers(100, 60.0, memory, clock=lambda: now[0])
    first = kept(answers, "k", b"x" * 100)
    kept(answers, "k", b"x" * (KEPT_BYTES + 1))
    assert memory.used == 2 * ENTRY_BYTES + 100, "what is long is not kept"
    now[0] = 59.0
    found = answers.find(first, "k")
    assert found is not None
    answers.done(found)
    assert memory.used == 2 * ENTRY_BYTES
    now[0] = 60.0
    assert answers.find(first, "k") is None
    assert (memory.used, len(answers), answers._of_key) == (0, 0, {})


def test_answers_take_a_share_of_the_memory_and_none_where_there_is_none() -> None:
    memory = Memory(16 * 10 * ENTRY_BYTES)
    answers = Answers(1000, 60.0, memory)
    for _ in range(50):
        kept(answers)
    assert (len(answers), memory.used) == (10, 10 * ENTRY_BYTES)
    full = Memory(16 * 10 * ENTRY_BYTES)
    full.used = full.bound
    assert Answers(1000, 60.0, full).add(given()) is None
    assert Answers(0, 60.0).add(given()) is None


def body_of(*outputs: tuple[str, str, Any], binary: bool) -> tuple[bytes, int | None]:
    tensors = []
    for name, datatype, values in outputs:
        data = np.array(values, dtype=object) if datatype == "BYTES" else np.array(values, DATATYPES[datatype])
        tensors.append(Tensor(name, datatype, data))
    message = build_request(tensors, binary=binary)
    swapped = message.body.replace(b'"inputs"', b'"outputs"')
    if not binary:
        swapped = swapped.replace(b"null", b"NaN")  # as Triton writes it
    length = message.header_length
    return swapped, None if length is None else length + len(swapped) - len(message.body)


class NoReleases:
    def get(self, model: str) -> None:
        return None


NAN = float("nan")
LABEL = ("label", "BYTES", [[b"cat", b"dog"]])
SCORES = ("scores", "FP32", [[0.1, 0.2, 0.7]])


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(
    ("outputs", "said", "correct"),
    [
        ([LABEL], {"label": "cat"}, True),
        ([LABEL], {"label": "dog"}, False),
        ([LABEL, SCORES], {"label": "cat"}, True),
        ([LABEL, SCORES], {"label": 2, "output": "scores"}, True),
        ([LABEL, SCORES], {"label": "1", "output": "scores"}, False),
        ([SCORES], {"label": 2}, True),
        ([("scores", "FP32", [[NAN, 0.2, 0.7]])], {"label": 2}, True),
        ([("scores", "FP32", [[NAN, 0.2, 0.7]])], {"label": 0}, False),
        ([("scores", "FP32", [[NAN, NAN, NAN]])], {"label": 0}, False),
        ([("id", "INT64", [[7]])], {"label": 7}, True),
        ([("id", "INT64", [[7]])], {"label": "8"}, False),
        ([("y", "BYTES", [[b"0.7:2:cat", b"0.2:1:dog"]])], {"label": "cat"}, True),
        ([("y", "BYTES", [[b"0.7:2:cat", b"0.2:1:dog"]])], {"label": 2}, True),
        ([("y", "BYTES", [[b"0.7:2", b"0.2:1"]])], {"label": 1}, False),
        ([SCORES], {"label": 2, "output": "label"}, "name it"),
        ([SCORES, ("id", "INT64", [[7]])], {"label": 7}, "name it"),
        ([("label", "BYTES", [[b"cat"], [b"dog"]])], {"label": "cat"}, "one item a request"),
        ([("p", "FP32", [[0.7]])], {"label": 1}, "send correct"),
        ([("p", "BOOL", [[True]])], {"label": 1}, "send correct"),
        ([("label", "BYTES", np.zeros((1, 0), object))], {"label": "x"}, "send correct"),
    ],
)
def test_a_label_is_held_against_the_answers(
    binary: bool, outputs: list[Any], said: dict[str, Any], correct: bool | str
) -> None:
    answers = Answers(10, 60.0)
    feedback = Feedback(answers, NoReleases())  # type: ignore[arg-type]
    body, length = body_of(*outputs, binary=binary)
    id_ = answers.add(given(body=body, header_length=length, texts=frozenset({"label"})))
    told = json.dumps({"id": id_, **said}).encode()
    if isinstance(correct, str):
        with pytest.raises(GatewayError) as err:
            feedback.take("", told)
        assert err.value.status == 422
        assert correct in err.value.mend
        assert feedback.take("", json.dumps({"id": id_, "correct": True}).encode())["counted"], "it is not used up"
        return
    assert feedback.take("", told) == {"model": "m", "served_by": "m/2", "counted": True, "correct": correct}
    assert feedback.take("", told) == {"model": "m", "served_by": "m/2", "counted": False}


@pytest.mark.parametrize(
    ("text", "label", "correct"),
    [
        (b"0.7:2:cat", "cat", True), (b"0.7:2:cat", 2, True), (b"0.7:2", 2, True), (b"-1.5e-05:2", "3", False),
        (b"0.7:2:cat", "0.7:2:cat", True), (b"cat: 2", "2", False), (b"cat: 2", "cat: 2", True), (b"9:30", "9:30", True),
    ],
)  # fmt: skip
def test_after_a_restart_classes_are_known_by_their_form(text: bytes, label: str | int, correct: bool) -> None:
    answers = Answers(10, 60.0)
    feedback = Feedback(answers, NoReleases())  # type: ignore[arg-type]
    body, length = body_of(("y", "BYTES", [[text]]), binary=True)
    id_ = answers.add(given(body=body, header_length=length, texts=None))
    assert feedback.take("", json.dumps({"id": id_, "label": label}).encode())["correct"] is correct


@dataclass
class Client:
    """Asks, and speaks of what it got."""

    w: World
    key: str = ""

    async def asked(self) -> tuple[str, str]:
        """Who answered, and the id."""
        answered = await self.w.ask(INFER, b"{}", **self.headers)
        assert answered.status == 200
        served_by, id_ = (answered.header(name) or b"" for name in (b"served-by", b"answer-id"))
        return served_by.decode(), id_.decode()

    @property
    def headers(self) -> dict[str, str]:
        return {"x_api_key": self.key} if self.key else {}

    async def says(self, body: Any) -> Response:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.w.ask("/feedback", text, **self.headers)


@in_loop
async def test_feedback_counts_once_and_for_who_answered(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        client = Client(w)
        assert await client.asked() == ("", ""), "without a release there is nothing to speak of"
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        seen = {"m/1": 0, "m/2": 0}
        for _ in range(40):
            served_by, id_ = await client.asked()
            seen[served_by] += 1
            told = json.loads((await client.says({"id": id_, "correct": served_by == "m/1"})).body)
            assert (told["served_by"], told["counted"], told["correct"]) == (served_by, True, served_by == "m/1")
            again = await client.says({"id": id_, "correct": True})
            assert (again.status, json.loads(again.body)["counted"]) == (200, False)
        assert min(seen.values()) > 0
        page = (await w.pool.request(b"GET", b"/metrics")).body.decode()
        assert f'gateway_feedback_total{{model="m",outcome="correct",served_by="m/1"}} {seen["m/1"]:.1f}' in page
        assert f'gateway_feedback_total{{model="m",outcome="wrong",served_by="m/2"}} {seen["m/2"]:.1f}' in page
        evidence = (await w.shown())["evidence"]
        if "feedback" in evidence:  # it may have been rolled back by then
            assert (evidence["feedback"]["candidate"], evidence["feedback"]["baseline"]) == (1.0, 0.0)
        assert (await client.says({"id": "unknown", "correct": True})).status == 404
        assert (await client.says(b"nonsense")).status == 400
        assert (await client.says(b" " * (MOST_BYTES + 1))).status == 413
        assert (await w.pool.request(b"GET", b"/feedback")).status == 405


@pytest.mark.parametrize(("right", "state"), [(True, "promoted"), (False, "aborted")])
@in_loop
async def test_who_is_reported_wrong_more_often_is_rolled_back(tmp_path: Path, right: bool, state: str) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        client = Client(w)
        plan = Plan(
            steps=(50.0,), shadow=0.0, step_s=0.0, max_error_increase=0.5, max_latency_increase=100.0,
            max_wrong_increase=0.2, require_feedback=True,
        )  # fmt: skip
        w.store.start("m", Target("m", "2"), plan)
        await w.until(lambda row: row.state == "running")
        for _ in range(2000):
            served_by, id_ = await client.asked()
            if not w.store.current()[0].active or served_by == "":
                break
            await client.says({"id": id_, "label": 1 if right or served_by == "m/1" else 0})
            if (await w.shown())["state"] != "running":
                break
        row = await w.until(ended)
        assert row.state == state, row.why
        assert f"{0 if right else 100}% of its answers are reported wrong, 0% of the baseline's" in row.why


@in_loop
async def test_a_step_that_needs_feedback_waits_for_it(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        plan = Plan(
            steps=(50.0,), shadow=0.0, step_s=0.0, max_error_increase=0.5, max_latency_increase=100.0,
            require_feedback=True,
        )  # fmt: skip
        w.store.start("m", Target("m", "2"), plan)
        await w.until(lambda row: row.state == "running")
        for _ in range(400):
            await w.ask()
        shown = await w.shown()
        assert shown["state"] == "running"
        assert all(shown["evidence"][name]["proof"] > 1 for name in ("errors", "latency"))
        assert (shown["evidence"]["feedback"]["count"], shown["evidence"]["feedback"]["required"]) == (0, True)


@in_loop
async def test_an_answer_for_which_another_had_failed_is_no_evidence(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton(fails={"m/2"})) as w:
        client = Client(w)
        plan = Plan(steps=(99.9,), shadow=0.0, step_s=3600.0, max_error_increase=0.98)
        w.store.start("m", Target("m", "2"), plan)
        await w.until(lambda row: row.state == "running")
        for _ in range(5):
            served_by, id_ = await client.asked()
            assert served_by == "m/1"
            assert json.loads((await client.says({"id": id_, "correct": False})).body)["counted"]
        assert "feedback" not in (await w.shown())["evidence"]


@in_loop
async def test_where_anybody_may_ask_without_a_key_nobody_ends_a_release(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton(), anonymous=True) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        served_by, id_ = await Client(w).asked()
        assert served_by
        assert not id_
        assert (await Client(w).says({"id": "x", "correct": False})).status == 404


@in_loop
async def test_what_only_the_baseline_can_answer_is_no_evidence_of_the_two(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        answered = await w.ask(body=b'{"parameters": {"sequence_id": 7}}')
        id_ = (answered.header(b"answer-id") or b"").decode()
        assert json.loads((await Client(w).says({"id": id_, "correct": False})).body)["counted"]
        assert "feedback" not in (await w.shown())["evidence"]


@in_loop
async def test_answers_of_a_release_that_has_ended_are_still_counted(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        client = Client(w)
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        w.store.wish("m", "promote")
        await w.until(ended)
        served_by, id_ = await client.asked()
        assert served_by == "m/2"
        told = json.loads((await client.says({"id": id_, "label": 1})).body)
        assert told == {"model": "m", "served_by": "m/2", "counted": True, "correct": True}


@in_loop
async def test_what_is_said_of_a_rollout_in_another_state_file_is_no_evidence(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        plan = Plan(steps=(50.0,), shadow=0.0, step_s=3600.0)
        w.store.start("m", Target("m", "2"), plan)
        await w.until(lambda row: row.state == "running")
        _, id_ = await Client(w).asked()
        w.store.path.unlink()
        w.store.start("m", Target("other"), plan)
        await w.until(lambda row: row.state == "running" and row.baseline is not None)
        assert json.loads((await Client(w).says({"id": id_, "correct": False})).body)["counted"]
        assert "feedback" not in (await w.shown())["evidence"]


@in_loop
async def test_a_key_speaks_of_its_own_answers_where_it_has_the_right(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    critic, other, plain = (add_key(keys, name, feedback=name != "plain")[0] for name in ("critic", "other", "plain"))
    async with world(tmp_path, FakeTriton(), keys=keys) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        _, id_ = await Client(w, critic).asked()
        assert id_
        served_by, none = await Client(w, plain).asked()
        assert served_by
        assert not none, "who may not speak of answers takes no place of those that others may speak of"
        word = {"id": id_, "correct": True}
        assert (await Client(w).says(word)).status == 401
        assert (await Client(w, plain).says(word)).status == 403
        assert (await Client(w, other).says(word)).status == 404
        assert (await Client(w, critic).says(word)).status == 200
        answered = [(await Client(w, critic).says(word)).status for _ in range(150)]
        assert answered[-1] == 429, "it counts against what a key may ask"
