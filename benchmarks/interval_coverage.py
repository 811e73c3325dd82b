"""How often the intervals of a report hold the truth: simulated evaluations, the shipped functions.

    python benchmarks/interval_coverage.py [--trials 4000]

Two classifiers answer the same samples. The original is right with a given share, the other is worse by a given drop;
beside it, a given share of the samples is gained and as much is lost. For each setting, the share of intervals at 95%
that hold the true drop (coverage), the share whose upper end is below it (a budget would be kept by mistake: 2.5%
is allowed), and the mean width. Beside them, what the percentile bootstrap of the mean gives. Below, single shares, and
bootstrap intervals of scores that are skewed, as losses of cosine similarity are, and of R² and its drop, for labels
that are normal and lognormal; Spearman's correlation; and macro F1, Matthews' correlation and the F1 of tags, with rare
classes, many small ones, and ones of usual sizes, where the same intervals of their influences alone stand beside them.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from compress.evaluate.class_metrics import f1_macro_scores, mcc_scores
from compress.evaluate.determination import Determination
from compress.evaluate.intervals import Interval, difference_interval, mean_interval, paired_interval, share_interval
from compress.evaluate.label_moments import moments_of
from compress.evaluate.rank_correlation import rank_scores
from compress.evaluate.tag_metrics import f1_scores
from compress.runtime.machine import environment

Array = np.ndarray[Any, Any]
SAMPLES = (50, 200, 2000)
ACCURACIES = (0.9, 0.99)
DROPS = (0.0, 0.005, 0.05)
CHANGES = (0.0, 0.01)  # of the samples, gained; as many are lost besides the drop
RESAMPLES = 1000
VALUED_TRIALS = 400
R2 = (0.5, 0.95)
# Samples, shares of two classes (or how many there are, of one size), and the shares that two models have right of the
# rare one (or of all).
CLASSES: tuple[tuple[int, float | int, float, float], ...] = (
    (1000, 0.01, 1.0, 0.9), (1000, 0.02, 1.0, 0.9), (2000, 0.01, 1.0, 0.9), (1000, 0.01, 0.9, 0.8),
    (1000, 0.5, 1.0, 0.9), (1000, 10, 0.95, 0.9), (500, 100, 0.95, 0.9), (1000, 200, 0.95, 0.9), (1000, 200, 1.0, 0.99),
    (1000, 500, 1.0, 0.9975), (1000, 500, 1.0, 0.99),
)  # fmt: skip
TAGGED = ((1000, 0.01, 1.0, 0.9), (500, 0.03, 1.0, 0.9), (300, 0.3, 1.0, 0.9), (300, 0.9, 0.95, 0.9))
RANKED = ((0.98, 0.1), (0.98, 1.0), (0.8, 1.0))  # the first model's correlation, and the other's noise besides
POPULATION = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4000)
    trials = parser.parse_args().trials
    rng = np.random.default_rng(0)
    rows = [*paired(rng, trials), *single(rng, trials), *valued(rng, VALUED_TRIALS), *determined(rng, VALUED_TRIALS)]
    rows += [*classified(rng, VALUED_TRIALS), *tagged(rng, VALUED_TRIALS), *ranked(rng, VALUED_TRIALS)]
    table = Table(title=f"intervals at 95%, {trials} simulated evaluations each", title_justify="left")
    for column in ("method", "samples", "accuracy", "drop", "gained", "coverage", "below the truth", "mean width"):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["method"], f"{row['samples']:,}", *(_percent(row[key]) for key in ("accuracy", "drop", "gained")),
            f"{row['coverage']:.1%}", f"{row['below']:.1%}", f"{row['width']:.2f} points",
        )  # fmt: skip
    Console(width=120).print(table)
    print(json.dumps({"benchmark": "interval_coverage", "trials": trials, "environment": environment(1), "rows": rows}))


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def paired(rng: np.random.Generator, trials: int) -> list[dict[str, Any]]:
    """The drop of accuracy on the same samples: `paired_interval`, and the bootstrap."""
    rows = []
    methods: dict[str, Callable[[int, int, int], Interval]] = {"Tango": paired_interval, "bootstrap": _bootstrap}
    for samples in SAMPLES:
        for accuracy in ACCURACIES:
            for drop in DROPS:
                for gained in CHANGES:
                    if gained > 1 - accuracy:
                        continue
                    drawn = rng.multinomial(samples, [gained, gained + drop, 1 - 2 * gained - drop], trials)[:, :2]
                    for name, method in methods.items():
                        found = _all(functools.partial(_counted, method, samples), drawn)
                        rows.append(_row(name, samples, accuracy, drop, gained, found, -drop))
    return rows


def _counted(method: Callable[[int, int, int], Interval], samples: int, gained: int, lost: int) -> Interval:
    return method(gained, lost, samples)


def _bootstrap(gained: int, lost: int, of: int) -> Interval:
    """The percentiles of means of samples drawn with replacement: what was used before."""
    shares = [gained / of, lost / of, 1 - (gained + lost) / of]
    counts = np.random.default_rng(0).multinomial(of, shares, RESAMPLES)
    low, high = np.percentile((counts[:, 0] - counts[:, 1]) / of, (2.5, 97.5))
    return Interval((gained - lost) / of, float(low), float(high))


def single(rng: np.random.Generator, trials: int) -> list[dict[str, Any]]:
    """One accuracy: `share_interval`."""
    rows = []
    for samples in SAMPLES:
        for accuracy in ACCURACIES:
            drawn = rng.binomial(samples, accuracy, (trials, 1))
            found = _all(lambda right, samples=samples: share_interval(right, samples), drawn)
            rows.append(_row("Wilson, single", samples, accuracy, None, None, found, accuracy))
    return rows


def valued(rng: np.random.Generator, trials: int) -> list[dict[str, Any]]:
    """The loss of cosine similarity, whose scores are no counts: `difference_interval`, by how losses are spread."""
    laws: dict[str, tuple[Callable[[tuple[int, int]], Array], float]] = {
        "half keep 1": (lambda size: rng.exponential(0.01, size) * (rng.random(size) < 0.5), 0.005),
        "lognormal, 1": (lambda size: 0.005 * rng.lognormal(0.0, 1.0, size), 0.005 * float(np.exp(0.5))),
        "lognormal, 2": (lambda size: 0.001 * rng.lognormal(0.0, 2.0, size), 0.001 * float(np.exp(2.0))),
    }
    rows = []
    for law, (draw, mean) in laws.items():
        for samples in SAMPLES:
            drawn, one = draw((trials, samples)), np.ones(samples)
            ends = np.array(
                [(i.low, i.high) for i in (difference_interval(one - row, one, bounds=(-1.0, 1.0)) for row in drawn)]
            )
            rows.append(_row(f"cosine, {law}", samples, None, mean, None, ends, -mean))
    return rows


def ranked(rng: np.random.Generator, trials: int) -> list[dict[str, Any]]:
    """The drop of Spearman's correlation with labels in steps of a half, where a second model has noise besides."""
    rows = []
    for first, noise in RANKED:

        def scored(count: int, first: float = first, noise: float = noise) -> list[Array]:
            labels, own, more = rng.standard_normal((3, count))
            given = first * labels + (1 - first**2) ** 0.5 * own
            return [rank_scores(each, np.round(2 * labels) / 2) for each in (given, given + noise * more)]

        before, after = (float(each.mean()) for each in scored(POPULATION))
        for samples in SAMPLES:
            found = (scored(samples) for _ in range(trials))
            ends = np.array(
                [(i.low, i.high) for i in (difference_interval(b, a, bounds=(-1.0, 1.0)) for a, b in found)]
            )
            rows.append(_row("Spearman, drop", samples, before, before - after, None, ends, after - before))
    return rows


def determined(rng: np.random.Generator, trials: int) -> list[dict[str, Any]]:
    """R², and its drop where a second model has half as much error again: `Determination`."""
    laws: dict[str, tuple[Callable[[int], np.ndarray[Any, Any]], float]] = {
        "normal": (rng.standard_normal, 1.0),
        "lognormal": (lambda size: rng.lognormal(0.0, 1.0, size), float((np.e - 1) * np.e)),
    }
    rows = []
    for law, (draw, variance) in laws.items():
        for samples in SAMPLES:
            for r2 in R2:
                single, drop = [], []
                for _ in range(trials):
                    labels = draw(samples)
                    apart = [(variance * (1 - r2)) ** 0.5 * rng.standard_normal(samples) for _ in range(2)]
                    before, after = (
                        _r2_scores(labels + each, labels) for each in (apart[0], apart[0] + 0.5**0.5 * apart[1])
                    )
                    ones, twos = mean_interval(before), difference_interval(after, before)
                    single.append((ones.low, ones.high))
                    drop.append((twos.low, twos.high))
                rows.append(_row(f"R², {law}", samples, r2, None, None, np.array(single), r2))
                loss = 0.5 * (1 - r2)
                rows.append(_row(f"R², {law}, drop", samples, r2, loss, None, np.array(drop), -loss))
    return rows


def _r2_scores(values: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    running = Determination(labels.var(keepdims=True), moments_of([labels]))
    running.update({"y": values}, labels)
    return running.compute()


def classified(rng: np.random.Generator, trials: int) -> list[dict[str, Any]]:
    """Macro F1 and Matthews' correlation, and the drop of both."""
    figures = {"F1 macro": (f1_macro_scores, (0.0, 1.0)), "MCC": (mcc_scores, (-1.0, 1.0))}
    rows = []
    for name, (scores, bounds) in figures.items():
        for samples, of, first, second in CLASSES:

            def draw(count: int, of: float = of, first: float = first, second: float = second) -> list[Array]:
                labels, sure = rng.integers(0, int(of), count) if of >= 1 else rng.random(count) < of, rng.random(count)
                labels = labels.astype(np.int64)
                others = (labels + rng.integers(1, max(int(of), 2), count)) % max(int(of), 2)
                missed = [(sure >= right) & ((of >= 1) | (labels == 1)) for right in (first, second)]
                return [labels, *(np.where(each, others, labels) for each in missed)]

            def scored(count: int, of: float = of, draw: Any = draw, scores: Any = scores) -> list[Array]:
                labels, *given = draw(count)
                return [scores(each, labels, max(int(of), 2)) for each in given]

            told = f"{name}, {of} classes" if of >= 1 else f"{name}, 2 classes, {of:.0%} of one"
            rows += _of_influences(told, samples, scored, bounds, trials)
    return rows


def tagged(rng: np.random.Generator, trials: int) -> list[dict[str, Any]]:
    """The F1 of entities, of which a given share of the sentences holds one."""
    rows = []
    for samples, share, first, second in TAGGED:

        def scored(count: int, share: float = share, rights: tuple[float, float] = (first, second)) -> list[Array]:
            there, sure = rng.random(count) < share, rng.random(count)
            found = [there & (sure < right) for right in rights]
            return [f1_scores(np.stack([each, each, there], axis=1).astype(np.float64)) for each in found]

        rows += _of_influences(f"F1 of entities, {share:.0%} hold one", samples, scored, (0.0, 1.0), trials)
    return rows


def _of_influences(
    name: str, samples: int, scored: Callable[[int], list[Array]], bounds: tuple[float, float], trials: int
) -> list[dict[str, Any]]:
    """Of the second of two models' scores, and of its drop; and the drop's by the influences alone."""
    before, after = (float(each.mean()) for each in scored(POPULATION))
    own, drop, alone = [], [], []
    for _ in range(trials):
        first, second = scored(samples)
        own.append(mean_interval(second, bounds=bounds))
        drop.append(difference_interval(second, first, bounds=bounds))
        alone.append(difference_interval(np.asarray(second), np.asarray(first), bounds=bounds))
    loss = before - after
    ends = [np.array([(each.low, each.high) for each in found]) for found in (own, drop, alone)]
    return [
        _row(name, samples, after, None, None, ends[0], after),
        _row(f"{name}, drop", samples, after, loss, None, ends[1], -loss),
        _row(f"{name}, drop, influences alone", samples, after, loss, None, ends[2], -loss),
    ]


def _all(method: Callable[..., Interval], drawn: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The ends [trials, 2] of each trial's interval; equal counts have equal ones."""
    known, place = np.unique(drawn, axis=0, return_inverse=True)
    found = [method(*(int(count) for count in counts)) for counts in known]
    ends = np.array([(interval.low, interval.high) for interval in found])
    return np.asarray(ends[place.ravel()])


def _row(
    method: str, samples: int, accuracy: float | None, drop: float | None, gained: float | None,
    ends: np.ndarray[Any, Any], truth: float,
) -> dict[str, Any]:  # fmt: skip
    """The truth is a difference (after less before), so a drop's upper end is where this has its lower one."""
    low, high = ends[:, 0], ends[:, 1]
    return {
        "method": method,
        "samples": samples,
        "accuracy": accuracy,
        "drop": drop,
        "gained": gained,
        "coverage": float(((low <= truth + 1e-12) & (high >= truth - 1e-12)).mean()),
        "below": float((low > truth + 1e-12).mean()),
        "width": float(100 * (high - low).mean()),
    }


if __name__ == "__main__":
    main()
