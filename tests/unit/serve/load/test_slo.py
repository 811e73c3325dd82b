"""Objectives, and the search for the highest rate that keeps one: against servers whose capacity is known."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from compress.errors import ServerError
from serve.load.measure import Plan, concurrencies, measure
from serve.load.report.report import LoadReport
from serve.load.slo import Objective, Term, parse_objective
from tests.load_servers import at_once, options, result_of, served
from tests.serve_http import Received, answer

pytestmark = pytest.mark.clock


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("p99<20ms", (Term("p99", 20), Term("errors", 0.001))),
        ("p99.9 <= 1.5s, errors<1%", (Term("p99.9", 1500), Term("errors", 0.01))),
        ("mean<500us,max<1s,errors<0", (Term("mean", 0.5), Term("max", 1000), Term("errors", 0))),
        ("accuracy>90%,throughput>500/s", (Term("accuracy", 0.9), Term("throughput", 500), Term("errors", 0.001))),
    ],
)
def test_objectives_are_read(text: str, terms: tuple[Term, ...]) -> None:
    assert parse_objective(text).terms == terms
    assert parse_objective(str(parse_objective(text))) == parse_objective(text)


@pytest.mark.parametrize(
    "text",
    ["", "p99", "p99<20", "p99>20ms", "p100<1s", "fast<1s", "errors<5", "accuracy<5%", "p99<1ms;max<1s", "p99<1.2.3ms"],
)
def test_what_is_no_objective(text: str) -> None:
    with pytest.raises(ServerError, match=r"objective|can't mean") as caught:
        parse_objective(text)
    assert caught.value.mend


def test_an_objective_is_broken_in_words_and_too_few_samples_do_not_keep_it() -> None:
    steady = result_of([np.full(500, 10.0)] * 4)
    assert parse_objective("p99<20ms").broken(steady) == []
    assert parse_objective("p99<5ms,throughput>600/s").broken(steady) == ["p99<5ms: 10 ms", "throughput>600/s: 500"]
    assert parse_objective("p99.9<20ms").broken(steady) == ["p99.9<20ms: too few samples"]
    assert parse_objective("p50<20ms").broken(result_of([np.full(50, 1.0)], errors=5)) == ["errors<0.1%: 9.09%"]
    assert parse_objective("p99.9<1s").samples == 10_000


@pytest.mark.parametrize(
    ("texts", "counts"),
    [
        (["32"], [32]),
        (["1..128"], [1, 2, 4, 8, 16, 32, 64, 128]),
        (["3..20"], [3, 4, 8, 16, 20]),
        (["1,4", "4", "9"], [1, 4, 9]),
    ],
)
def test_numbers_of_clients(texts: list[str], counts: list[int]) -> None:
    assert concurrencies(texts) == counts


@pytest.mark.parametrize("text", ["", "0", "x", "8..2", "-1", "1...4"])
def test_what_is_no_number_of_clients(text: str) -> None:
    with pytest.raises(ServerError, match="at a time"):
        concurrencies([text])


def report(server: Any, plan: Plan, **changes: Any) -> LoadReport:
    return measure(options(server, **changes), plan)


def test_the_search_finds_the_rate_at_which_a_server_of_known_capacity_falls_behind() -> None:
    """One worker of 5 ms: at most 200 a second, and fewer within 60 ms."""
    free = 0.0

    async def one_worker(_: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal free
        free = max(free, time.monotonic()) + 0.005
        await asyncio.sleep(free - time.monotonic())
        writer.write(answer())

    with served(one_worker) as server:
        found = report(server, Plan(objective="p90<60ms", precision=0.2, confirmations=2), duration=1.2, warmup=0.1)
    search = found.found
    assert search is not None
    assert found.kept
    assert search.rate is not None
    assert search.above is not None
    assert 0.1 * search.peak < search.rate < search.above < 1.4 * search.peak  # less by far on a busy machine
    assert 30 < search.peak < 220
    assert search.trials[0].stage == "peak"
    assert search.trials[-1].stage == "confirm"
    assert len(found.runs) == search.confirmations == 2
    assert len({run.seed for run in found.runs}) == 2
    assert search.slow_share is not None
    assert search.slow_bound is not None
    assert search.slow_share <= search.slow_bound
    assert "2 of 2 runs with fresh arrivals" in found.verdict


def test_a_server_that_never_keeps_it_is_said_to() -> None:
    async def slow(_: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        writer.write(answer())

    with served(slow) as server:
        found = report(server, Plan(objective="p50<5ms", confirmations=1), duration=0.25, warmup=0.05)
    assert found.found is not None
    assert (found.found.rate, found.kept) == (None, False)
    assert "No rate was found" in found.verdict


def test_a_trial_that_is_lost_ends_before_its_time() -> None:
    """A server that answers a closed loop well, and sheds what an open loop sends."""
    begun = 0.0

    async def sheds_later(_: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.02)
        writer.write(answer() if time.monotonic() < begun + 3.5 else answer(b"{}", "503 Service Unavailable"))

    with served(sheds_later) as server:
        begun = time.monotonic()
        found = report(server, Plan(objective="p50<500ms"), duration=20, warmup=0.1)
        assert time.monotonic() - begun < 60  # each of the trials would take 20 s
    assert not found.kept
    assert found.found is not None
    assert all(trial.seconds < 5 for trial in found.found.trials[1:])
    assert "errors" in found.verdict


def test_a_server_that_never_answers_well_is_said_to() -> None:
    async def sheds(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"{}", "503 Service Unavailable"))

    with served(sheds) as server:
        found = report(server, Plan(objective="p50<5ms"), duration=0.5, warmup=0.1)
    assert not found.kept
    assert "had no answer" in found.verdict


def test_runs_are_judged_and_the_best_that_keeps_the_objective_is_named() -> None:
    with served(at_once) as server:
        found = report(server, Plan(concurrency=("1,2",), objective="p50<20s,errors<100%"), duration=1.5)
        none = report(server, Plan(concurrency=("1,2",), objective="p50<0.001us"), duration=0.2)
        one = report(server, Plan(rates=("100",), objective="p50<20s", hourly_cost=3.6), duration=1.0)
    assert [run.concurrency for run in found.runs] == [1, 2]
    assert found.kept
    assert "is kept up to" in found.verdict
    assert not none.kept
    assert "not kept by any load" in none.verdict
    assert one.verdict.endswith("is kept.")
    cost = one.cost_of_a_million(one.runs[0])
    assert cost == pytest.approx(1000 / one.runs[0].inferences, rel=1e-6)


@pytest.mark.parametrize(
    ("scenario", "says", "concurrency"),
    [("single-stream", "p90 of a query", 1), ("multi-stream", "p99 of a query", 1), ("offline", "inferences/s", 64)],
)
def test_scenarios_after_mlperf(scenario: Any, says: str, concurrency: int) -> None:
    with served(at_once) as server:
        found = report(server, Plan(scenario=scenario), duration=0.5)
    assert says in found.verdict
    assert found.runs[0].concurrency == concurrency
    assert found.runs[0].inferences == pytest.approx(
        found.runs[0].throughput * (8 if scenario == "multi-stream" else 1)
    )


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Plan(("1",), ("100",)), "both kinds of load"),
        (Plan(scenario="offline", rates=("1",)), "its own to choose"),
        (Plan(scenario="server"), "give one"),
        (Plan(scenario="server", objective="errors<1%"), "give one"),
    ],
)
def test_plans_that_make_no_sense(plan: Plan, says: str) -> None:
    with served(at_once) as server, pytest.raises(ServerError) as caught:
        report(server, plan)
    assert says in str(caught.value)


@pytest.mark.parametrize("values", [{"precision": 0}, {"precision": 2}, {"confirmations": 0}, {"hourly_cost": -1}])
def test_what_no_plan_can_have(values: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match=str(next(iter(values)))) as caught:
        Plan(**values)
    assert caught.value.mend


def test_an_objective_keeps_its_terms() -> None:
    assert Objective((Term("p99", 20.0),)).latency_ms == 20.0
    assert Objective((Term("errors", 0.1),)).latency_ms is None
