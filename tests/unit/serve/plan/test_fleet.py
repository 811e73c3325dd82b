"""Traffic, the autoscaler's own rules, fleets over time, and the choice between settings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import ServerError
from serve.cli.main import main
from serve.load.slo import parse_objective
from serve.plan.autoscaler import Autoscaler, Scaling
from serve.plan.choose import plan
from serve.plan.curve import Curve, binned, percentile_s, simulate_curve
from serve.plan.fleet import Hosting, run_exact, run_fluid
from serve.plan.page import page
from serve.plan.report import advice, outside_s, to_dict, verdict
from serve.plan.traffic import Traffic, read_traffic
from tests.unit.serve.plan.test_service import SWEEP, service_with

SERVICE = service_with(0.01)  # 100 requests/s at most


@pytest.fixture(scope="module")
def curve() -> Curve:
    return simulate_curve(SERVICE, samples=4000)


def flat(rate: float, seconds: float) -> Traffic:
    return Traffic(np.array([0.0, seconds]), np.array([rate, rate]))


@pytest.mark.parametrize(
    ("text", "times", "rates"),
    [
        ("0,10\n60,20\n", [0, 60], [10, 20]),
        ("seconds,rate\n100,10\n160,20\n", [0, 60], [10, 20]),
        ("2026-11-22T10:00:00,1\n2026-11-22T10:01:00,2\n2026-11-22T10:03:00,3\n", [0, 60, 180], [1, 2, 3]),
    ],
)
def test_a_traffic_file_is_times_and_rates(tmp_path: Path, text: str, times: list[float], rates: list[float]) -> None:
    (tmp_path / "t.csv").write_text(text)
    found = read_traffic(tmp_path / "t.csv", scale=2.0)
    assert found.times_s.tolist() == times
    assert found.rates.tolist() == [2 * rate for rate in rates]


def test_or_a_time_for_each_request(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\n".join(f"{at:.3f}" for at in np.arange(0, 50, 0.02)))
    found = read_traffic(tmp_path / "t.csv")
    assert found.requests == pytest.approx(2500, rel=0.01)
    assert found.rates.mean() == pytest.approx(50, rel=0.05)


@pytest.mark.parametrize(
    "text", ["", "1,2\n", "1,2\n2\n", "a,b\nc,d\n", "0,1\n0,2\n", "5,1\n1,2\n", "0,-1\n1,2\n", "0,nan\n1,2\n"]
)
def test_what_is_no_traffic_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ServerError, match="traffic"):
        read_traffic(tmp_path / "t.csv")


@given(st.lists(st.floats(0, 1000), min_size=2, max_size=20), st.floats(1, 50))
def test_steps_hold_all_requests(rates: list[float], step_s: float) -> None:
    traffic = Traffic(np.arange(len(rates), dtype=np.float64) * 10.0, np.array(rates))
    steps = traffic.steps(step_s)
    widths = np.full(len(steps), step_s)
    widths[-1] = traffic.seconds - step_s * (len(steps) - 1)
    assert float(steps @ widths) == pytest.approx(traffic.requests, rel=1e-6, abs=1e-6)


def test_arrivals_follow_the_rate() -> None:
    found = Traffic(np.array([0.0, 100.0]), np.array([0.0, 100.0])).arrivals(1)
    assert len(found) == pytest.approx(5000, rel=0.06)
    assert (np.diff(found) >= 0).all()
    assert (found < 50).mean() == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize(
    ("now", "rate", "wanted"),
    [
        (4, 40.0, 4),
        (4, 43.0, 4),  # within the tolerance of 10%
        (4, 45.0, 5),
        (4, 80.0, 8),
        (4, 900.0, 8),  # at most four more, or twice as many
        (20, 900.0, 40),
        (4, 1.0, 2),  # never below the least
    ],
)
def test_the_autoscaler_wants_what_kubernetes_would(now: int, rate: float, wanted: int) -> None:
    assert Autoscaler(Scaling(10.0, least=2, most=50, down_window_s=0)).replicas(now, rate) == wanted


def test_it_goes_down_only_after_its_window() -> None:
    scaler = Autoscaler(Scaling(10.0, least=1, most=50, period_s=15, down_window_s=60))
    assert scaler.replicas(8, 80.0) == 8
    assert [scaler.replicas(8, 20.0) for _ in range(5)] == [8, 8, 8, 2, 2]


@pytest.mark.parametrize("changes", [{"target": 0}, {"least": 0}, {"most": 0}, {"period_s": 0}])
def test_settings_that_make_no_sense_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ServerError):
        Scaling(**{"target": 1.0, **changes})  # type: ignore[arg-type]


def test_the_curve_is_of_one_replica(curve: Curve) -> None:
    assert curve.peak == pytest.approx(100, rel=0.02)
    assert curve.percentile_ms(5, 50) == pytest.approx(10, rel=0.03)
    slow = [curve.percentile_ms(rate, 99) for rate in (5, 50, 80, 95)]
    assert slow == sorted(slow)
    kept = curve.highest(lambda weights: percentile_s(weights, 99) <= 0.05)
    assert 50 < kept < 95
    assert curve.percentile_ms(kept, 99) <= 50
    assert curve.highest(lambda weights: percentile_s(weights, 50) <= 0.001) == 0


def test_a_replica_answers_no_more_than_was_measured() -> None:
    found = simulate_curve(service_with(0.01, measured_peak=60.0), samples=2000)
    assert found.peak == 60.0
    assert found.simulated_peak == pytest.approx(100, rel=0.02)


def test_percentiles_of_bins_are_those_of_the_values() -> None:
    values = np.random.default_rng(0).exponential(0.05, 20_000)
    for percent in (1, 50, 99, 99.9):
        assert percentile_s(binned(values), percent) == pytest.approx(np.percentile(values, percent), rel=0.03)


def test_the_fluid_and_each_request_on_its_own_tell_the_same_story(curve: Curve) -> None:
    traffic = Traffic(np.array([0.0, 300.0, 600.0, 1200.0]), np.array([40.0, 200.0, 60.0, 60.0]))
    scaling, hosting = Scaling(50.0, least=2, most=10, down_window_s=120), Hosting(start_s=30)
    fluid = run_fluid(curve, traffic, scaling, hosting)
    exact = run_exact(SERVICE, traffic, scaling, hosting, curve.peak)
    assert exact.requests == pytest.approx(fluid.requests, rel=0.02)
    assert exact.replica_hours == pytest.approx(fluid.replica_hours, rel=0.1)
    assert abs(exact.replicas.max() - fluid.replicas.max()) <= 1
    assert exact.refusals == fluid.refusals == 0
    # The gateway sends each request to the least busy replica; the fluid is shared blindly, which is the careful guess.
    assert 0.5 * fluid.percentile_ms(99) < exact.percentile_ms(99) < 1.1 * fluid.percentile_ms(99)


def test_a_burst_is_refused_until_replicas_have_started(curve: Curve) -> None:
    traffic = Traffic(np.array([0.0, 300.0, 300.001, 900.0]), np.array([50.0, 50.0, 400.0, 400.0]))
    slow_start = run_fluid(curve, traffic, Scaling(50.0, least=1, most=20), Hosting(start_s=120))
    fast_start = run_fluid(curve, traffic, Scaling(50.0, least=1, most=20), Hosting(start_s=15))
    assert slow_start.refusals > 2 * fast_start.refusals > 0
    assert slow_start.ready[-1] == slow_start.replicas[-1]
    assert slow_start.ready[-1] in (8, 9)  # while it works off what had to wait, it answers more than comes
    assert slow_start.refused[-1] == 0


def test_the_cheapest_settings_that_keep_the_objective_are_chosen() -> None:
    traffic = Traffic(np.array([0.0, 3600.0, 7200.0, 28800.0]), np.array([50.0, 500.0, 50.0, 50.0]))
    found = plan(SERVICE, traffic, parse_objective("p99<50ms,errors<1%"), Hosting(hourly_cost=2.5), samples=4000)
    assert found.kept
    assert not found.course.exact
    kept = [each for each in found.candidates if each.kept]
    assert found.chosen.replica_hours == min(each.replica_hours for each in kept)
    number, hours = found.fixed
    assert number * found.replica_rate >= 499
    assert found.chosen.replica_hours < hours
    told = to_dict(found)
    assert told["cost"] == pytest.approx(2.5 * found.chosen.replica_hours)
    assert json.loads(json.dumps(told, allow_nan=False))["scaling"]["least"] == 1
    assert "is kept" in verdict(found)
    assert any("fluid" in line for line in advice(found))
    text = page(found, SWEEP.runs)
    assert text.count("<figure>") == text.count("<svg") == 3


def test_the_seconds_outside_of_the_objective_are_told() -> None:
    burst = Traffic(np.array([0.0, 3000.0, 3000.001, 3600.0]), np.array([50.0, 50.0, 300.0, 300.0]))
    found = plan(SERVICE, burst, parse_objective("p99<50ms,errors<20%"), Hosting(), samples=2000, target=40.0)
    assert 60 <= outside_s(found) <= 300
    assert any("do not keep it" in line for line in advice(found))


def test_an_objective_that_no_fleet_keeps_says_why() -> None:
    with pytest.raises(ServerError, match="one request alone takes"):
        plan(SERVICE, flat(10, 600), parse_objective("p99<5ms"), Hosting(), samples=1000)
    with pytest.raises(ServerError, match="bounds no latency"):
        plan(SERVICE, flat(10, 600), parse_objective("errors<1%"), Hosting(), samples=1000)


def test_too_few_replicas_are_told_and_end_with_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "load.json").write_text(json.dumps(SWEEP.to_dict()))
    (tmp_path / "t.csv").write_text("0,900\n600,900\n")
    words = ["plan", str(tmp_path / "load.json"), "--traffic", str(tmp_path / "t.csv"), "--slo", "p99<100ms"]
    words += ["--instances", "1", "--max-batch-size", "8", "--samples", "1000", "--min-replicas", "1"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--max-replicas", "2", "--output", str(tmp_path / "plan.json")])
    assert ended.value.code == 3
    assert "not kept" in capsys.readouterr().out
    assert not json.loads((tmp_path / "plan.json").read_text())["kept"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--slo", "p99<9ms"], "how Triton runs"),
        (["--slo", "fast", "--instances", "1", "--max-batch-size", "8"], "objective"),
        (["--slo", "p99<9ms", "--instances", "1", "--max-batch-size", "8", "--scale", "0"], "scale"),
        (["--slo", "p99<9ms", "--instances", "1", "--max-batch-size", "8", "--max-replicas", "1"], "max-replicas"),
        (["--slo", "p99<9ms", "--instances", "1", "--max-batch-size", "8", "--output", "x.pdf"], "ending"),
    ],
)
def test_a_mistake_is_three_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], why: str
) -> None:
    (tmp_path / "load.json").write_text(json.dumps(SWEEP.to_dict()))
    (tmp_path / "t.csv").write_text("0,9\n600,9\n")
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(tmp_path / "load.json"), "--traffic", str(tmp_path / "t.csv"), *more])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert why in told
    assert "mend:" in told
    assert "Traceback" not in told
