"""What a load test tells the planner, and a simulated replica against queueing theory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.errors import ServerError
from serve.load.figures.result import LoadResult
from serve.load.figures.server_side import Breakdown, ModelTime, ServerUse
from serve.load.report.report import LoadReport
from serve.pack.write import pack
from serve.plan.replica import capacity, closed_loop, open_loop, poisson
from serve.plan.service import Batching, Service, Stage, batching_of, service_of
from serve.repository.read import read_models
from tests.load_servers import result_of
from tests.serve_models import hook_file, tiny_artifact

FLAT = (1.0,)


def service_with(
    seconds: float = 0.01, *, instances: int = 1, most: int = 0, row_s: float = 0.0, **more: Any
) -> Service:
    """One model that takes so long for an execution, and so much for each further row."""
    sizes = (1.0, 64.0)
    stage = Stage(Batching("m", instances, most), sizes, (seconds, seconds + 63 * row_s), row_s)
    return replace(Service("m", 1, (stage,), 0.0, FLAT), **more)


def run_of(
    concurrency: int, throughput: float, batches: dict[int, tuple[int, float]], *, queue_ms: float = 0.0
) -> LoadResult:
    """A closed loop, and Triton's account of it: executions and their milliseconds, by batch size."""
    rows = sum(size * count for size, (count, _) in batches.items())
    time = ModelTime(
        "m", rows, rows, sum(count for count, _ in batches.values()), 0.0, queue_ms, 0.0, 0.0, 0.0,
        {size: count for size, (count, _) in batches.items()}, {size: ms for size, (_, ms) in batches.items()},
    )  # fmt: skip
    latencies = np.full(rows, 1000 * concurrency / throughput)
    return result_of(
        [latencies], concurrency=concurrency, throughput=throughput, inferences=throughput,
        breakdown=Breakdown((time,)),
    )  # fmt: skip


SWEEP = LoadReport((run_of(1, 90, {1: (100, 10.0)}), run_of(8, 190, {4: (50, 20.0), 8: (50, 36.0)}, queue_ms=30)), "m")


def test_a_sweep_gives_batch_times_and_what_lies_around_them() -> None:
    found = service_of(SWEEP, [Batching("m", 1, 8)])
    (stage,) = found.stages
    assert stage.duration_s(4, 99) == pytest.approx(0.020)
    assert stage.duration_s(8, 99) == pytest.approx(0.036)
    assert stage.duration_s(6, 99) == pytest.approx(0.028)
    assert stage.duration_s(1, 1) == pytest.approx(0.010, rel=0.3)
    assert found.around_s == pytest.approx(1 / 90 - stage.duration_s(1, 1), rel=0.02)
    assert found.front_s == 0
    assert found.rows == 1


def test_where_the_models_idle_what_all_requests_pass_is_the_bound() -> None:
    idle = LoadReport((run_of(1, 900, {1: (100, 0.1)}), run_of(32, 2000, {1: (100, 0.1)})), "m")
    found = service_of(idle, [Batching("m", 1, 8)])
    assert found.front_s == pytest.approx(1 / 2000)
    assert capacity(found, 2000) == pytest.approx(2000, rel=0.02)


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ((), "one client"),
        ((SWEEP.runs[0],), "several clients"),
        ((SWEEP.runs[1],), "one client"),
        (tuple(replace(run, breakdown=None) for run in SWEEP.runs), "Triton's account"),
    ],
)
def test_runs_that_do_not_tell_enough_are_refused(runs: tuple[LoadResult, ...], why: str) -> None:
    with pytest.raises(ServerError, match=why):
        service_of(LoadReport(runs, "m"), [Batching("m")])


@pytest.mark.parametrize(("share", "warned"), [(1.1, False), (1.6, True)])
def test_a_server_that_took_most_cores_is_warned_of(share: float, warned: bool) -> None:
    runs = tuple(replace(run, server=ServerUse(share, 1, 1)) for run in SWEEP.runs)
    found = service_of(replace(SWEEP, runs=runs, machine={"cores": 2}), [Batching("m", 1, 8)])
    assert any("wait for each other" in text for text in found.warnings) is warned


def test_another_model_is_refused() -> None:
    with pytest.raises(ServerError, match="another model"):
        service_of(SWEEP, [Batching("other")])


def test_times_by_batch_size_survive_the_file() -> None:
    again = LoadReport.from_dict(json.loads(json.dumps(SWEEP.to_dict())))
    assert again.runs[1].breakdown is not None
    assert again.runs[1].breakdown.models[0].batch_ms == {4: 20.0, 8: 36.0}


def test_a_repository_tells_how_each_step_is_run(tmp_path: Path) -> None:
    pack(tiny_artifact(tmp_path / "artifact"), repository=tmp_path / "models", name="tiny", hooks=hook_file(tmp_path))
    configs = {model.name: model.config for model in read_models(tmp_path / "models")}
    found = batching_of(configs, "tiny")
    assert [each.name for each in found] == ["tiny_preprocess", "tiny_network", "tiny_postprocess"]
    assert found[1].most == configs["tiny_network"].max_batch_size
    with pytest.raises(ServerError, match="not in the repository"):
        batching_of(configs, "another")


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_instance_without_batches_is_the_queue_m_d_1(load: float) -> None:
    """Its mean wait is rho / (2 (1 - rho)) of a service time (Pollaczek and Khinchine)."""
    found = open_loop(service_with(0.01), poisson(load / 0.01, 30_000), warmup_s=1.0)
    assert found.mean() == pytest.approx(0.01 * (1 + load / (2 * (1 - load))), rel=0.06)


def test_two_instances_and_exponential_times_are_the_queue_m_m_2() -> None:
    """Its mean wait is that of Erlang's C formula."""
    spread = -np.log(1 - (np.arange(2000) + 0.5) / 2000)
    service = service_with(0.01, instances=2, spread=tuple(spread / spread.mean()))
    load = 0.7
    wait = (load**2 / (1 - load**2)) * 0.01
    assert open_loop(service, poisson(2 * load / 0.01, 40_000), warmup_s=1.0).mean() == pytest.approx(
        0.01 + wait, rel=0.07
    )


def test_batches_answer_more_and_a_full_one_answers_most() -> None:
    alone = capacity(service_with(0.01), 2000)
    together = capacity(service_with(0.01, most=16, row_s=0.0005), 4000)
    assert alone == pytest.approx(100, rel=0.02)
    assert together == pytest.approx(16 / (0.01 + 15 * 0.0005), rel=0.05)


def test_a_batch_is_waited_for_as_long_as_the_delay_says() -> None:
    (stage,) = service_with(0.01, most=8).stages
    waiting = replace(stage, batching=replace(stage.batching, delay_s=0.005))
    found = open_loop(Service("m", 1, (waiting,), 0.0, FLAT), np.array([0.0, 1.0, 1.001]))
    assert sorted(found.round(6).tolist()) == [0.014, 0.015, 0.015]


def test_steps_follow_one_another_and_what_lies_around_is_added() -> None:
    (stage,) = service_with(0.01).stages
    both = Service("m", 1, (stage, replace(stage, seconds=(0.02, 0.02))), 0.004, FLAT)
    assert open_loop(both, np.array([0.0])).tolist() == pytest.approx([0.034])


def test_a_closed_loop_waits_for_its_answers() -> None:
    throughput, latencies = closed_loop(service_with(0.01), 4, 1000)
    assert throughput == pytest.approx(100, rel=0.02)
    assert latencies.mean() == pytest.approx(0.04, rel=0.02)


def test_the_same_seed_gives_the_same() -> None:
    times = poisson(50, 500, 3)
    spread = tuple(np.linspace(0.5, 1.5, 100))
    first, second, other = (open_loop(service_with(spread=spread), times, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)
