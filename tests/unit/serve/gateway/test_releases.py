"""Releases in front of a server that answers as it is told: who answers whom, and what comes of faults."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from compress.errors import ServerError
from serve.gateway.health.incidents import Incidents
from serve.gateway.settings import Settings
from serve.http.client import Address, Pool, Response
from serve.rollout.plan import Plan, Target
from serve.rollout.store import Row, Store
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
        dies: who closes the connection.
    """

    scores: dict[str, list[float]] = field(default_factory=dict)
    fails: set[str] = field(default_factory=set)
    refuses: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    dies: set[str] = field(default_factory=set)
    inputs: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=lambda: {"max_batch_size": 8})
    slow: dict[str, float] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)

    async def __call__(self, request: Received, writer: asyncio.StreamWriter) -> None:
        parts = request.target.strip("/").split("/")
        model, rest = parts[2], parts[3:]
        if rest[:1] == ["versions"]:
            model, rest = f"{model}/{rest[1]}", rest[2:]
        if rest == ["infer"] and model in self.dies:
            self.asked[model] += 1
            writer.close()
            return
        status, body = await self.answered(model, rest[0] if rest else "", request.body)
        writer.write(answer(json.dumps(body).encode(), status, "content-type: application/json"))

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
        if who in self.fails:
            return "500 Internal Server Error", {"error": "failed"}
        if who in self.refuses or b"rubbish" in body:
            return "400 Bad Request", {"error": "rubbish"}
        y = {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": self.scores.get(who, [0.1, 0.9])}
        return "200 OK", {"model_name": who, "model_version": "1", "outputs": [y]}


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

    async def until(self, holds: Callable[[Row], bool], *, asking: bool = False, within_s: float = 15.0) -> Row:
        """Wait for something of the rollout, with requests meanwhile if wanted."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            (row,) = self.store.current()
            if holds(row):
                return row
            if asking:
                await asyncio.gather(*(self.ask() for _ in range(20)))
            else:
                await asyncio.sleep(0.05)
        raise AssertionError(self.store.current()[0].to_dict())

    async def shown(self) -> dict[str, Any]:
        answered = await self.pool.request(b"GET", b"/rollouts")
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
        assert row.why == "m/2 is not loaded yet"
        assert await w.served(5) == {"m/1": 5}
        w.triton.missing.clear()
        await w.until(lambda row: row.state == "running")


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
        assert "100% of its requests fail" in row.why


@in_loop
async def test_without_fallback_clients_see_the_candidate_s_failures(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton(fails={"m/2"})) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(50.0,), shadow=0.0, step_s=0.0, fallback=False))
        await w.until(lambda row: row.state == "running")
        statuses = Counter([(await w.ask()).status for _ in range(150)])
        assert 3 < statuses[500] < 65
        assert (await w.until(ended)).state == "aborted"


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
        assert w.triton.asked["m/2"] < 65, "it is taken back all the same"


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
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # every write to a file fails
        try:
            assert await w.served(150) == {"m/1": 150}
            await asyncio.sleep(1.2)
            assert (await w.shown())["state"] == "aborted"
            with pytest.raises(ServerError, match="can't use the state file"):
                w.store.wish("m", "promote")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        row = await w.until(ended)
        assert row.state == "aborted"
        assert [event.kind for event in w.store.events(row.id)] == ["started", "step", "aborted"]


@in_loop
async def test_a_request_that_fails_with_both_is_no_evidence_against_the_candidate(tmp_path: Path) -> None:
    async with world(tmp_path, FakeTriton(fails={"m/1", "m/2"})) as w:
        w.store.start("m", Target("m", "2"), Plan(steps=(99.9,), shadow=0.0, step_s=3600.0))
        await w.until(lambda row: row.state == "running")
        for _ in range(150):
            await w.ask()
        assert w.triton.asked["m/2"] > 100
        assert (await w.shown())["state"] == "running"
