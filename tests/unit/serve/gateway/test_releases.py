"""Releases in front of a server that answers as it is told: who answers whom, and what comes of faults."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from compress.errors import ServerError
from serve.gateway import app as app_module
from serve.gateway.access.keys import add_key
from serve.gateway.health.incidents import Incidents
from serve.gateway.health.outages import ModelDownError
from serve.gateway.oip.apart import Apart
from serve.gateway.release import released
from serve.gateway.release.grades import Grade
from serve.gateway.release.release import MOST_COPIES, Release
from serve.gateway.release.releases import LOOK_S, Releases
from serve.gateway.settings import Settings
from serve.http.client import Address, Pool, Response
from serve.rollout.agree import Agree
from serve.rollout.course import Course
from serve.rollout.plan import Plan, Target
from serve.rollout.store import Row, StateFileError, Store
from tests.full_disk import full_disk
from tests.serve_http import Received, answer, gateway, in_loop, scripted_server

pytestmark = pytest.mark.clock

INFER = "/v2/models/m/infer"
FAST = Plan(steps=(50.0,), shadow=0.0, step_s=0.0)


@dataclass
class FakeTriton:
    """Answers for "m" versions 1 and 2, and for "other".

    Attributes:
        scores: by who is asked, as "m/2"; "m" where no version was named.
        fails: who answers 500.
        refuses: who answers 400.
        missing: who is not loaded.
        packs: whether answers come with gzip.
        whole: whether an answer is one item, without a batch.
        dies: who closes the connection.
        echoes: whether the answer follows the request: "long" is answered by 2s, "other" otherwise by version 2.
    """

    scores: dict[str, list[float]] = field(default_factory=dict)
    fails: set[str] = field(default_factory=set)
    refuses: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    dies: set[str] = field(default_factory=set)
    inputs: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=lambda: {"max_batch_size": 8})
    slow: dict[str, float] = field(default_factory=dict)
    packs: bool = False
    whole: bool = False
    echoes: bool = False
    expires: set[str] = field(default_factory=set)
    index: list[dict[str, str]] | None = None
    asked: Counter[str] = field(default_factory=Counter)

    async def __call__(self, request: Received, writer: asyncio.StreamWriter) -> None:
        parts = request.target.strip("/").split("/")
        model, rest = parts[2], parts[3:]
        if parts[1:] == ["repository", "index"] and self.index is not None:
            writer.write(answer(json.dumps(self.index).encode(), "200 OK", "content-type: application/json"))
            return
        if rest[:1] == ["versions"]:
            model, rest = f"{model}/{rest[1]}", rest[2:]
        if rest == ["infer"] and model in self.dies:
            self.asked[model] += 1
            writer.close()
            return
        status, told = await self.answered(model, rest[0] if rest else "", request.body)
        body, headers = json.dumps(told).encode(), ["content-type: application/json"]
        if self.packs and rest == ["infer"]:
            body = gzip.compress(body)
            headers.append("content-encoding: gzip")
        writer.write(answer(body, status, *headers))

    async def answered(self, who: str, what: str, body: bytes) -> tuple[str, Any]:
        if who in self.missing:
            return "404 Not Found", {"error": "unknown model"}
        if what == "ready":
            return "200 OK", {}
        if what == "config":
            return "200 OK", self.config
        if what == "":
            name = self.inputs.get(who, "x")
            tensors = {"inputs": [{"name": name, "datatype": "FP32", "shape": [-1, 2]}], "outputs": [
                {"name": "y", "datatype": "FP32", "shape": [-1, 2]}]}  # fmt: skip
            return "200 OK", {"name": who.partition("/")[0], "versions": ["1", "2"], **tensors}
        self.asked[who] += 1
        await asyncio.sleep(self.slow.get(who, 0.0))
        if b"gone" in body:
            return "404 Not Found", {"error": GONE}
        if who in self.expires:
            return "503 Service Unavailable", {"error": "Request timeout expired"}
        if b"poison" in body or who in self.fails:
            return "500 Internal Server Error", {"error": "failed"}
        if who in self.refuses or b"rubbish" in body:
            return "400 Bad Request", {"error": "rubbish"}
        scores = self.scores.get(who, [0.1, 0.9])
        if self.echoes and body != b"{}":
            scores = [2.0, 2.0] if body == b"long" else [float(who == "m/2"), 0.5]
        y = {
            "name": "y",
            "datatype": "FP32",
            "shape": [len(scores)] if self.whole else [1, len(scores)],
            "data": scores,
        }
        return "200 OK", {"model_name": who, "model_version": "1", "outputs": [y]}


GONE = "Request for unknown model: 'm' version 1 is not found"


@dataclass
class World:
    triton: FakeTriton
    address: Address
    store: Store
    pool: Pool

    async def ask(self, path: str = INFER, body: bytes = b"{}", **headers: str) -> Response:
        sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        return await self.pool.request(b"POST", path.encode(), sent, body)

    async def served(self, count: int, **headers: str) -> Counter[str]:
        answers = [await self.ask(INFER, b"{}", **headers) for _ in range(count)]
        assert all(each.status == 200 for each in answers)
        return Counter((each.header(b"served-by") or b"").decode() for each in answers)

    async def until(self, holds: Callable[[Row], bool], *, asking: bool = False, within_s: float = 60.0) -> Row:
        """Wait for something of the rollout (of each, where there are several), with requests meanwhile if wanted."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            rows = self.store.current()
            if all(map(holds, rows)):
                return rows[0]
            if asking:
                await asyncio.gather(*(self.ask() for _ in range(20)))
            else:
                await asyncio.sleep(0.05)
        raise AssertionError(self.store.current()[0].to_dict())

    async def shown(self, key: str = "") -> dict[str, Any]:
        headers = [(b"x-api-key", key.encode())] if key else []
        answered = await self.pool.request(b"GET", b"/rollouts", headers)
        (rollout,) = json.loads(answered.body)
        found: dict[str, Any] = rollout
        return found


@asynccontextmanager
async def world(
    folder: Path, triton: FakeTriton, incidents: Incidents | None = None, **settings: Any
) -> AsyncIterator[World]:
    path = folder / "rollouts.db"
    async with (
        scripted_server(triton) as server,
        gateway(Settings(upstream=(server.url,), port=0, state=path, **settings), incidents=incidents) as address,
    ):
        pool = Pool(address, max_connections=32)
        yield World(triton, address, Store(path), pool)
        await pool.close()


def ended(row: Row) -> bool:
    return not row.active


@in_loop
async def test_without_a_rollout_triton_s_own_choice_answers(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        assert await w.served(3) == {"": 3}
        assert w.triton.asked == {"m": 3}
        assert not w.store.path.exists()


@in_loop
async def test_what_is_served_stays_until_the_candidate_is_loaded(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton(missing={"m/2"})) as w:
        w.store.start("m", Target("m", "2"), FAST)
        row = await w.until(lambda row: row.baseline is not None)
        assert (row.state, row.baseline) == ("waiting", Target("m", "1"))
        assert row.why.startswith("m/2 is not loaded yet: serve models load m ")
        assert await w.served(5) == {"m/1": 5}
        w.triton.missing.clear()
        await w.until(lambda row: row.state == "running")


@pytest.mark.parametrize("baseline", [None, Target("m")], ids=["by default", "named"])
@in_loop
async def test_a_candidate_that_is_nowhere_is_refused_with_the_names_there_are(
    tmp_path: Path, baseline: Target | None
) -> None:
    """A typing error: it was waited for without end. The names are told the operator, and nobody at /rollouts."""
    index = [{"name": name} for name in ("m", "another", "m_next")]
    async with world(tmp_path, FakeTriton(missing={"m_nxt"}, index=index)) as w:
        w.store.start("m", Target("m_nxt"), FAST, baseline)
        row = await w.until(ended)
        assert (row.state, row.why) == ("aborted", "no model is called m_nxt")
        last = w.store.events(row.id)[-1]
        assert last.kind == "refused"
        assert last.why.endswith("; name one that is there (m_next, another, m), or pack it first")
        assert "m_next" not in json.dumps(await w.shown())
        assert await w.served(3) == {"m": 3}


@in_loop
async def test_a_candidate_that_is_there_and_not_loaded_is_waited_for(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton(missing={"m_next"}, index=[{"name": "m"}, {"name": "m_next"}])) as w:
        w.store.start("m", Target("m_next"), FAST)
        row = await w.until(lambda row: row.baseline is not None)
        assert row.state == "waiting"
        assert "serve models load m_next" in row.why


@in_loop
async def test_a_good_candidate_takes_over(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("other"), FAST)
        row = await w.until(ended, asking=True)
        assert row.state == "promoted"
        assert await w.served(5) == {"other": 5}
        assert min(w.triton.asked["m"], w.triton.asked["other"]) > 0
        assert (await w.ask("/v2/models/m/versions/2/infer")).header(b"served-by") is None, "a version is a version"


@pytest.mark.parametrize("how", ["fails", "refuses", "missing"])
@in_loop
async def test_a_candidate_that_fails_is_taken_back_and_no_client_notices(tmp_path: Path, how: str) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("m", "2"), FAST)
        await w.until(lambda row: row.state == "running")
        getattr(w.triton, how).add("m/2")
        assert await w.served(150) == {"m/1": 150}
        row = await w.until(ended)
        assert (row.state, w.triton.asked["m/2"] < 65) == ("aborted", True)
        assert re.match(r"100% of its \d+ requests fail", row.why)


@in_loop
async def test_without_fallback_clients_see_the_candidate_s_failures(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton(fails={"m/2"})) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=0.0, fallback=False))
        await w.until(lambda row: row.state == "running")
        statuses = Counter([(await w.ask()).status for _ in range(150)])
        assert 3 < statuses[500] < 65
        assert (await w.until(ended)).state == "aborted"


@in_loop
async def test_a_rollout_in_another_state_file_is_another_one(tmp_path: Path) -> None:
    """Ids begin with 1 in each file: what is asked for there must not go to the candidate of here."""
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        w.store.path.unlink()
        w.store.start("m", Target("other"), Plan(steps=(50.0,), shadow=0.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        assert set(await w.served(20)) == {"m", "other"}
        w.store.wish("m", "promote")
        await w.until(lambda row: row.state == "promoted")
        assert set(await w.served(5)) == {"other"}


@in_loop
async def test_a_client_s_own_mistakes_are_held_against_nobody(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("m", "2"), FAST)
        await w.until(lambda row: row.state == "running")
        assert {(await w.ask(body=b"rubbish")).status for _ in range(40)} == {400}
        assert (await w.shown())["evidence"]["errors"]["count"] == 0


@in_loop
async def test_a_client_s_own_deadline_is_evidence_against_nobody(tmp_path: Path) -> None:
    triton = FakeTriton(slow={"m/1": 0.02, "m/2": 0.02, "m": 0.02})
    async with world(tmp_path, triton) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=600.0, fallback=False))
        await w.until(lambda row: row.state == "running")
        for _ in range(10):
            hurried = [w.ask(x_request_timeout_ms="5") for _ in range(16)]
            assert 200 not in {each.status for each in await asyncio.gather(*hurried)}
            assert {(await w.ask()).status for _ in range(8)} == {200}
        told = await w.shown()
        assert (told["state"], told["evidence"]["errors"]["candidate"]) == ("running", 0.0)
        page = (await w.pool.request(b"GET", b"/metrics")).body.decode()
        cut = [line for line in page.splitlines() if 'outcome="cut"' in line and 'variant="candidate"' in line]
        assert float(cut[0].split()[-1]) > 20
        assert 'outcome="late"' not in page


@pytest.mark.parametrize("leaves", [False, True], ids=["a deadline of their own", "a closed connection"])
@in_loop
async def test_a_candidate_that_hangs_is_taken_back_though_clients_give_up_first(tmp_path: Path, leaves: bool) -> None:
    async with world(tmp_path, FakeTriton(slow={"m/2": 60.0}), timeout_s=3.0) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")

        async def ask() -> None:
            try:
                async with asyncio.timeout(0.5 if leaves else None):
                    await (w.ask() if leaves else w.ask(x_request_timeout_ms="500"))
            except TimeoutError:
                pass

        begun = time.monotonic()
        while (await w.shown())["state"] == "running" and time.monotonic() - begun < 60:
            await asyncio.gather(*(ask() for _ in range(20)))
        row = await w.until(ended)
        assert row.state == "aborted"
        assert "the baseline's" in row.why


@in_loop
async def test_clients_get_the_baseline_s_answers_while_a_candidate_hangs_until_it_is_taken_back(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, FakeTriton(slow={"m/2": 60.0}), timeout_s=4.0) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        begun = time.monotonic()
        while (await w.shown())["state"] == "running":
            answers = await asyncio.gather(*(w.ask() for _ in range(20)))
            assert {(each.status, each.header(b"served-by")) for each in answers} == {(200, b"m/1")}
        assert time.monotonic() - begun < 60
        row = await w.until(ended)
    assert "of its" in row.why
    assert "requests fail" in row.why


@in_loop
async def test_clients_in_a_hurry_are_answered_and_what_hangs_is_taken_back_for_them_too(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton(slow={"m/2": 60.0}), timeout_s=3.0) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=3600.0, max_latency_increase=1e6))
        await w.until(lambda row: row.state == "running")
        begun = time.monotonic()
        while (await w.shown())["state"] == "running":
            answers = await asyncio.gather(*(w.ask(x_request_timeout_ms="1000") for _ in range(10)))
            assert {(each.status, each.header(b"served-by")) for each in answers} == {(200, b"m/1")}
        assert time.monotonic() - begun < 60
        row = await w.until(ended)
    assert "requests fail" in row.why


@in_loop
@pytest.mark.parametrize(("body", "state"), [(b'{"parameters": {"timeout": 1}}', "running"), (b"{}", "aborted")])
async def test_a_client_s_own_time_in_the_queue_is_evidence_against_nobody(
    tmp_path: Path, body: bytes, state: str
) -> None:
    async with world(tmp_path, FakeTriton(expires={"m/2"})) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=600.0, fallback=False))
        await w.until(lambda row: row.state == "running")
        for _ in range(20):
            await asyncio.gather(*(w.ask(body=body) for _ in range(10)))
        if state != "running":
            await w.until(ended)
        assert w.store.current()[0].state == state


@pytest.mark.parametrize(("scores", "state"), [([0.2, 0.8], "promoted"), ([0.9, 0.1], "aborted")])
@in_loop
async def test_copies_are_compared_and_thrown_away(tmp_path: Path, scores: list[float], state: str) -> None:
    async with world(tmp_path, FakeTriton(scores={"m/2": scores})) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(), shadow=100.0, step_s=0.0, max_error_increase=0.05))
        await w.until(lambda row: row.state == "running")
        assert await w.served(10) == {"m/1": 10}
        row = await w.until(ended, asking=True)
        assert row.state == state
        assert w.triton.asked["m/2"] >= 5


@in_loop
async def test_copies_to_a_candidate_that_stays_down_count_against_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of copies alone would wait for ever: nobody asks a model that is known to be down."""
    down = Grade.FAILED, ModelDownError("n", "it died")
    monkeypatch.setattr(released, "graded_down", lambda _, target: down if target.model == "n" else None)
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("n"), Plan(steps=(50.0,), shadow=100.0, step_s=0.0))
        await w.until(lambda row: row.state == "running")
        row = await w.until(ended, asking=True)
        assert row.state == "aborted"
        assert w.triton.asked["n"] == 0


@in_loop
async def test_a_rule_that_fits_no_output_is_refused_before_the_candidate_is_loaded(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton(missing={"m/2"})) as w:
        w.store.start("m", Target("m", "2"), Plan(agree=(Agree.parse("label:first"),)))
        row = await w.until(ended)
        assert (row.state, row.why) == ("aborted", "--agree label:first: m has no such output; name one of y")
        assert [event.kind for event in w.store.events(row.id)] == ["started", "refused"]
        assert await w.served(3) == {"m/1": 3}


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ({}, "aborted"),
        ({"agree": (Agree.parse("y:tolerance=0.5"),)}, "promoted"),
        ({"agree": (Agree.parse("y:argmax"),), "tolerance": 0.5}, "aborted"),
        ({"expect_change": True}, "promoted"),
    ],
    ids=["as usual", "within a tolerance", "a rule before the tolerance", "expected"],
)
@in_loop
async def test_who_answers_otherwise_is_judged_by_what_was_asked_for(
    tmp_path: Path, values: dict[str, Any], state: str
) -> None:
    async with world(tmp_path, FakeTriton(scores={"m/1": [0.4, 0.6], "m/2": [0.6, 0.4]})) as w:
        plan = Plan(steps=(), shadow=100.0, step_s=0.0, max_error_increase=0.05, max_disagreement=0.1, **values)
        w.store.start("m", Target("m", "2"), plan)
        await w.until(lambda row: row.state == "running")
        row = await w.until(ended, asking=True)
        assert row.state == state
        if plan.expect_change:
            assert "disagrees with the baseline on 100% of" in row.why
        shown = await w.shown()
        assert (shown["plan"]["agree"], shown["agreement"]) == (list(map(str, plan.agree)), plan.agreement)


CHOOSY = """
def choosy(candidate, baseline):
    if candidate[0] == 2:
        raise MemoryError("too long")
    return bool((candidate == baseline).all())
"""
RULES = """
def alike(candidate, baseline):
    return bool(abs(candidate - baseline).max() < 0.5)

def apart(candidate, baseline):
    return False

def failing(candidate, baseline):
    raise ValueError("no boxes")
"""


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("rule", "state"), [("alike", "promoted"), ("apart", "aborted"), ("failing", "aborted")])
@in_loop
async def test_a_function_of_the_operators_decides_who_disagrees(
    tmp_path: Path, rule: str, state: str, packed: bool
) -> None:
    """One that fails says so, and lets nobody pass."""
    (tmp_path / "rules.py").write_text(RULES)
    triton = FakeTriton(scores={"m/1": [0.4, 0.6], "m/2": [0.6, 0.4]}, packs=packed)
    async with world(tmp_path, triton, agree_module=tmp_path / "rules.py") as w:
        plan = Plan(
            steps=(), shadow=100.0, step_s=0.0, max_error_increase=0.05, max_disagreement=0.1,
            agree=(Agree.parse(f"y:function={rule}"),),
        )  # fmt: skip
        w.store.start("m", Target("m", "2"), plan)
        row = await w.until(ended, asking=True)
        assert row.state == state
        kinds = [event.kind for event in w.store.events(row.id)]
        assert ("note" in kinds) == (rule == "failing")
        assert ("which count as others: failing: ValueError: no boxes (line 9)" in row.why) == (rule == "failing")


@pytest.mark.parametrize(("sends", "says"), [("long", "no judgement"), ("other", "one key alone")])
@in_loop
async def test_one_of_several_keys_takes_no_candidate_back(tmp_path: Path, sends: str, says: str) -> None:
    """Not with requests whose answers differ, nor with such that the operator's function fails at."""
    (tmp_path / "rules.py").write_text(CHOOSY)
    keys = tmp_path / "keys.json"
    liar, *honest = (add_key(keys, name)[0] for name in ("liar", "one", "two"))
    triton = FakeTriton(echoes=True)
    async with world(tmp_path, triton, agree_module=tmp_path / "rules.py", keys=keys) as w:
        plan = Plan(steps=(), shadow=100.0, step_s=1.0, agree=(Agree.parse("y:function=choosy"),))
        w.store.start("m", Target("m", "2"), plan)
        await w.until(lambda row: row.state == "running")
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            asks = [w.ask(INFER, sends.encode(), x_api_key=liar)]
            asks += [w.ask(INFER, b"{}", x_api_key=key) for key in honest]
            assert {each.status for each in await asyncio.gather(*asks)} == {200}
        shown = json.loads((await w.pool.request(b"GET", b"/rollouts", [(b"x-api-key", honest[0].encode())])).body)[0]
        assert shown["state"] == "running", (shown["why"], shown["evidence"])
        assert shown["evidence"]["disagreement"]["candidate"] > 0.2, "a third of them were others"
        assert "one key alone" in shown["evidence"]["disagreement"]["waits"]
        assert (shown["unjudged"] > 10) == (says == "no judgement")
        async with asyncio.timeout(60):
            while not ended(w.store.current()[0]):  # now the others meet the same
                await asyncio.gather(*(w.ask(INFER, sends.encode(), x_api_key=key) for key in honest))
        row = await w.until(ended)
        assert row.state == "aborted"
        assert ("gave no judgement of" in row.why) == (says == "no judgement")


@pytest.mark.parametrize("module", [True, False])
@in_loop
async def test_a_function_that_the_gateway_was_not_given_is_refused(tmp_path: Path, module: bool) -> None:
    (tmp_path / "rules.py").write_text(RULES)
    given: dict[str, Any] = {"agree_module": tmp_path / "rules.py"} if module else {}
    async with world(tmp_path, FakeTriton(), **given) as w:
        w.store.start("m", Target("m", "2"), Plan(agree=(Agree.parse("y:function=other"),)))
        row = await w.until(ended)
        has = "it has alike, apart, failing" if module else "start it with --agree-module FILE"
        assert row.why == f"--agree y:function=other: the gateway has no such function; {has}"


@pytest.mark.parametrize("packed", [False, True])
@in_loop
async def test_long_answers_are_compared_away_from_the_loop_and_held_until_then(tmp_path: Path, packed: bool) -> None:
    """However many come, they are counted: no more copies than there may be wait to be compared."""
    numbers = [0.5] * (1000 if packed else 20_000)
    triton = FakeTriton(scores={"m/1": numbers, "m/2": numbers}, packs=packed)
    waiting, go_on, here = 0, asyncio.Event(), os.getpid()
    where: list[int] = []

    async def apart(self: Apart, who: Any, deadline: float | None, call: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal waiting
        waiting += 1
        await go_on.wait()
        found = await original(self, who, deadline, call, *arguments)
        where.append(await original(self, who, deadline, os.getpid))
        return found

    original = Apart.call
    with patch.object(Apart, "call", apart):
        async with world(tmp_path, triton) as w:
            w.store.start("m", Target("m", "2"), Plan(steps=(), shadow=100.0, step_s=3600.0))
            await w.until(lambda row: row.state == "running")
            async with asyncio.timeout(60):
                while w.triton.asked["m/2"] < MOST_COPIES:
                    assert (await w.ask()).status == 200
            assert {(await w.ask()).status for _ in range(MOST_COPIES)} == {200}
            assert (waiting, w.triton.asked["m/2"]) == (1, MOST_COPIES), "one at a time, and no more than are held"
            go_on.set()
            await w.until(lambda row: row.evidence["disagreement"]["count"] >= MOST_COPIES)
            assert (await w.shown())["evidence"]["disagreement"]["candidate"] == 0
    assert where
    assert here not in where


@pytest.mark.parametrize(("shadow", "steps"), [(100.0, ()), (0.0, (99.0,))], ids=["a copy", "a step"])
@in_loop
async def test_a_request_that_ends_the_candidate_is_suspected(
    tmp_path: Path, shadow: float, steps: tuple[float, ...]
) -> None:
    incidents = Incidents()
    async with world(tmp_path, FakeTriton(dies={"other"}), incidents) as w:
        w.store.start("m", Target("other"), Plan(steps=steps, shadow=shadow, step_s=60.0))
        await w.until(lambda row: row.state == "running")
        async with asyncio.timeout(30):
            while not w.triton.asked["other"]:
                assert (await w.ask()).status == 200
            while incidents.suspects._flying:  # noqa: ASYNC110  its end sets no event
                await asyncio.sleep(0.01)
        found = await incidents.suspects.died({"other"})
    assert {suspect.model for suspect in found} == {"other"}
    assert all(suspect.fingerprint for suspect in found)


@pytest.mark.parametrize("fails", [("m/1",), ("m/2",), ("m/1", "m/2"), ()], ids=" and ".join)
@pytest.mark.parametrize("how", ["fails", "refuses"])
@in_loop
async def test_a_copy_is_evidence_whatever_the_baseline_answered(
    tmp_path: Path, how: str, fails: tuple[str, ...]
) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(), shadow=100.0, step_s=3600.0, max_error_increase=0.99))
        await w.until(lambda row: row.state == "running")
        getattr(w.triton, how).update(fails)
        for _ in range(12):
            await w.ask()
        deadline = time.monotonic() + 15
        told = how == "refuses" and len(fails) == 2  # both say that it was the client
        while (seen := (await w.shown())["evidence"]["errors"])["count"] < 12 and not told:
            assert time.monotonic() < deadline, seen
            await asyncio.sleep(0.05)
        if told:
            await asyncio.sleep(0.5)
            assert seen["count"] == 0
        else:
            assert (seen["candidate"], seen["baseline"]) == (float("m/2" in fails), float("m/1" in fails))


@in_loop
async def test_a_baseline_that_alone_blames_the_client_is_what_failed(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton(refuses={"m/1"})) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        assert Counter([(await w.ask()).status for _ in range(40)]).keys() == {200, 400}
        seen = (await w.shown())["evidence"]["errors"]
        assert (seen["candidate"], seen["baseline"]) == (0.0, 1.0)


@pytest.mark.parametrize("plan", [
    Plan(steps=(), shadow=100.0, step_s=3600.0), Plan(steps=(50.0,), shadow=0.0, step_s=3600.0),
    Plan(steps=(50.0,), shadow=50.0, step_s=3600.0),
], ids=["copies", "shares", "both"])  # fmt: skip
@in_loop
async def test_a_candidate_that_fails_where_the_baseline_blames_the_client_is_taken_back(
    tmp_path: Path, plan: Plan
) -> None:
    async with world(tmp_path, FakeTriton(refuses={"m/1"}, fails={"m/2"})) as w:
        w.store.start("m", Target("m", "2"), plan)
        await w.until(lambda row: row.state == "running")

        deadline = time.monotonic() + 60
        while (await w.shown())["state"] == "running":
            assert time.monotonic() < deadline, await w.shown()
            assert (await w.ask()).status == 400
        assert (await w.shown())["state"] == "aborted"


@in_loop
async def test_who_is_asked_second_is_not_judged_by_it(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton(fails={"m/1", "m/2"})) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        for _ in range(40):
            await w.ask()
        metrics = (await w.pool.request(b"GET", b"/metrics")).body.decode().splitlines()
        asked = [line for line in metrics if line.startswith("gateway_rollout_requests_total{") and "failed" in line]
        assert sum(float(line.split()[-1]) for line in asked) == 40, "one answer a request"


@in_loop
async def test_copies_leave_the_places_to_clients(tmp_path: Path) -> None:
    triton = FakeTriton(slow={"m/2": 5.0})
    async with world(tmp_path, triton, max_in_flight=2) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(), shadow=100.0))
        await w.until(lambda row: row.state == "running")
        begun = time.monotonic()
        await w.served(20)
        assert time.monotonic() - begun < 5.0  # nobody waited for a copy
        metrics = (await w.pool.request(b"GET", b"/metrics")).body.decode()
        dropped = next(line for line in metrics.splitlines() if line.startswith("gateway_rollout_copies_dropped_total"))
        assert float(dropped.split()[-1]) > 10


def test_copies_hold_no_more_than_their_part_with_the_answers_that_are_to_be_compared() -> None:
    plan = Plan(steps=(), shadow=100.0)
    release = Release(1, "m", Target("m", "1"), Target("m", "2"), plan, Course(plan, time.monotonic()))

    def taken() -> int:
        """How many copies there may be at once of requests of 100 bytes."""
        release.copies = release.copied_bytes = 0
        while release.copies < 100 and release.wants_copy(held := release.held(100), ""):
            release.copies += 1
            release.copied_bytes += held
        return release.copies

    assert taken() == 1, "nobody knows yet how long the answers are"
    release.saw(1000)
    assert taken() == MOST_COPIES
    release.saw(10 * 2**20)
    assert taken() == 3
    release.saw(100)
    assert taken() == 3, "some are short, and the next may be long"
    release.saw(500 * 2**20)
    assert taken() == 1, "one is always compared"
    for _ in range(2000):
        release.saw(1000)
    assert taken() == MOST_COPIES


@in_loop
async def test_a_client_stays_with_who_answered_it(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        plan = Plan(steps=(20.0, 90.0), shadow=0.0, step_s=3600.0, sticky="X-User")
        w.store.start("m", Target("m", "2"), plan)
        await w.until(lambda row: row.state == "running")
        first = {user: await w.served(3, x_user=f"user {user}") for user in range(40)}
        assert all(len(served) == 1 for served in first.values())
        met = {user for user, served in first.items() if "m/2" in served}
        assert 2 <= len(met) <= 18
        w.store.wish("m", "step")
        await w.until(lambda row: row.step == 1)
        for user in met:
            assert await w.served(1, x_user=f"user {user}") == {"m/2": 1}, "who has met the candidate keeps it"


@in_loop
async def test_a_sequence_stays_with_the_baseline(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(90.0,), shadow=100.0, step_s=3600.0))
        w.store.wish("m", "step")
        await w.until(lambda row: row.step == 1)
        body = b'{"parameters": {"sequence_id": 7}}'
        assert {(await w.ask(body=body)).header(b"served-by") for _ in range(20)} == {b"m/1"}
        assert "m/2" not in w.triton.asked


@pytest.mark.parametrize(("wish", "state", "served"), [("promote", "promoted", "m/2"), ("abort", "aborted", "m/1")])
@in_loop
async def test_wishes_come_before_evidence(tmp_path: Path, wish: Any, state: str, served: str) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("m", "2"), Plan(step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        w.store.wish("m", wish)
        row = await w.until(ended)
        assert (row.state, row.why) == (state, "asked for")
        assert await w.served(3) == {served: 3}
        w.store.clear("m")
        await asyncio.sleep(1.2)
        assert await w.served(3) == {"": 3}


@pytest.mark.parametrize("promoted", ["by a wish", "by evidence"])
@in_loop
async def test_an_abort_that_comes_as_it_is_promoted_is_granted(
    tmp_path: Path, promoted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The abort comes after the gateway has looked for wishes, and before it writes down that it has promoted."""
    save = Store.save
    came: list[Row] = []

    def late(self: Store, *arguments: Any, **values: Any) -> bool:
        if values["state"] == "promoted" and not came:
            came.append(self.wish("m", "abort"))
        return save(self, *arguments, **values)

    monkeypatch.setattr(Store, "save", late)
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("m", "2"), FAST if promoted == "by evidence" else Plan(step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        if promoted == "by a wish":
            w.store.wish("m", "promote")
        row = await w.until(ended, asking=promoted == "by evidence")
        assert came
        assert (row.state, row.why, row.wish) == ("aborted", "asked for", None)
        assert [event.kind for event in w.store.events(row.id)][-1] == "aborted"
        assert "promoted" not in [event.kind for event in w.store.events(row.id)]
        assert await w.served(3) == {"m/1": 3}


@pytest.mark.parametrize(
    ("triton", "candidate", "why"),
    [
        (FakeTriton(inputs={"other": "z"}), Target("other"), "its inputs are z, the baseline's x"),
        (FakeTriton(config={"ensemble_scheduling": {}}), Target("m", "2"), "a name of its own"),
    ],
    ids=["other inputs", "ensemble"],
)
@in_loop
async def test_a_candidate_that_can_not_stand_in_is_refused(
    tmp_path: Path, triton: FakeTriton, candidate: Target, why: str
) -> None:
    async with world(tmp_path, triton) as w:
        w.store.start("m", candidate, FAST)
        row = await w.until(ended)
        assert row.state == "aborted"
        assert why in row.why
        assert "other" not in triton.asked
        assert "m/2" not in triton.asked


@in_loop
async def test_a_restart_changes_nobody_s_answer(tmp_path: Path) -> None:
    triton = FakeTriton()
    async with world(tmp_path, triton) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=3600.0, sticky="x-user"))
        await w.until(lambda row: row.state == "running")
        before = {user: await w.served(2, x_user=str(user)) for user in range(20)}
    async with world(tmp_path, triton) as w:
        assert {user: await w.served(2, x_user=str(user)) for user in range(20)} == before
        shown = await w.shown()
        assert (shown["state"], shown["weight"]) == ("running", 50.0)
        assert shown["evidence"]["errors"]["count"] >= 10, "what was learnt before is not lost"


@in_loop
async def test_answers_are_compared_rightly_after_a_restart_before_triton_is_there(tmp_path: Path) -> None:
    config = {"max_batch_size": 0}
    triton = FakeTriton(config=config, whole=True)
    async with world(tmp_path, triton) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(), shadow=100.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")
    triton.missing = {"m", "m/1", "m/2"}
    async with world(tmp_path, triton) as w:
        triton.missing.clear()
        triton.scores["m/2"] = [0.9, 0.1]
        row = await w.until(ended, asking=True)
        assert (row.state, row.why.partition(" of ")[0]) == ("aborted", "it disagrees with the baseline on 100%")


@in_loop
async def test_of_two_gateways_one_judges_and_both_route_alike(tmp_path: Path) -> None:
    triton = FakeTriton()
    async with world(tmp_path, triton) as first, world(tmp_path, triton) as second:
        first.store.start("m", Target("m", "2"), Plan(steps=(10.0, 99.9), shadow=0.0, step_s=3600.0, sticky="x-user"))
        await first.until(lambda row: row.state == "running")
        first.store.wish("m", "step")
        await first.until(lambda row: row.step == 1 and row.wish is None)
        await asyncio.sleep(1.2)
        for user in range(10):
            assert await first.served(1, x_user=str(user)) == await second.served(1, x_user=str(user)) == {"m/2": 1}
        triton.fails.add("m/2")
        assert await second.served(10) == {"m/1": 10}, "who does not judge saves requests all the same"
        first.store.wish("m", "abort")
        await first.until(ended)
        await asyncio.sleep(1.2)
        assert await first.served(3) == await second.served(3) == {"m/1": 3}


@in_loop
async def test_a_state_file_that_breaks_changes_nothing(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("m", "2"), FAST)
        await w.until(lambda row: row.state == "running")
        w.store.path.write_bytes(b"no database at all" * 500)
        w.triton.fails.add("m/2")
        assert await w.served(150) == {"m/1": 150}
        assert w.triton.asked["m/2"] < 65, "it is rolled back all the same"


def damage(path: Path, column: str, value: Any, model: str = "m") -> Any:
    """Write a value into a rollout's row; what stood there."""
    with closing(sqlite3.connect(path, isolation_level=None)) as file:
        (good,) = file.execute(f"SELECT {column} FROM rollouts WHERE model = ?", (model,)).fetchone()  # noqa: S608
        file.execute(f"UPDATE rollouts SET {column} = ? WHERE model = ?", (value, model))  # noqa: S608
    return good


LONG = Plan(steps=(50.0,), shadow=0.0, step_s=3600.0)


@pytest.mark.parametrize(
    ("column", "value"),
    [("step", -99), ("step", "x"), ("state", "running!"), ("candidate", "../x"), ("created", "long ago")],
)
@in_loop
async def test_a_damaged_rollout_stops_neither_the_gateway_nor_a_later_abort(
    tmp_path: Path, column: str, value: Any
) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("m", "2"), LONG)
        await w.until(lambda row: row.state == "running")
        good = damage(w.store.path, column, value)
        await asyncio.sleep(2 * LOOK_S)
        assert set(await w.served(20)) == {"m/1", "m/2"}, "as it was"
    async with world(tmp_path, FakeTriton()) as w:
        assert (await w.ask()).status == 200
        await asyncio.sleep(2 * LOOK_S)
        damage(w.store.path, column, good)
        w.store.wish("m", "abort")
        assert (await w.until(ended)).state == "aborted"


@in_loop
async def test_a_damaged_rollout_changes_nothing_for_other_models(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        for model in ("a", "m"):
            w.store.start(model, Target("m", "2"), LONG, Target("m", "1"))
        await w.until(lambda row: row.state == "running")
    damage(w.store.path, "state", "running!", "a")
    async with world(tmp_path, FakeTriton()) as w:
        assert set(await w.served(20)) == {"m/1", "m/2"}, "it is followed though the one before it can't be read"


@pytest.mark.parametrize("value", ["[]", '{"steps": 5}', '{"shadow": null}', '{"error_rate": 7}', "[" * 100_000])
@in_loop
async def test_where_nobody_knows_what_was_asked_for_the_baseline_answers(tmp_path: Path, value: str) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("m", "2"), LONG)
        await w.until(lambda row: row.state == "running")
        damage(w.store.path, "plan", value)
        await asyncio.sleep(2 * LOOK_S)
        assert set(await w.served(20)) == {"m/1", "m/2"}, "a gateway that knows goes on"
    async with world(tmp_path, FakeTriton()) as w:
        assert await w.served(20) == {"m/1": 20}
        row = await w.until(ended)
        assert (row.state, row.why.partition(":")[0]) == ("aborted", "what was asked for can't be read")


@pytest.mark.parametrize(
    "value",
    ["[]", "{", '{"wealth": {"errors": [1]}}', '{"wealth": {"errors": [NaN, 0.0, 3]}}', '{"counts": [["a", 1], [1, 1]]}',
     '{"wealth": []}', '{"reported": 5}', '{"seconds": [["a"], []]}', '{"compared": [1]}', '{"compared": [1, 1, "x", 1]}'],
)  # fmt: skip
@in_loop
async def test_where_what_was_learnt_can_not_be_read_the_step_begins_anew(tmp_path: Path, value: str) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("m", "2"), LONG)
        await w.until(lambda row: row.state == "running")
        await w.served(40)
    damage(w.store.path, "snapshot", value)
    async with world(tmp_path, FakeTriton()) as w:
        assert set(await w.served(20)) == {"m/1", "m/2"}
        assert 0 < (await w.shown())["evidence"]["errors"]["count"] <= 20
        w.store.wish("m", "abort")
        assert (await w.until(ended)).state == "aborted"


@in_loop
async def test_who_can_fail_both_models_does_not_hide_what_the_candidate_fails(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        assert {(await w.ask(body=b"poison")).status for _ in range(60)} == {500}
        errors = (await w.shown())["evidence"]["errors"]
        assert (errors["candidate"], errors["baseline"]) == (None, None), "nothing but failures of both"


@in_loop
async def test_a_model_that_says_that_it_is_gone_ends_no_rollout(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(1.0,), shadow=0.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        assert {(await w.ask(body=b"gone")).status for _ in range(5)} == {404}
        after = time.time() + 2 * LOOK_S  # it has looked by then
        assert (await w.until(lambda row: row.updated > after)).state == "running"
        w.triton.missing.add("m/1")
        assert "no longer served" in (await w.until(ended, asking=True)).why


@in_loop
async def test_a_rollout_whose_models_have_grown_over_what_others_need_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown: dict[str, int] = {}

    class Observed(Releases):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.outgrown = lambda models: sum(grown.get(model, 0) for model in models)

    monkeypatch.setattr(app_module, "Releases", Observed)
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        grown["m"] = 150
        row = await w.until(ended)
        assert row.state == "aborted"
        assert "grown by 150 MiB" in row.why


@in_loop
async def test_progress_is_among_the_metrics(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        await w.served(20)
        metrics = (await w.pool.request(b"GET", b"/metrics")).body.decode()
        assert 'gateway_rollout_weight{model="m"} 0.5' in metrics
        assert 'gateway_rollout_requests_total{model="m",outcome="good",variant="candidate"}' in metrics
        assert 'gateway_rollout_evidence{model="m",of="fine",question="errors"}' in metrics


@in_loop
async def test_on_a_full_disk_a_bad_candidate_is_taken_back_and_written_down_later(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("m", "2"), FAST)
        await w.until(lambda row: row.state == "running")
        w.triton.fails.add("m/2")
        with full_disk():
            assert await w.served(150) == {"m/1": 150}
            await asyncio.sleep(1.2)
            assert (await w.shown())["state"] == "aborted"
            with pytest.raises(ServerError, match="can't use the state file"):
                w.store.wish("m", "promote")
        row = await w.until(ended)
        assert row.state == "aborted"
        assert [event.kind for event in w.store.events(row.id)] == ["started", "step", "aborted"]


async def abort(pool: Pool, model: str = "m", key: str = "") -> tuple[int, dict[str, Any]]:
    headers = [(b"x-api-key", key.encode())] if key else []
    answered = await pool.request(b"POST", f"/rollouts/{model}/abort".encode(), headers)
    return answered.status, json.loads(answered.body)


PATIENT = replace(FAST, step_s=3600.0, steps=(99.9,))


@pytest.mark.parametrize("at", ["running", "waiting"])
@in_loop
async def test_on_a_full_disk_an_abort_holds_at_once_and_is_written_down_later(tmp_path: Path, at: str) -> None:
    keys = tmp_path / "keys.json"
    admin = add_key(keys, "root", admin=True)[0]
    triton = FakeTriton(missing={"m/2"} if at == "waiting" else set())
    async with world(tmp_path, triton, keys=keys) as w:
        w.store.start("m", Target("m", "2"), PATIENT)
        await w.until(lambda row: row.state == at and row.baseline is not None)
        with full_disk():
            with pytest.raises(ServerError, match="can't use the state file"):
                w.store.wish("m", "abort")
            status, told = await abort(w.pool, key=admin)
            assert (status, told["state"], told["written"]) == (200, "aborted", False)
            assert "can't use the state file" in told["why"]
            triton.missing.clear()
            for _ in range(3):
                assert await w.served(20, x_api_key=admin) == {"m/1": 20}
                await asyncio.sleep(LOOK_S)
        row = await w.until(ended)
        assert (row.state, row.why) == ("aborted", "asked for")
        assert [event.kind for event in w.store.events(row.id)].count("aborted") == 1
        assert await w.served(20, x_api_key=admin) == {"m/1": 20}


@in_loop
async def test_a_gateway_that_does_not_judge_keeps_the_candidate_from_requests_too(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    admin = add_key(keys, "root", admin=True)[0]
    async with world(tmp_path, FakeTriton(), keys=keys) as w, world(tmp_path, FakeTriton(), keys=keys) as other:
        w.store.start("m", Target("m", "2"), PATIENT)
        await w.until(lambda row: row.state == "running")
        await asyncio.sleep(2 * LOOK_S)
        with full_disk():
            for each in (w, other):
                assert (await abort(each.pool, key=admin))[1]["written"] is False
            for _ in range(3):
                for each in (w, other):
                    assert await each.served(20, x_api_key=admin) == {"m/1": 20}
                await asyncio.sleep(LOOK_S)
        assert (await w.until(ended)).state == "aborted"


@asynccontextmanager
async def two_gateways(folder: Path) -> AsyncIterator[tuple[World, World, str]]:
    """One that does not judge, one that does, as it started later, and an admin's key; a rollout is under way."""
    keys = folder / "keys.json"
    admin = add_key(keys, "root", admin=True)[0]
    async with world(folder, FakeTriton(), keys=keys) as trails:
        trails.store.start("m", Target("m", "2"), PATIENT)
        before = await trails.until(lambda row: row.state == "running")
        async with world(folder, FakeTriton(), keys=keys) as judges:
            await judges.until(lambda row: row.owner != before.owner)
            await asyncio.sleep(2 * LOOK_S)
            yield trails, judges, admin


@in_loop
async def test_an_abort_at_a_gateway_that_does_not_judge_is_written_down_later_too(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (trails, judges, admin):
        with full_disk():
            assert (await abort(trails.pool, key=admin))[1]["written"] is False
            assert await trails.served(20, x_api_key=admin) == {"m/1": 20}
            told = await trails.shown(admin)
            assert (told["state"], "until it is written down" in told["why"]) == ("aborted", True)
            await asyncio.sleep(2 * LOOK_S)
        row = await trails.until(ended)
        assert (row.state, row.why) == ("aborted", "asked for")
        await asyncio.sleep(2 * LOOK_S)
        assert await judges.served(20, x_api_key=admin) == {"m/1": 20}


@in_loop
async def test_an_abort_that_came_too_late_to_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another gateway promotes meanwhile, as its state file can be written."""
    wish = Store.wish

    def unwritten(self: Store, model: str, wished: Any, *rollout: Any) -> Row:
        if wished == "abort":
            raise StateFileError("can't use the state file", why="database is locked", mend="wait")
        return wish(self, model, wished, *rollout)

    async with two_gateways(tmp_path) as (trails, _, admin):
        monkeypatch.setattr(Store, "wish", unwritten)
        assert (await abort(trails.pool, key=admin))[1]["written"] is False
        trails.store.wish("m", "promote")
        assert (await trails.until(ended)).state == "promoted"
        await asyncio.sleep(2 * LOOK_S)
        told = await trails.shown(admin)
        assert (told["state"], told["why"].partition(" before ")[0]) == ("promoted", "another gateway promoted it")
        assert "was not aborted: another gateway promoted it" in caplog.text


def missing(path: Path) -> None:
    path.rename(path.with_suffix(".kept"))


def newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA user_version = 99")


def garbled(path: Path) -> None:
    missing(path)
    path.write_bytes(b"no database at all" * 500)


def folder(path: Path) -> None:
    missing(path)
    path.mkdir()


def mend(path: Path) -> None:
    """As it was before any of these."""
    kept = path.with_suffix(".kept")
    if kept.exists():
        if path.is_dir():
            path.rmdir()
        kept.replace(path)
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA user_version = 1")


@pytest.mark.parametrize("breaks", [missing, newer, garbled, folder])
@in_loop
async def test_an_abort_holds_whatever_the_state_file_is_and_says_why_it_is_not_written(
    tmp_path: Path, breaks: Callable[[Path], None]
) -> None:
    keys = tmp_path / "keys.json"
    admin = add_key(keys, "root", admin=True)[0]
    async with world(tmp_path, FakeTriton(), keys=keys) as w:
        w.store.start("m", Target("m", "2"), PATIENT)
        await w.until(lambda row: row.state == "running")
        await asyncio.sleep(2 * LOOK_S)
        breaks(w.store.path)
        for _ in range(2):  # who asks again is told the same
            status, told = await abort(w.pool, key=admin)
            assert (status, told["state"], told["written"]) == (200, "aborted", False), told
            assert re.search("no such file|version 99|not a database|open database|directory", told["why"]), told
            assert await w.served(20, x_api_key=admin) == {"m/1": 20}
        mend(w.store.path)
        assert (await w.until(ended)).state == "aborted"
        await asyncio.sleep(2 * LOOK_S)
        assert (await abort(w.pool, key=admin))[0] == 409


@in_loop
async def test_an_abort_is_for_admins_and_for_what_is_under_way(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    plain, admin = add_key(keys, "plain")[0], add_key(keys, "root", admin=True)[0]
    async with world(tmp_path, FakeTriton(), keys=keys) as w:
        assert (await abort(w.pool, key=admin))[0] == 409
        w.store.start("m", Target("m", "2"), PATIENT)
        await w.until(lambda row: row.state == "running")
        await asyncio.sleep(2 * LOOK_S)
        assert (await abort(w.pool))[0] == 401
        assert (await abort(w.pool, key=plain))[0] == 403
        assert w.store.current()[0].wish is None
        status, told = await abort(w.pool, key=admin)
        assert (status, told) == (200, {"model": "m", "state": "aborted", "written": True, "why": ""})
        assert (await w.until(ended)).state == "aborted"
        assert (await abort(w.pool, key=admin))[0] == 409


@pytest.mark.parametrize("wish", ["abort", "promote", None])
@in_loop
async def test_a_gateway_that_starts_on_a_full_disk_knows_who_answers(tmp_path: Path, wish: Any) -> None:
    patient = replace(FAST, step_s=3600.0, shadow=0.0, steps=(0.001,))
    async with world(tmp_path, FakeTriton()) as w:
        w.store.start("m", Target("m", "2"), patient)
        await w.until(lambda row: row.state == "running")
        if wish is not None:
            w.store.wish("m", wish)
            await w.until(ended)
    with full_disk():
        async with world(tmp_path, FakeTriton()) as w:
            await asyncio.sleep(1.2)
            assert await w.served(20) == {"m/2" if wish == "promote" else "m/1": 20}


@in_loop
async def test_a_request_that_fails_with_both_is_no_evidence_against_the_candidate(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton(fails={"m/1", "m/2"})) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(99.9,), shadow=0.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        for _ in range(150):
            await w.ask()
        assert w.triton.asked["m/2"] > 100
        assert (await w.shown())["state"] == "running"
