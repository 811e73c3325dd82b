"""Latency is told with its interval, measured for as long as that takes, and nothing inside an interval is claimed."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.artifact import Artifact, Measured, Signature, StageReport, TensorSpec
from compress.errors import RecipeError
from compress.evaluate.gains import apart, gains_of, speed, times
from compress.jobs.evidence import missed_budgets
from compress.jobs.export import prepare
from compress.model import Arrays
from compress.options import ExportOptions
from compress.report.findings import findings
from compress.runtime.latency import (
    FAR,
    FEWEST,
    FORESEEN,
    MOST,
    SETTING,
    interleave,
    latency,
    measuring_seconds,
    median_interval,
    ratio,
)

pytestmark = pytest.mark.clock


@pytest.fixture(autouse=True)
def nobody_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTING, raising=False)


@pytest.mark.parametrize(("said", "rounds"), [("", MOST), ("20", MOST), ("0", FEWEST), ("1e-9", FEWEST)])
def test_the_user_says_for_how_long_models_take_turns(said: str, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, said)
    wide = {name: lambda: [random.lognormvariate(0, 1)] for name in ("original", "result")}
    assert interleave(wide).rounds == rounds


@pytest.mark.parametrize("said", ["-1", "nan", "inf", "soon"])
def test_seconds_that_are_none_are_told_before_anything_is_done(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, said)
    with pytest.raises(RecipeError, match=SETTING):
        measuring_seconds()
    with pytest.raises(RecipeError, match=SETTING):
        prepare(Path("not there"), ExportOptions(output=Path("x")))


def noisy(ms: float, noise: float, seed: int) -> Callable[[], list[float]]:
    """A model whose blocks take so long, give or take."""
    rng = random.Random(seed)
    return lambda: [ms * (1 + noise * rng.gauss(0, 1)) for _ in range(5)]


def test_measuring_ends_as_soon_as_the_ratios_are_known_and_says_so() -> None:
    found = interleave({"a": noisy(2, 0.001, 0), "b": noisy(1, 0.001, 1)})
    assert (found.rounds, found.narrow) == (FEWEST, True)
    assert found.told == f"stopped after {FEWEST} rounds: ratios within ±{found.spread:.1%}"
    assert found.spread is not None
    assert found.spread < 0.03


def test_measuring_ends_at_the_limit_when_they_stay_wide_and_says_that() -> None:
    found = interleave({"a": noisy(1, 0.6, 0), "b": noisy(1, 0.6, 1)})
    assert (found.rounds, found.narrow) == (MOST, False)
    assert "at the limit" in found.told
    assert "only within" in found.told


def test_a_model_that_takes_long_ends_when_the_time_is_over() -> None:
    found = interleave({"a": noisy(2, 0.6, 0), "b": noisy(1, 0.6, 1)}, seconds=0.0)
    assert found.rounds == FEWEST


def test_progress_ends_with_all_done_wherever_it_ends() -> None:
    told: list[tuple[int, int]] = []
    interleave({"a": noisy(1, 0.001, 0)}, progress=lambda done, total: told.append((done, total)))
    assert told[0] == (1, MOST)
    assert told[-1] == (FEWEST, FEWEST)


def test_only_ratios_that_are_claimed_are_waited_for() -> None:
    """The row on the way stays wide; the result is known at once."""
    blocks = {"original": noisy(2, 0.001, 0), "on the way": noisy(2, 0.6, 1), "result": noisy(1, 0.001, 2)}
    found = interleave(blocks, references=("original",), claimed=("result",))
    assert (found.rounds, found.narrow) == (FEWEST, True)
    assert found.told == f"stopped after {FEWEST} rounds: ratios of result within ±{found.spread:.1%}"
    assert all(len(taken.rounds_ms) == FEWEST for taken in found.values()), "and the same rounds for all"
    assert interleave(blocks, references=("original",)).rounds == MOST


def test_where_no_limit_would_bring_them_near_rounds_end_early_for_ratios_far_from_one_alone() -> None:
    far = {"original": noisy(4, 0.2, 0), "result": noisy(1, 0.2, 1)}
    found = interleave(far, claimed=("result",))
    assert (found.rounds, found.foreseen, found.narrow) == (FORESEEN, True, False)
    assert found.told.startswith(f"stopped after {FORESEEN} rounds: ratios of result within ±")
    assert found.told.endswith("more would not have brought ±3%")
    near = interleave(far | {"original": noisy(1.2, 0.2, 0)}, claimed=("result",))
    assert (near.rounds, near.foreseen) == (MOST, False)
    assert near.told.startswith("stopped at the limit")
    assert interleave({"alone": noisy(1, 0.6, 0)}).rounds == MOST, "no ratio is asked for"
    assert interleave(far).rounds == MOST, "a search compares any two of its candidates"
    assert interleave(far, claimed=("result",), rounds=FORESEEN).told.startswith("stopped at the limit")


@pytest.mark.parametrize("truth", [FAR, 10.0])
@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_ending_on_wide_intervals_costs_no_coverage(truth: float, noise: float) -> None:
    trials = inside = foreseen = 0
    for seed in range(300):
        blocks = {"a": noisy(truth, noise, 2 * seed), "b": noisy(1.0, noise, 2 * seed + 1)}
        found = interleave(blocks, claimed=("b",))
        pair = ratio(found["a"].rounds_ms, found["b"].rounds_ms)
        assert pair is not None
        assert pair.low is not None
        assert pair.high is not None
        trials, inside, foreseen = trials + 1, inside + (pair.low <= truth <= pair.high), foreseen + found.foreseen
    assert foreseen > trials / 4, "that is what is looked at"
    assert inside / trials > 0.93


def test_the_fewest_rounds_are_the_fewest_that_bound_a_median() -> None:
    assert median_interval([1.0] * FEWEST) is not None
    assert median_interval([1.0] * (FEWEST - 1)) is None


def test_nothing_is_measured_of_no_models() -> None:
    assert dict(latency({}, {})) == {}


def test_a_drift_that_hits_all_alike_is_no_difference() -> None:
    """The machine slows down threefold while two equal models take turns."""
    state = {"speed": 1.0}

    def block() -> list[float]:
        state["speed"] *= 1.025
        return [state["speed"]]

    found = interleave({"a": block, "b": block})
    pair = ratio(found["a"].rounds_ms, found["b"].rounds_ms)
    assert pair is not None
    assert not pair.faster
    assert not pair.slower
    assert found["a"].high_ms is not None
    assert found["a"].low_ms is not None
    assert found["a"].high_ms / found["a"].low_ms > 1.2, "alone, their medians drift apart"


@given(st.lists(st.floats(0.1, 100), min_size=7, max_size=40))
def test_an_interval_holds_its_median_and_stays_inside_the_rounds(values: list[float]) -> None:
    found = median_interval(values)
    assert found is not None
    median, low, high = found
    assert min(values) <= low <= median <= high <= max(values)
    assert median == statistics.median(values)


@pytest.mark.parametrize("count", range(7))
def test_too_few_rounds_have_no_interval(count: int) -> None:
    assert median_interval([1.0] * count) is None


def test_intervals_hold_the_truth_after_stopping_early_too() -> None:
    """benchmarks/latency_intervals.py does the same at length."""
    trials, inside = 300, 0
    for seed in range(trials):
        found = interleave({"a": noisy(1.0, 0.06, 2 * seed), "b": noisy(1.0, 0.06, 2 * seed + 1)})
        pair = ratio(found["a"].rounds_ms, found["b"].rounds_ms)
        assert pair is not None
        assert pair.low is not None
        assert pair.high is not None
        inside += pair.low <= 1 <= pair.high
    assert inside / trials > 0.93


class Slow:
    """A model that counts its calls, and says it takes long."""

    runtime, emulated = "none", False

    def __init__(self) -> None:
        self.calls = 0

    def infer(self, inputs: Arrays) -> Arrays:
        self.calls += 1
        np.linalg.svd(np.ones((260, 260)))
        return {}


def test_a_model_of_long_calls_gets_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "compress.runtime.latency.LONGEST_BLOCK", 1e-4
    )  # as if this call were one of a third of a second
    monkeypatch.setattr("compress.runtime.latency.LONG_CALL", 1e-4)
    model = Slow()
    found = latency({"a": model}, {}, block_seconds=1e-4, seconds=0.0)
    assert found.rounds == FEWEST
    assert len(found["a"].samples_ms) == FEWEST
    assert model.calls == 3 + FEWEST, "three to see how long it takes, none to warm up what a call does not leave warm"


class Clock:
    """A machine whose time passes only as its models are called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "perf_counter_ns", lambda: round(self.now * 1e9))


class Simulated:
    """A model whose call takes `ms`: give or take a share of it, drawn for each call and for each turn.

    Where another model was called before, a call takes `cold` times as long; some are held up.
    """

    runtime, emulated = "none", False

    def __init__(
        self, clock: Clock, name: str, ms: float, rng: random.Random,
        call: float = 0.0, turn: float = 0.0, cold: float = 1.0, held_up: float = 0.0,
    ) -> None:  # fmt: skip
        self.clock, self.name, self.ms, self.rng = clock, name, ms, rng
        self.noise, self.turns, self.cold, self.held_up = call, turn, cold, held_up
        self.turn = 1.0

    def infer(self, inputs: Arrays) -> Arrays:
        first = not self.clock.calls or self.clock.calls[-1] != self.name
        if first:
            self.turn = 1 + self.turns * self.rng.gauss(0, 1)
        late = 1 + self.rng.expovariate(1) if self.rng.random() < self.held_up else 1.0
        share = self.turn * late * (self.cold if first else 1.0) * (1 + self.noise * self.rng.gauss(0, 1))
        self.clock.calls.append(self.name)
        self.clock.now += max(share, 0.1) * self.ms / 1e3
        return {}


# A ResNet-50 on its way to INT8, on one core: torch, ONNX Runtime, pruned, exported, folded, quantized.
RESNET50 = {"original": 57.0, "original_onnx": 26.0, "pruned": 35.0, "exported": 15.0, "folded": 15.0, "result": 5.0}


def on_the_way(clock: Clock, seed: int, **more: float) -> dict[str, Simulated]:
    return {name: Simulated(clock, name, ms, random.Random(f"{name} {seed}"), **more) for name, ms in RESNET50.items()}


@pytest.mark.parametrize(("said", "calls"), [("", 60), ("20", 60), ("0", 10)])
def test_turns_are_short_where_the_user_gives_them_no_time(
    said: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SETTING, said)
    found = latency({"a": Simulated(Clock(monkeypatch), "a", 1.0, random.Random(0))}, {})
    assert len(found["a"].samples_ms) / found.rounds == pytest.approx(calls, abs=1)


def test_a_round_calls_a_slow_model_three_times_and_a_fast_one_for_sixty_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    models = on_the_way(clock, 0)
    found = latency(models, {}, references=("original", "original_onnx"), claimed=("result",))
    taken = {name: len(timed.samples_ms) // FEWEST for name, timed in found.items()}
    assert found.rounds == FEWEST
    assert taken == {"original": 3, "original_onnx": 3, "pruned": 3, "exported": 4, "folded": 4, "result": 12}
    warming = {name: clock.calls.count(name) - FEWEST * taken[name] for name in models}
    assert warming["original"] == warming["original_onnx"] == warming["pruned"] == 3, "to see how long it takes"
    assert warming["exported"] == 6 + FEWEST, "and one before each block"
    assert warming["result"] == 6 + 3 * FEWEST
    assert found.to_dict()["calls"] == {name: FEWEST * calls for name, calls in taken.items()}
    assert found.seconds < 4.5, "of the simulated clock: blocks of ten calls and their warm-up took 10 s"


def test_a_call_that_finds_cold_caches_moves_no_median(monkeypatch: pytest.MonkeyPatch) -> None:
    found = latency(on_the_way(Clock(monkeypatch), 0, cold=1.2), {})
    for name, ms in RESNET50.items():
        assert found[name].p50_ms == pytest.approx(ms, rel=1e-6)


@pytest.mark.parametrize(
    ("call", "turn", "held_up"), [(0.02, 0.0, 0.0), (0.0, 0.02, 0.0), (0.05, 0.02, 0.05), (0.02, 0.06, 0.1)]
)
def test_intervals_hold_the_truth_with_short_blocks_too(
    monkeypatch: pytest.MonkeyPatch, call: float, turn: float, held_up: float
) -> None:
    """Whatever the noise is made of: of calls, of turns, or of calls that something else holds up."""
    clock, trials, inside = Clock(monkeypatch), 100, 0
    for seed in range(trials):
        clock.calls.clear()
        models = on_the_way(clock, seed, call=call, turn=turn, held_up=held_up)
        found = latency(models, {}, references=("original", "original_onnx"), claimed=("result",))
        for before in ("original", "original_onnx"):
            pair = ratio(found[before].rounds_ms, found["result"].rounds_ms)
            assert pair is not None
            assert pair.low is not None
            assert pair.high is not None
            inside += pair.low <= RESNET50[before] / RESNET50["result"] <= pair.high
        assert found.narrow == (found.spread is not None and found.spread <= 0.03)
        assert found.narrow or found.foreseen or found.rounds == MOST or found.seconds > 20
    assert inside / (2 * trials) > 0.93


def test_a_first_call_that_takes_long_does_not_make_a_model_a_slow_one() -> None:
    class Late(Slow):
        def infer(self, inputs: Arrays) -> Arrays:
            if not self.calls:
                time.sleep(0.35)
            self.calls += 1
            return {}

    found = latency({"a": Late()}, {}, block_seconds=1e-4)
    assert len(found["a"].samples_ms) >= 10 * FEWEST


def row(stage: str, rounds: list[float], **more: object) -> StageReport:
    median = statistics.median(rounds)
    measured = Measured(
        macs=100, size_bytes=1000, latency_p50_ms=median, latency_rounds_ms=tuple(rounds), cosine_similarity=1.0
    )
    return StageReport(stage, "did", dataclasses.replace(measured, **more), 1.0)  # type: ignore[arg-type]


SAME = [0.0151, 0.0149, 0.0150, 0.0152, 0.0148, 0.0150, 0.0151, 0.0149]
OTHER = [0.0150, 0.0150, 0.0149, 0.0153, 0.0149, 0.0152, 0.0149, 0.0151]  # as fast, give or take
SLOWER = [1.4 * ms for ms in SAME]


def words(before: list[float], after: list[float]) -> str:
    rows = [row("original", [10 * ms for ms in before]), row("original_onnx", before), row("fold_onnx", after)]
    return str(gains_of(rows)[-1])


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (SLOWER, SAME, "1.4× faster than the original in ONNX Runtime (1.4 to 1.4)"),
        (SAME, SLOWER, "1.4× slower than the original in ONNX Runtime (1.4 to 1.4)"),
        (SAME, OTHER, "as fast as the original in ONNX Runtime (0.99 to 1.01 times, within noise)"),
        (SAME, SAME, "as fast as the original in ONNX Runtime (1.00 to 1.00 times, within noise)"),
    ],
)
def test_a_ratio_is_told_the_way_it_goes_and_not_at_all_inside_the_noise(
    before: list[float], after: list[float], told: str
) -> None:
    assert words(before, after) == told


@given(st.lists(st.floats(0.01, 10), min_size=8, max_size=8), st.lists(st.floats(0.01, 10), min_size=8, max_size=8))
def test_no_gain_is_below_one_and_none_is_claimed_inside_its_interval(before: list[float], after: list[float]) -> None:
    text = words(before, after)
    pair = ratio(before, after)
    assert pair is not None
    assert "0.00×" not in text
    assert "1.00×" not in text
    assert not text.startswith("0.")
    if not (pair.faster or pair.slower):
        assert "as fast as" in text


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (250, "4.0× smaller than the original's ONNX"),
        (1330, "1.3× larger than the original's ONNX"),
        (1001, "as large as the original's ONNX"),
    ],
)
def test_a_size_is_told_the_way_it_goes(size: int, told: str) -> None:
    rows = [row("original", SAME), row("original_onnx", SAME), row("fold_onnx", SAME, size_bytes=size)]
    assert str(gains_of(rows)[0]) == told


def found_in(int8: list[float], floats: list[float] = SAME, pruned: bool = False, **last: object) -> str:
    rows = [row("original", SAME), row("original_onnx", SAME)]
    rows += [row("prune_channels", SAME), row("finetune", SAME)] if pruned else []
    return " ".join(findings([*rows, row("fold_onnx", floats), row("quantize_onnx", int8, **last)]))


def test_int8_is_slower_only_beyond_the_noise_and_the_figures_show_it() -> None:
    assert "INT8 is slower" not in (unsure := found_in(OTHER))
    assert "INT8 is used, but no gain in time over the float model can be told from noise" in unsure
    told = found_in(SLOWER)
    assert "INT8 is 1.40× slower (1.40 to 1.40; 0.021 ms against 0.015 ms at batch 1) here than the float" in told
    near = found_in([0.0154] * 8, [0.0146] * 8)
    assert "0.0154 ms against 0.0146 ms" in near, "never the same figure twice"
    alike = found_in([1.02 * ms for ms in SAME])
    assert "INT8 is 1" not in alike, "two sessions of one file differ by so much"
    assert "two sessions of one file differ by up to" in alike


def test_of_calls_of_several_samples_no_finding_says_batch_1() -> None:
    rows = [row("original", SAME), row("original_onnx", SAME), row("prune_channels", SAME), row("finetune", SAME)]
    for floats, int8 in ((SAME, SLOWER), (OTHER, SAME)):
        told = " ".join(findings([*rows, row("fold_onnx", floats), row("quantize_onnx", int8)], batch=4))
        assert "at batch 4" in told
        assert "at batch 1" not in told


def test_no_finding_is_illustrated_by_figures_that_say_the_opposite() -> None:
    """On a machine of two speeds every pair of rounds may say slower where the medians of all rounds say faster."""
    floats = [*[0.146] * 7, 0.233, *[0.30] * 7]
    int8 = [1.11 * ms for ms in (*floats[:7], 0.146, *floats[8:])]
    assert "slower" in (told := found_in(int8, floats))
    assert "(1.11 to 1.11, paired by round at batch 1)" in told
    assert "0.162 ms against" not in told


def test_that_pruning_gained_no_time_is_told_from_that_nobody_knows() -> None:
    assert "Pruning removed MACs, and yet the model is 1.40× slower (" in found_in(SAME, SLOWER, pruned=True)
    unsure = found_in(SAME, OTHER, pruned=True)
    assert "no gain in time can be told from noise: in ONNX Runtime at batch 1 it is 0.99 to 1.01 times" in unsure
    assert "two sessions" not in unsure
    assert "slower" not in unsure
    # An interval without 1 in it says that there is a difference; that this is noise needs its reason.
    aside = found_in(SAME, [1.015 * ms for ms in SAME], pruned=True)
    assert "0.99 to 0.99 times as fast, and two sessions of one file differ by up to 3%." in aside
    assert "Pruning" not in found_in(SAME, [0.7 * ms for ms in SAME], pruned=True)


@pytest.mark.parametrize("drop", [0.0, 0.001, 0.0049])
def test_a_loss_that_would_be_printed_as_nothing_is_none(drop: float) -> None:
    told = found_in(SAME, metric="cosine", value=1 - drop / 100, drop=drop, drop_low=drop / 2, drop_high=drop * 2)
    assert "fell" not in told


@pytest.mark.parametrize(
    ("limit", "kept"), [(0.0160, True), (0.0153, True), (0.0151, False), (0.0150, False), (0.0140, False)]
)
def test_a_latency_is_inside_its_budget_when_all_of_its_interval_is(limit: float, kept: bool) -> None:
    last = row("fold_onnx", SAME, latency_p50_low_ms=0.0149, latency_p50_high_ms=0.0152)
    missed = missed_budgets(
        ExportOptions(output=Path("x"), target_latency_ms=limit), [row("original", SAME), last], None
    )
    assert (not missed) == kept


def test_an_artifact_of_before_there_were_intervals_is_read() -> None:
    old = StageReport("original", "did", Measured(latency_p50_ms=1.0), 1.0).to_dict()
    for name in ("latency_p50_low_ms", "latency_p50_high_ms", "latency_rounds_ms"):
        del old["measured"][name]
    assert StageReport.from_dict(old).measured == Measured(latency_p50_ms=1.0)


def test_rows_of_an_artifact_can_be_compared_by_whoever_reads_it(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    signature = Signature((TensorSpec.parse("x:float32[batch,3]"),), (TensorSpec.parse("y:float32[batch,2]"),))
    digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    stages = (row("original", SLOWER), row("fold_onnx", SAME))
    Artifact(tmp_path, "model.onnx", "onnx", digest, signature, stages, "0").save()
    before, after = (stage.measured for stage in Artifact.load(tmp_path).stages)
    pair = speed(before, after)
    assert pair is not None
    assert pair.value == pytest.approx(1.4)
    assert pair.faster


@pytest.mark.parametrize(
    ("value", "text"), [(1.0, "1.00×"), (1.02, "1.02×"), (1.06, "1.1×"), (1.94, "1.9×"), (24.4, "24×")]
)
def test_ratios_keep_the_decimals_that_tell_them_from_one(value: float, text: str) -> None:
    assert times(value) == text


def test_two_figures_get_the_decimals_that_tell_them_apart() -> None:
    assert apart(0.0151, 0.0149) == ("0.0151", "0.0149")
    assert apart(2.0, 1.0) == ("2.000", "1.000")
    assert apart(0.5, 0.5) == ("0.500", "0.500")
