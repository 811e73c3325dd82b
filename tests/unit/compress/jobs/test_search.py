"""The search: what is tried, what is dropped early, what wins, and what happens when nothing does."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import compress
from compress import OptimizeOptions
from compress.artifact import RUNTIME_NAMES
from compress.cli import main as command
from compress.errors import BudgetError, RecipeError, StageError
from compress.evaluate.candidates import Candidate, candidates
from compress.evaluate.search_result import Proof, SearchResult, Trial
from compress.jobs import candidate_runtime, on_runtimes, original, serving_runtime, timed_on, train_winner
from compress.jobs.branch import lost
from compress.jobs.branches import branches
from compress.report.search import pareto_plot, search_table
from compress.runtime.backends import open_model
from compress.runtime.latency import Ratio
from compress.runtime.machine import fast_bfloat16


def trial(
    prune: float, drop: float, ms: float, status: Literal["measured", "eliminated", "failed"] = "measured"
) -> Trial:
    size, rate = int(1000 * ms), 1 / ms
    return Trial(Candidate(prune, "none"), status, drop=drop, latency_p50_ms=ms, size_bytes=size, throughput=rate)


def result(*trials: Trial, goal: str = "latency", max_drop: float = 1.0) -> SearchResult:
    return SearchResult(goal, max_drop, "top1", 0.9, 100, trials)  # type: ignore[arg-type]


def test_candidates_need_what_they_are_made_of() -> None:
    options = OptimizeOptions(
        output=Path("o"), prune=(0.5, 0.0), int8=("static", "dynamic"), calibrators=("minmax", "mse")
    )
    names = [candidate.name for candidate in candidates(options)]
    assert names == ["whole · float", "whole · INT8 dynamic", "−50% · float", "−50% · INT8 dynamic"]
    with_data = OptimizeOptions(output=Path("o"), prune=(0.0,), int8=("static",), calibration="c.npz")
    assert [c.calibrator for c in candidates(with_data)] == [None, "minmax", "percentile", "mse"]


def test_a_value_that_is_given_twice_is_tried_once() -> None:
    once = OptimizeOptions(
        output=Path("o"), prune=(0.0, 0.5), int8=("none", "static", "dynamic"), calibrators=("mse",), calibration="c.npz",
        precision=("bf16",), importance=("obs",), allocate=("latency",),
    )  # fmt: skip
    lists = ("prune", "int8", "calibrators", "precision", "importance", "allocate")
    twice = dataclasses.replace(once, **{name: 2 * getattr(once, name) for name in lists})
    assert candidates(twice) == candidates(once)


def test_bf16_is_tried_beside_float32_and_its_failure_ends_no_ratio() -> None:
    options = OptimizeOptions(output=Path("o"), prune=(0.0, 0.5), int8=("dynamic",), precision=("bf16",))
    names = [candidate.name for candidate in candidates(options)]
    assert names == [f"{pruned} · {kind}" for pruned in ("whole", "−50%") for kind in ("float", "BF16", "INT8 dynamic")]
    floating, half, quantized = (Trial(candidate, "measured") for candidate in candidates(options)[3:])
    assert half.candidate.options(options).precision == "bf16"
    assert floating.candidate.options(options).precision == quantized.candidate.options(options).precision == "fp32"
    assert lost([floating, dataclasses.replace(half, status="failed"), quantized]) is None
    out = dataclasses.replace(floating, status="eliminated")
    assert lost([out]) is out


@pytest.mark.parametrize(
    ("more", "native", "tried"),
    [
        ({}, True, ("fp32", "bf16")),
        ({}, False, ("fp32",)),
        ({"runtime": "onnxruntime"}, True, ("fp32",)),
        ({"target": "cuda"}, True, ("fp32",)),
        ({"precision": ("fp32",)}, True, ("fp32",)),
    ],
)
@pytest.mark.usefixtures("openvino")
def test_bf16_is_tried_by_itself_where_what_may_serve_multiplies_it(
    task: Path, monkeypatch: pytest.MonkeyPatch, more: Any, native: bool, tried: tuple[str, ...]
) -> None:
    monkeypatch.setattr(timed_on, "fast_bfloat16", lambda: native)
    asked = OptimizeOptions(output=Path("o"), **more)
    assert original.tried(asked, original.original(task / "model.pt", asked)).precision == tried


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"importance": ("magnitude", "obs")}, ["−50% magnitude", "−50% obs"]),
        ({"importance": ("obs", "magnitude"), "calibration": None}, ["−50% magnitude"]),
        ({"importance": ("obs", "magnitude"), "repair": False}, ["−50% magnitude"]),
        ({"importance": ("magnitude", "taylor")}, ["−50% magnitude"]),
        ({"importance": ("obs",), "allocate": ("macs", "latency")}, ["−50% by macs", "−50% by latency"]),
        (
            {"importance": ("magnitude", "obs"), "allocate": ("macs", "latency")},
            ["−50% magnitude by macs", "−50% obs by macs", "−50% obs by latency"],
        ),
        ({"importance": ("obs",)}, ["−50%"]),
        ({"importance": ("obs",), "calibration": None}, ["−50%"]),  # it fails, and says why
        ({"importance": "obs"}, ["−50%"]),
    ],
)
def test_channels_are_chosen_in_each_way_that_the_data_allows(more: dict[str, Any], names: list[str]) -> None:
    given = {"output": Path("o"), "calibration": "c.npz", "prune": (0.0, 0.5), "int8": ("dynamic",), **more}
    asked = OptimizeOptions(**given)
    whole, *pruned = [candidate for candidate in candidates(asked) if candidate.in_float32]
    assert [candidate.name for candidate in pruned] == [f"{name} · float" for name in names]
    assert whole == pruned[0].whole == Candidate(0.0, "none")
    for candidate in pruned:
        made = candidate.options(asked)
        assert f"−50% {made.importance}" in candidate.name or len(asked.importance) == 1
        assert f"by {made.allocate}" in candidate.name or len(asked.allocate) == 1


def test_by_latency_nothing_is_tried_in_half_precision() -> None:
    asked = OptimizeOptions(
        output=Path("o"), calibration="c.npz", prune=(0.5,), int8=("dynamic",), precision=("bf16",), importance=("obs",),
        allocate=("macs", "latency"),
    )  # fmt: skip
    assert [(each.allocate, each.kind) for each in candidates(asked)] == [
        ("macs", "float"), ("macs", "BF16"), ("macs", "INT8 dynamic"), ("latency", "float"), ("latency", "INT8 dynamic"),
    ]  # fmt: skip


def test_pruning_that_gains_no_time_beside_int8_alone_is_told_and_what_was_not_measured_is_not() -> None:
    def timed(prune: float, kind: Literal["none", "dynamic"], *rounds: float) -> Trial:
        return Trial(Candidate(prune, kind), "measured", drop=prune, latency_p50_ms=rounds[0] or None, rounds_ms=rounds)

    steady = [1.0 + 0.001 * (at % 3) for at in range(12)]
    whole, alike = timed(0.0, "dynamic", *steady), timed(0.25, "dynamic", *steady[::-1])
    faster, in_float = timed(0.5, "dynamic", *(ms / 2 for ms in steady)), timed(0.25, "none", *steady)
    (told,) = result(whole, alike, faster, in_float, timed(0.0, "none", *steady)).unpaid
    assert told.startswith(
        "−25% · INT8 dynamic can't be said to be faster than whole · INT8 dynamic, INT8 alone: 1.00 "
    )
    assert result(alike, faster, in_float).unpaid == (), "INT8 alone was not measured"
    assert result(whole, alike).to_dict()["unpaid"] == [told]


@pytest.mark.parametrize(
    ("call", "goal", "at"),
    [(None, "latency", 1), (None, "throughput", 8), (1, "throughput", 1), (4, "latency", 4), (4, "throughput", 4)],
)
def test_figures_are_told_at_the_batch_that_was_timed(call: int | None, goal: Literal["latency"], at: int) -> None:
    """Where a call's samples are fixed, there is no batch 1 or 8."""
    steady = tuple(1.0 + 0.001 * (at % 3) for at in range(12))
    whole, alike = (
        Trial(
            Candidate(prune, "dynamic"), "measured", drop=prune, size_bytes=9, runtime="openvino",
            latency_p50_ms=1.0, throughput=1.0, rounds_ms=rounds, batched_rounds_ms=rounds,
        )
        for prune, rounds in ((0.0, steady), (0.25, steady[::-1]))
    )  # fmt: skip
    proof = Proof(100, 0.9, 0.0, 0.0, 0.0, "openvino", 1.5)
    found = dataclasses.replace(result(whole, alike, goal=goal), call=call, proof=proof)
    assert f", batch {at})." in found.unpaid[0]
    assert f"1.500 ms at batch {call or 1} in its own report" in found.served
    assert f" at batch {at}, logarithmic" in pareto_plot(found)
    assert found.to_dict()["batches"] == {"latency": call or 1, "throughput": call or 8}


@pytest.mark.parametrize("call", [1, 4])
def test_a_search_whose_batch_is_fixed_tells_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], call: int
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
    compress.save(module, "model.pt", inputs=f"x:float32[{call},6]", outputs=["y"])
    for name in ("eval", "selection"):
        rows = np.random.default_rng(len(name)).standard_normal((call if call > 1 else 60, 6))
        np.savez(f"{name}.npz", x=rows.astype(np.float32))
    main(["optimize", "model.pt", "-o", "best", "--eval", "eval.npz", "--selection", "selection.npz", "--metric", "cosine",
          "--prune", "0", "--int8", "dynamic", "none", "--max-drop", "50", "--goal", "throughput"])  # fmt: skip
    page = Path("best.search/search.html").read_text(encoding="utf-8")
    for told in (page, Path("best/report.html").read_text(encoding="utf-8"), capsys.readouterr().out):
        assert {*re.findall(r"(?<!not of )batch (\d+)", told)} <= {str(call)}
    assert f"throughput (at batch {call})" in page
    assert json.loads(Path("best.search/search.json").read_text())["batches"] == {"latency": call, "throughput": call}


def test_a_candidate_is_what_export_is_asked_for() -> None:
    base = OptimizeOptions(output=Path("o"), calibration="c.npz", finetune="t.npz", epochs=3, seed=7)
    options = Candidate(0.5, "static", "mse").options(base)
    assert (options.prune, options.int8, options.calibrator, options.epochs, options.seed) == (
        0.5,
        "static",
        "mse",
        3,
        7,
    )
    whole = Candidate(0.0, "dynamic").options(base)
    assert (whole.prune, whole.finetune, whole.calibration) == (None, None, None), "nothing to recover or calibrate"


@pytest.mark.parametrize(
    ("more", "trained"),
    [
        ({}, False),
        ({"train": "winner"}, False),
        ({"train": "all"}, True),
        ({"calibration": None}, True),
        ({"repair": False}, True),
        ({"importance": ("taylor",)}, True),
        ({"finetune": None}, False),
    ],
)
def test_pruned_candidates_are_trained_before_they_are_compared_where_nothing_else_brings_them_back(
    more: dict[str, Any], trained: bool
) -> None:
    given: dict[str, Any] = {"calibration": "c.npz", "finetune": "t.npz", "prune": (0.0, 0.5), "int8": ("dynamic",)}
    asked = OptimizeOptions(output=Path("o"), **(given | more))
    whole, pruned = candidates(asked)[:2], candidates(asked)[2:]
    assert not any(candidate.trained or candidate.options(asked).finetune for candidate in whole)
    assert [candidate.trained for candidate in pruned] == [trained] * 2
    assert [candidate.options(asked).finetune for candidate in pruned] == ["t.npz" if trained else None] * 2
    assert pruned[0].name == ("−50%, trained · float" if trained else "−50% · float")


def drops(*points: float) -> list[Trial]:
    """Of pruned candidates, each twice as fast as the one before; the first is whole, and loses nothing."""
    return [trial(0.1 * at, drop, 0.5**at) for at, drop in enumerate((0.0, *points))]


@pytest.mark.parametrize(
    ("before", "after", "trained", "best"),
    [
        ((2.0, 9.0, 50.0), {0.2: 0.5}, [0.2], 0.2),  # the fastest within the allowance
        ((2.0, 9.0), {0.2: 4.0, 0.1: 0.5}, [0.2, 0.1], 0.1),  # 5 points came back: 2 may
        ((8.0, 9.0), {0.2: 4.0}, [0.2], 0.0),  # …and 8 may not
        ((0.5, 9.0), {0.2: 9.5, 0.1: 0.2}, [0.2, 0.1], 0.1),  # it made it worse; another is inside by itself
        ((0.5, 0.2), {0.2: 0.2}, [0.2], 0.2),  # as good before: the trained one wins
        ((0.5, 0.2), {0.2: 0.9}, [0.2], 0.2),  # …and where it is inside, too
        ((0.5, 0.2), {0.2: 1.5, 0.1: 2.0}, [0.2, 0.1], 0.2),  # none is inside by its training: as it was, one is
        ((6.0, 7.0, 8.0, 9.0), {0.4: 1.5, 0.3: 1.5, 0.2: 1.5}, [0.4, 0.3, 0.2], 0.0),  # three at most
        ((20.0, 30.0), {}, [], 0.0),
        ((2.0, 9.0), {0.2: None, 0.1: 0.9}, [0.2, 0.1], 0.1),  # a training that fails says nothing of others
        ((6.0, 1.2), {0.2: 1.1, 0.1: 0.5}, [0.2, 0.1], 0.1),  # one that had lost little had little to get back
        ((6.0, 4.0, 1.2), {0.3: 1.1, 0.2: 2.5, 0.1: 0.5}, [0.3, 0.2, 0.1], 0.1),  # …and of two, each says what it can
        ((2.4, 4.0, 1.2), {0.3: 1.1, 0.2: 3.0}, [0.3, 0.2], 0.0),
    ],
)
def test_the_winner_is_trained_and_the_next_one_where_it_misses(
    monkeypatch: pytest.MonkeyPatch,
    before: tuple[float, ...],
    after: dict[float, float | None],
    trained: list[float],
    best: float,
) -> None:
    made: list[float] = []

    def make(_setting: Any, plan: list[Candidate], *_rest: Any) -> list[Trial]:
        (candidate,) = plan
        assert candidate.trained
        made.append(round(candidate.prune, 1))
        return [Trial(candidate, "measured")]

    def judged(new: Trial, old: Trial, *_rest: Any) -> Trial:
        drop = after[made[-1]]
        status: Literal["measured", "failed"] = "failed" if drop is None else "measured"
        return dataclasses.replace(old, candidate=new.candidate, drop=drop, status=status)

    monkeypatch.setattr(train_winner, "branches", make)
    monkeypatch.setattr(train_winner, "as_timed", judged)
    found = dataclasses.replace(result(*drops(*before)), allowance=10.0)
    bench: Any = SimpleNamespace(allowance=10.0)
    ended = train_winner.with_training(found, {}, None, bench, None, None)  # type: ignore[arg-type]
    assert made == trained
    assert [round(t.candidate.prune, 1) for t in ended.trials if t.candidate.trained] == sorted(trained)
    told = [ended.training.find(f"−{prune:.0%} · float (drop +") for prune in trained]
    assert told == sorted(told), "in the order in which they were"
    assert ended.best is not None
    assert round(ended.best.candidate.prune, 1) == best
    assert ended.training.startswith("Candidates were compared as the repair had left them; ")
    assert all(f"−{prune:.0%} · float (drop +" in ended.training for prune in trained)


@given(st.lists(st.tuples(st.floats(-1, 5), st.floats(0.1, 9)), min_size=1, max_size=12))
def test_nothing_on_the_front_is_beaten_in_both(figures: list[tuple[float, float]]) -> None:
    found = result(*(trial(index / 100, drop, ms) for index, (drop, ms) in enumerate(figures)))
    assert found.line
    assert set(found.line) <= set(found.front)
    for one in found.front:
        assert not any(
            other.drop < one.drop and other.cost("latency") < one.cost("latency")  # type: ignore[operator]
            for other in found.measured
        )
    best = found.best
    if best is None:
        assert all(drop > 1.0 for drop, _ in figures)
    else:
        assert best.latency_p50_ms == min(ms for drop, ms in figures if drop <= 1.0)


def test_what_was_eliminated_does_not_win() -> None:
    assert result(trial(0.0, 0.0, 2.0), trial(0.5, 0.5, 1.0, "eliminated")).best.candidate.prune == 0.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("slower", "wins"), [(1.0, "accurate"), (1.01, "accurate"), (1.02, "accurate"), (1.2, "quick"), (2.0, "quick")]
)
@pytest.mark.parametrize("goal", ["latency", "throughput"])
def test_what_the_clock_can_not_tell_apart_goes_to_the_more_accurate(slower: float, wins: str, goal: str) -> None:
    rng = np.random.default_rng(0)
    rounds = 1 + 0.005 * rng.standard_normal((2, 20))
    quick, accurate = tuple(rounds[0]), tuple(slower * rounds[1])
    trials = [
        dataclasses.replace(
            trial(prune, drop, float(np.median(ms))), rounds_ms=ms, batched_rounds_ms=ms,
            throughput=1 / float(np.median(ms)), size_bytes=10,
        )
        for prune, drop, ms in ((0.5, 0.9, quick), (0.0, 0.1, accurate))
    ]  # fmt: skip
    best = result(*trials, goal=goal).best
    assert best is not None
    assert best.candidate.prune == (0.0 if wins == "accurate" else 0.5)
    smaller = dataclasses.replace(trials[0], drop=0.1, size_bytes=5)
    assert result(smaller, trials[1], goal=goal).best is smaller


def timed(prune: float, drop: float, ms: tuple[float, ...], size: int) -> Trial:
    made = trial(prune, drop, float(np.median(ms)))
    return dataclasses.replace(made, rounds_ms=ms, batched_rounds_ms=ms, size_bytes=size)


def drawn(scale: float, seed: int) -> tuple[float, ...]:
    return tuple(scale * (1 + 0.004 * np.random.default_rng(seed).standard_normal(20)))


@pytest.mark.parametrize(
    ("drops", "sizes", "wins"),
    [((0.5, 0.2, 0.4), (1, 3, 2), 1), ((0.2, 0.2, 0.2), (2, 3, 1), 2), ((0.2, 0.2, 0.2), (2, 2, 2), 0)],
    ids=["the most accurate", "the smallest", "the first"],
)
def test_whoever_is_fastest_by_chance_candidates_that_tie_end_alike(
    drops: tuple[float, ...], sizes: tuple[int, ...], wins: int
) -> None:
    for seed in range(12):
        noise = [drawn(1.0, 3 * seed + place) for place in range(3)]
        found = result(*(timed(0.1 * place, drops[place], noise[place], sizes[place]) for place in range(3)))
        assert found.best is found.trials[wins]
        assert found.tied == found.trials
        assert "3 candidates can't be told apart by the clock" in found.how
        assert [row["tied"] for row in found.to_dict()["trials"]] == [True] * 3


@pytest.mark.parametrize(
    ("interval", "slower", "on_front"),
    [(0.2, 1.0, True), (0.2, 1.002, True), (0.2, 1.5, False), (0.01, 1.0, False), (0.01, 1.5, False)],
)
def test_who_is_on_the_front_is_no_chance(interval: float, slower: float, on_front: bool) -> None:
    """Of two that neither clock nor samples tell apart, both are on it, whichever measured better."""
    for seed in range(12):
        better, worse = (
            dataclasses.replace(
                timed(0.1 * place, drop, drawn(scale, 2 * seed + place), 9),
                drop_low=drop - interval,
                drop_high=drop + interval,
            )
            for place, (drop, scale) in enumerate(((0.4, 1.0), (0.5, slower)))
        )
        found = result(better, worse)
        if worse.cost("latency") < better.cost("latency"):
            assert slower < 1.5
            assert worse in found.line
        assert better in found.front
        told = {row["name"]: row["on_front"] for row in found.to_dict()["trials"]}
        assert told[worse.candidate.name] == (on_front or worse in found.line)


def test_what_is_beaten_beyond_doubt_does_not_win_through_one_that_was_measured_badly() -> None:
    """The second's noise makes it the fastest by chance, and like each of the others."""
    first, third = drawn(1.0, 1), drawn(1.06, 3)
    second = tuple(0.99 * (1 + 0.3 * place) for place in np.linspace(-1, 1, 20))
    found = result(timed(0.0, 0.9, first, 9), timed(0.1, 0.5, second, 9), timed(0.2, 0.1, third, 9))
    assert found.tied == found.trials[:2]
    assert found.best is found.trials[1]


def test_one_that_is_alone_at_the_front_is_told_without_more_words() -> None:
    found = result(timed(0.0, 0.1, drawn(2.0, 1), 9), timed(0.5, 0.5, drawn(1.0, 2), 9))
    assert found.how == ""
    assert found.tied == found.trials[1:]
    by_size = result(timed(0.0, 0.1, drawn(2.0, 1), 9), timed(0.5, 0.05, drawn(1.0, 2), 9), goal="size")
    assert by_size.best is by_size.trials[1]
    assert "of one size" in by_size.how


def test_that_none_is_inside_is_told_with_no_more_than_is_known_of_each() -> None:
    """One that shows no loss, on samples too few to be sure, has not lost more than the limit."""
    unsure = dataclasses.replace(trial(0.0, 0.0, 2.0), drop_low=-1.9, drop_high=1.9)
    lost = dataclasses.replace(trial(0.3, 4.0, 1.0), drop_low=2.0, drop_high=6.0)
    failed = dataclasses.replace(trial(0.5, 0.0, 1.0, "failed"), drop=None)
    untried = dataclasses.replace(trial(0.7, 0.0, 1.0, "eliminated"), drop=None)
    early = dataclasses.replace(trial(0.6, 9.0, 1.0, "eliminated"), drop_low=5.0, drop_high=13.0)
    found = dataclasses.replace(result(unsure, lost, failed, untried, early), confidence=0.95)
    assert found.best is None
    assert found.missed == (
        "of 5 candidates, 2 lost more than 1 point of top1, 1 may have lost more than 1 point of top1, by the "
        "interval, 1 failed, 1 not tried; the nearest is whole · float, its drop is 0 points, and may be 1.9 at 95% "
        "confidence"
    )
    nothing = dataclasses.replace(result(failed), confidence=0.95)
    assert nothing.missed == "of 1 candidate, 1 failed"


def main(arguments: list[str]) -> None:
    """The command, which ends well."""
    with pytest.raises(SystemExit) as caught:
        command(arguments)
    assert caught.value.code == 0


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier that learnt something, with its data beside it."""
    folder = tmp_path_factory.mktemp("task")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3000, 12)).astype(np.float32)
    rule = rng.standard_normal((12, 4))
    y = (np.tanh(x) @ rule).argmax(1)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(module.parameters(), 5e-3)
    for _ in range(150):
        loss = nn.functional.cross_entropy(module(torch.from_numpy(x[:2000])), torch.from_numpy(y[:2000]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    compress.save(module, folder / "model.pt", inputs="x:float32[batch,12]", outputs=["logits"])
    np.savez(folder / "train.npz", x=x[:2000], label=y[:2000])
    np.savez(folder / "calibration.npz", x=x[:200])
    np.savez(folder / "eval.npz", x=x[2000:], label=y[2000:])
    return folder


def options(task: Path, output: Path, **more: object) -> OptimizeOptions:
    given = {"eval": "eval.npz", "calibration": "calibration.npz", "finetune": "train.npz", "epochs": 3}
    given |= {"prune": (0.0, 0.5, 0.97), "calibrators": ("minmax",), "max_drop": 3.0, **more}
    return OptimizeOptions(output=output, **given)  # type: ignore[arg-type]


def test_the_best_inside_the_limit_is_exported(task: Path, tmp_path: Path) -> None:
    told: list[SearchResult] = []
    asked = options(task, tmp_path / "best", train="all")
    found = compress.optimize(task / "model.pt", asked, tell=told.append)
    assert told == [found]
    assert found.best is not None
    assert found.best.drop is not None
    assert found.best.drop <= 3.0
    assert [t.candidate.prune for t in found.trials] == [0.0] * 3 + [0.5] * 3 + [0.97] * 3
    extreme = [t for t in found.trials if t.candidate.prune == 0.97]
    assert all(t.status in ("eliminated", "failed") and t.why for t in extreme), "what has lost too much is not timed"
    assert any(t.why.startswith("out early") and t.why.endswith("at 95% confidence") for t in extreme)
    artifact = compress.Artifact.load(tmp_path / "best")
    assert artifact.stages[-1].measured.size_bytes == found.best.size_bytes, "the very file that was measured"
    data = json.loads((tmp_path / "best.search/search.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in data["trials"] if row["best"]] == [found.best.candidate.name]
    page = (tmp_path / "best.search/search.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "<th>top1</th>" in page
    report = (tmp_path / "best/report.html").read_text(encoding="utf-8")
    assert 'href="../best.search/search.html"' in report
    assert "no use" not in report, "what was given for the search had a use"
    assert (tmp_path / "best/recipe.toml").read_text().startswith('command = "optimize"')
    assert 'src="http' not in page
    assert 'href="http' not in page


SHORT = {"prune": (0.0,), "int8": ("dynamic",), "finetune": None, "calibration": None, "max_drop": 20.0}


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize(
    ("speedup", "difference", "serves"),
    [(2.0, None, "openvino"), (1.0, None, "onnxruntime"), (2.0, 0.9, "onnxruntime")],
    ids=["faster", "as fast", "faster, and something else"],
)
def test_a_candidate_counts_by_the_runtime_that_serves_it(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speedup: float, difference: float | None, serves: str
) -> None:
    """Files, answers and clocks are real; what the clocks say is another thing on each machine."""
    monkeypatch.setattr(candidate_runtime, "ratio", lambda *_: Ratio(speedup, 0.99 * speedup, 1.01 * speedup))
    monkeypatch.setattr(
        candidate_runtime,
        "apart",
        lambda *given, half: (difference or serving_runtime.apart(*given, half=half)[0], 0.0),
    )
    told: list[SearchResult] = []
    asked = options(task, tmp_path / "best", precision=("fp32",), **SHORT)
    found = compress.optimize(task / "model.pt", asked, tell=told.append)
    assert found.runtimes == ("onnxruntime", "openvino")
    assert [trial.runtime for trial in found.trials] == [serves] * 2
    assert all(trial.latency_p50_ms and trial.throughput and trial.drop is not None for trial in found.trials)
    data = json.loads((tmp_path / "best.search/search.json").read_text(encoding="utf-8"))
    assert data["runtimes"] == ["onnxruntime", "openvino"]
    assert [row["runtime"] for row in data["trials"]] == [serves] * 2
    page = (tmp_path / "best.search/search.html").read_text(encoding="utf-8")
    assert f"<td>{RUNTIME_NAMES[serves]}</td>" in page  # type: ignore[index]
    assert [column.header for column in search_table(found).columns][-2] == "on"


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize("int8", ["none", "dynamic"])
def test_what_is_trained_counts_by_the_runtime_that_serves_it_then(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, int8: str
) -> None:
    """Files and clocks are real; OpenVINO is said to be faster, and to compute what is trained differently."""
    trained: list[Candidate] = []

    def make(setting: Any, plan: list[Candidate], *rest: Any) -> list[Trial]:
        trained.extend(plan)
        return branches(setting, plan, *rest)

    monkeypatch.setattr(train_winner, "branches", make)
    monkeypatch.setattr(candidate_runtime, "ratio", lambda *_: Ratio(2.0, 1.9, 2.1))
    monkeypatch.setattr(candidate_runtime, "apart", lambda *_, half: (0.9 if trained else 0.0, 0.0))
    monkeypatch.setattr(serving_runtime, "apart", lambda *_, half: (0.9, 0.0))
    more = {"prune": (0.0, 0.5), "int8": (int8,), "precision": ("fp32",), "goal": "size", "max_drop": 20.0, "epochs": 1}
    found = compress.optimize(task / "model.pt", options(task, tmp_path / "best", **more))
    assert found.best is not None
    ((before, after),) = found.trainings
    assert found.best is after
    assert (before.runtime, after.runtime) == ("openvino", "onnxruntime")
    assert compress.Artifact.load(tmp_path / "best").runtime == after.runtime
    assert after.latency_p50_ms
    assert after.latency_p50_ms != before.latency_p50_ms, "that of its own runtime"
    assert [trial.candidate for trial in found.trials if trial.candidate.trained] == [trained[-1]]


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize("again", [2.0, 0.5], ids=["the same", "the other"])
def test_the_winner_is_told_by_what_its_artifact_has(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], again: float
) -> None:
    """An export measures again, beside other models: what it finds is no other's."""
    monkeypatch.setattr(candidate_runtime, "ratio", lambda *_: Ratio(2.0, 1.9, 2.1))
    monkeypatch.setattr(serving_runtime, "_ratio", lambda *_: Ratio(again, 0.99 * again, 1.01 * again))
    folder = tmp_path / "best"
    main(["optimize", str(task / "model.pt"), "-o", str(folder), "--eval", "eval.npz", "--prune", "0", "--int8",
          "dynamic", "--precision", "fp32", "--max-drop", "20"])  # fmt: skip
    artifact = compress.Artifact.load(folder)
    data = json.loads((tmp_path / "best.search/search.json").read_text(encoding="utf-8"))
    (best,) = (row for row in data["trials"] if row["best"])
    assert (best["runtime"], artifact.runtime) == ("openvino", "openvino" if again > 1 else "onnxruntime")
    assert data["proof"]["runtime"] == artifact.runtime
    milliseconds = artifact.stages[-1].measured.latency_p50_ms
    assert data["proof"]["latency_p50_ms"] == milliseconds
    told = f"served by {RUNTIME_NAMES[artifact.runtime]}, {milliseconds:.3f} ms at batch 1"
    other = "the search had taken OpenVINO"
    page = (tmp_path / "best.search/search.html").read_text(encoding="utf-8")
    for words in (capsys.readouterr().out, page):
        assert told in words
        assert (other in words) == (again < 1)


@pytest.mark.usefixtures("openvino")
def test_a_file_that_openvino_fails_at_in_the_middle_is_left_to_the_other(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(model: Any, *, threads: int) -> Any:
        if getattr(model, "runtime", "") == "openvino":
            raise StageError("OpenVINO ended", why="a batch that it was not tried at", mend="none")
        return open_model(model, threads=threads)

    monkeypatch.setattr(on_runtimes, "open_model", fails)
    found = compress.optimize(task / "model.pt", options(task, tmp_path / "best", precision=("fp32",), **SHORT))
    assert [(trial.status, trial.runtime) for trial in found.trials] == [("measured", "onnxruntime")] * 2


@pytest.mark.usefixtures("openvino")
def test_bf16_is_timed_by_what_multiplies_it(task: Path, tmp_path: Path) -> None:
    if not fast_bfloat16():
        pytest.skip("this CPU does not multiply BF16")
    asked = options(task, tmp_path / "best", **(SHORT | {"int8": ("none",)}))
    found = compress.optimize(task / "model.pt", asked)
    floating, half = found.trials
    assert (half.candidate.name, half.status, half.runtime) == ("whole · BF16", "measured", "openvino")
    assert 0 < (half.size_bytes or 0) < 0.7 * (floating.size_bytes or 0)
    assert half.latency_p50_ms


def test_bf16_that_nothing_here_multiplies_is_searched_for_its_size(task: Path, tmp_path: Path) -> None:
    more = SHORT | {"int8": ("none",), "precision": ("bf16",)}
    with pytest.raises(RecipeError, match="can't search for latency in BF16"):
        compress.optimize(task / "model.pt", options(task, tmp_path / "best", **more))
    found = compress.optimize(task / "model.pt", options(task, tmp_path / "best", goal="size", **more))
    half = found.trials[1]
    assert (half.candidate.name, half.runtime, half.latency_p50_ms) == ("whole · BF16", "onnxruntime", None)
    assert found.best is half


def test_one_training_is_enough_and_what_proves_it_did_not_choose_it(task: Path, tmp_path: Path) -> None:
    asked = options(task, tmp_path / "best", prune=(0.0, 0.3, 0.5, 0.7), int8=("none",), goal="size", max_drop=4.0)
    found = compress.optimize(task / "model.pt", asked)
    best = found.best
    assert best is not None
    assert best.candidate.trained
    trained = [t for t in found.trials if t.candidate.trained]
    assert len(list((tmp_path / "best.work").glob("*-finetune-*"))) == len(trained) <= 3
    before = next(t for t in found.trials if t.candidate == dataclasses.replace(best.candidate, trained=False))
    assert (best.rounds_ms, best.latency_p50_ms) == (before.rounds_ms, before.latency_p50_ms)
    assert best.path != before.path
    assert found.proof is not None
    assert (found.samples, found.proof.samples) == (500, 500)
    artifact = compress.Artifact.load(tmp_path / "best")
    assert [row.stage for row in artifact.stages][2:5] == ["prune_channels", "repair_channels", "finetune"]
    data = json.loads((tmp_path / "best.search/search.json").read_text(encoding="utf-8"))
    assert data["allowance"] == found.allowance == pytest.approx(0.25 * (found.constant or 0))
    assert data["training"] == found.training
    assert [row["candidate"]["trained"] for row in data["trials"] if row["best"]] == [True]
    assert found.training in (tmp_path / "best.search/search.html").read_text(encoding="utf-8").replace("&#43;", "+")
    assert 'train = "' not in (tmp_path / "best/recipe.toml").read_text()
    before_again = {path: path.stat().st_mtime_ns for path in (tmp_path / "best.work").rglob("stage.json")}
    again = compress.optimize(task / "model.pt", asked)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "best.work").rglob("stage.json")}
    assert after == before_again, "an interrupted search goes on with what is made"
    assert [(t.candidate, t.drop) for t in again.trials] == [(t.candidate, t.drop) for t in found.trials]


def test_candidates_made_side_by_side_are_those_made_one_after_the_other(task: Path, tmp_path: Path) -> None:
    # By size: by time, which of so small networks wins (and is trained, where it is pruned) is the clock's to say.
    asked = {"prune": (0.0, 0.5), "int8": ("none",), "epochs": 1, "max_drop": 100.0, "goal": "size"}
    one, two = (
        compress.optimize(task / "model.pt", options(task, tmp_path / str(workers), workers=workers, **asked))
        for workers in (1, 2)
    )
    assert [(t.candidate, t.drop, t.size_bytes) for t in one.trials] == [
        (t.candidate, t.drop, t.size_bytes) for t in two.trials
    ]
    assert (tmp_path / "2" / "artifact.json").exists()


def test_a_search_again_makes_nothing_again(task: Path, tmp_path: Path) -> None:
    asked = options(task, tmp_path / "best", prune=(0.0, 0.5), int8=("none",), goal="size")
    compress.optimize(task / "model.pt", asked)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "best.work").rglob("stage.json")}
    shutil.rmtree(tmp_path / "best")
    compress.optimize(task / "model.pt", asked)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "best.work").rglob("stage.json")}
    assert before == after
    assert len(before) >= 6


def test_no_candidate_inside_is_exit_code_3_and_keeps_the_old_artifact(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "best"
    compress.export(task / "model.pt", compress.ExportOptions(output=output))
    old = (output / "artifact.json").read_bytes()
    arguments = ["optimize", str(task / "model.pt"), "-o", str(output), "--eval", "eval.npz", "--int8", "dynamic"]
    with pytest.raises(SystemExit) as caught:
        command([*arguments, "--prune", "0.6", "--finetune", "train.npz", "--epochs", "1", "--max-drop", "0",
                 "--budget-by", "point"])  # fmt: skip
    assert caught.value.code == 3
    assert "the nearest is" in capsys.readouterr().err
    assert (output / "artifact.json").read_bytes() == old
    assert (tmp_path / "best.search/search.html").exists()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"eval": None}, "no evaluation data"),
        ({"workers": 0}, "--workers can't be 0"),
        ({"target": "tensorrt"}, "says nothing of a GPU"),
        ({"prune": (0.0,), "int8": ("none",)}, "1 candidate"),
        ({"prune": (0.0, 1.5)}, "1.5"),
        ({"train": "winner", "calibration": None}, "needs --calibration"),
        ({"train": "winner", "repair": False}, "needs --calibration"),
        ({"train": "winner", "importance": ("taylor",)}, "taylor chooses channels by training data"),
        ({"tune_training": 4, "finetune": None}, "no training data"),
        ({"tune_training": 4, "finetune": "train.npz"}, "nothing judges them"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(task: Path, tmp_path: Path, more: dict[str, object], why: str) -> None:
    with pytest.raises(RecipeError) as caught:
        compress.optimize(task / "model.pt", options(task, tmp_path / "o", **more))
    assert why in f"{caught.value.what}: {caught.value.why}"


@pytest.mark.parametrize(
    ("budget", "reached"),
    [
        ({"target_params": 3000}, "params"),
        ({"target_size_mb": 0.014}, "size_bytes"),
        ({"target_latency_ms": 5.0}, None),
    ],
)
def test_pruning_stops_at_the_budget(task: Path, tmp_path: Path, budget: dict[str, float], reached: str | None) -> None:
    asked = compress.ExportOptions(output=tmp_path / "out", **budget)  # type: ignore[arg-type]
    artifact, _ = compress.export(task / "model.pt", asked)
    stage = next(row for row in artifact.stages if row.stage == "prune_to_budget")
    original, last = artifact.stages[0].measured, artifact.stages[-1].measured
    if reached is None:
        assert stage.did.startswith("nothing:"), "it is fast enough as it is"
        return
    limit = stage.details["limit"]
    assert getattr(last, reached) <= limit < (getattr(original, reached) or 0)
    assert getattr(last, reached) > 0.6 * limit, "no more than it takes"


def test_a_budget_out_of_reach_says_how_close_it_came(task: Path, tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as caught:
        compress.export(task / "model.pt", compress.ExportOptions(output=tmp_path / "out", target_params=10))
    assert "the nearest is" in caught.value.why
    assert not (tmp_path / "out").exists()


def test_a_drop_beyond_the_limit_leaves_the_result_beside(task: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    compress.export(task / "model.pt", compress.ExportOptions(output=output))
    old = (output / "model.onnx").read_bytes()
    asked = compress.ExportOptions(output=output, prune=0.8, eval="eval.npz", max_drop=1.0)
    with pytest.raises(BudgetError, match="misses its budget") as caught:
        compress.export(task / "model.pt", asked)
    assert "the drop is" in caught.value.why
    assert (output / "model.onnx").read_bytes() == old
    assert (tmp_path / "out.missed/report.html").exists()


def test_rounds_prune_and_recover_step_by_step(task: Path, tmp_path: Path) -> None:
    asked = compress.ExportOptions(
        output=tmp_path / "out", prune=0.6, rounds=2, finetune="train.npz", epochs=4, eval="eval.npz"
    )
    artifact, _ = compress.export(task / "model.pt", asked)
    names = [row.stage for row in artifact.stages]
    assert names[2:6] == ["prune_channels", "finetune", "prune_channels 2", "finetune 2"]
    macs = [row.measured.macs or 0 for row in artifact.stages]
    assert macs[0] > macs[2] > macs[4]
    assert 1 - macs[-1] / macs[0] == pytest.approx(0.6, abs=0.05)


@pytest.mark.parametrize("importance", ["magnitude", "obs"])
def test_pruning_is_repaired_where_there_is_calibration_data(task: Path, tmp_path: Path, importance: Any) -> None:
    asked = compress.ExportOptions(
        output=tmp_path / "out", prune=0.6, calibration="calibration.npz", eval="eval.npz", importance=importance
    )
    artifact, report = compress.export(task / "model.pt", asked)
    rows = {row.stage: row for row in artifact.stages}
    assert list(rows)[2:] == ["prune_channels", "repair_channels", "onnx_from_torch", "fold_onnx"]
    repaired, pruned = rows["repair_channels"], rows["prune_channels"]
    assert repaired.details["kept"]
    assert repaired.measured.macs == pruned.measured.macs
    assert (repaired.measured.value or 0) >= (pruned.measured.value or 0)
    assert any("The repair, without training, took" in finding for finding in report.findings)


def test_no_repair_leaves_it_out(task: Path, tmp_path: Path) -> None:
    asked = compress.ExportOptions(
        output=tmp_path / "out", prune=0.6, int8="static", calibration="calibration.npz", repair=False
    )
    artifact, _ = compress.export(task / "model.pt", asked)
    assert "repair_channels" not in [row.stage for row in artifact.stages]


def test_a_repair_goes_on_from_a_pruning_that_was_kept(task: Path, tmp_path: Path) -> None:
    asked = compress.ExportOptions(output=tmp_path / "out", prune=0.6, calibration="calibration.npz", rounds=2,
                                   finetune="train.npz", epochs=2, work=tmp_path / "work")  # fmt: skip
    first, _ = compress.export(task / "model.pt", asked)
    for kept in (tmp_path / "work").glob("[0-9][0-9]-repair_channels-*"):
        shutil.rmtree(kept)
    again, _ = compress.export(task / "model.pt", asked)
    names = [row.stage for row in again.stages]
    assert names[2:8] == [
        "prune_channels",
        "repair_channels",
        "finetune",
        "prune_channels 2",
        "repair_channels 2",
        "finetune 2",
    ]
    for one, other in zip(first.stages, again.stages, strict=True):
        if one.stage.startswith("repair_channels"):
            assert one.details["layers"] == other.details["layers"] != {}


BY_LATENCY = {"prune": 0.5, "allocate": "latency", "importance": "obs", "calibration": "calibration.npz"}


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"prune": 0.5, "target_params": 9}, "two goals"),
        ({"target_latency_ms": 1.0, "target": "tensorrt"}, "a latency on tensorrt"),
        ({"int8": "auto", "target": "cuda"}, "what to quantize for cuda"),
        ({"to": "tensorrt"}, "can't build a TensorRT engine"),
        ({"int8": "qat", "calibration": "calibration.npz"}, "fake quantization"),
        ({"tune_training": 4}, "settings of a training"),
        ({"tune_training": 4, "finetune": "train.npz"}, "settings of a training"),
        ({"prune": 0.5, "importance": "taylor"}, "by taylor"),
        ({"prune": 0.5, "importance": "obs"}, "by obs"),
        (
            {"prune": 0.5, "importance": "obs", "int8": "static", "calibration": "calibration.npz", "repair": False},
            "without the repair",
        ),
        ({"prune": 0.5, "allocate": "latency"}, "by latency .* --importance magnitude"),
        ({"prune": 0.5, "allocate": "latency", "importance": "taylor", "finetune": "train.npz"}, "--importance taylor"),
        ({"prune": 0.5, "allocate": "latency", "importance": "obs"}, "by obs"),  # without calibration data
        ({**BY_LATENCY, "target": "cuda"}, "on cuda"),
        ({**BY_LATENCY, "precision": "fp16"}, "half precision"),
        ({**BY_LATENCY, "int4": "weights"}, "4-bit"),
        ({**BY_LATENCY, "drop_blocks": 1}, "with --drop-blocks"),
        ({"prune": 0.5, "repair": True}, "can't repair what pruning costs"),
        ({"drop_blocks": 1}, "can't choose blocks"),
        ({"drop_blocks": "auto", "calibration": "calibration.npz"}, "can't weigh blocks"),
        (
            {"drop_blocks": 1, "calibration": "calibration.npz", "prune": 0.5, "finetune": "train.npz", "rounds": 2},
            "blocks in rounds",
        ),
        ({"drop_blocks": 1, "calibration": "calibration.npz"}, "no block can go"),
        ({"prune": 0.5, "repair": False, "calibration": "calibration.npz"}, "nothing to calibrate"),
        ({"prune": 0.5, "rounds": 2}, "2 rounds"),
        ({"max_drop": 1.0}, "largest drop"),
        ({"sensitivity": Path("s")}, "nothing is pruned"),
        ({"smooth": True}, "smooth"),
        ({"target_size_mb": -1.0}, "budget of"),
        ({"metric": "top9", "eval": "eval.npz"}, "no metric 'top9'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    task: Path, tmp_path: Path, more: dict[str, object], what: str
) -> None:
    with pytest.raises((RecipeError, StageError), match=what):
        compress.export(task / "model.pt", compress.ExportOptions(output=tmp_path / "out", **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({}, ["quantize_faster"]),
        ({"calibration": "calibration.npz"}, ["quantize_faster"]),
        ({"calibration": "calibration.npz", "max_drop": 100.0, "eval": "eval.npz"}, ["quantize_within"]),
        ({"max_drop": 100.0, "eval": "eval.npz"}, ["quantize_faster"]),  # what is dynamic has no choice by accuracy
    ],
)
def test_auto_chooses_by_time_and_then_by_accuracy(
    task: Path, tmp_path: Path, more: dict[str, Any], names: list[str]
) -> None:
    asked = compress.ExportOptions(output=tmp_path / "out", int8="auto", **more)
    artifact, _ = compress.export(task / "model.pt", asked)
    assert [row.stage for row in artifact.stages][4:] == names
    last = artifact.stages[-1]
    mode = last.options["quantize"]["mode"] if names == ["quantize_within"] else last.options["mode"]
    assert mode == ("static" if "calibration" in more else "dynamic")


def test_a_dry_run_tells_the_stages_and_writes_nothing(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.toml"
    main(
        ["export", str(task / "model.pt"), "-o", str(tmp_path / "out"), "--prune", "0.5", "--finetune", "train.npz",
         "--epochs", "2", "--dry-run", "--save-config", str(recipe)]
    )  # fmt: skip
    told = capsys.readouterr().out
    assert all(word in told for word in ("prune_channels", "finetune", "onnx_from_torch", "compare, measure", " s "))
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.work").exists()
    main(["run", str(recipe), "--prune", "0.3"])
    artifact = compress.Artifact.load(tmp_path / "out")
    assert artifact.stages[2].options["fraction"] == 0.3, "a flag overrides the recipe"
    assert artifact.stages[3].options["epochs"] == 2
