"""How often the intervals of latency hold the truth, though measuring stops as soon as they are narrow.

Two models of which the second is known to be so many times as fast take turns through the shipped `take_turns`; their
blocks are drawn, not timed: normal noise, some blocks held up by something else, and a machine that slows down.

    python benchmarks/latency_intervals.py [--trials 2000]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from compress.latency import ratio, take_turns

NOISE = (0.005, 0.02, 0.03, 0.04, 0.05, 0.1)
HELD_UP = (0.0, 0.1)  # share of blocks that something else holds up


def simulate(noise: float, held_up: float, trials: int, truth: float = 1.03) -> dict[str, float]:
    """Coverage of the ratio's interval, rounds that were needed, and how often the wrong one was called faster."""
    rng = np.random.default_rng(0)
    inside = wrong = rounds = 0
    for _ in range(trials):
        drift = 1.0

        def block(ms: float) -> Callable[[], list[float]]:
            def take() -> list[float]:
                nonlocal drift
                drift *= 1.002
                late = 1 + rng.exponential(0.5) if rng.random() < held_up else 1.0
                return [ms * drift * late * (1 + noise * rng.standard_normal())]

            return take

        found = take_turns({"first": block(truth), "second": block(1.0)})
        pair = ratio(found["first"].rounds_ms, found["second"].rounds_ms)
        if pair is None or pair.low is None or pair.high is None:
            continue  # counts as outside
        inside += pair.low <= truth <= pair.high
        wrong += pair.high < 1
        rounds += found.rounds
    return {
        "noise": noise, "held_up": held_up, "coverage": inside / trials, "rounds": rounds / trials,
        "wrong_claims": wrong / trials,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    trials = parser.parse_args().trials
    rows = [simulate(noise, held_up, trials) for noise in NOISE for held_up in HELD_UP]
    table = Table(title=f"The second is 1.03 times as fast; {trials} trials each, intervals of 95%")
    for column in ("noise of a block", "blocks held up", "intervals that hold 1.03", "rounds", "wrong claims"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['noise']:.1%}", f"{row['held_up']:.0%}", f"{row['coverage']:.1%}", f"{row['rounds']:.1f}",
            f"{row['wrong_claims']:.2%}",
        )  # fmt: skip
    Console(stderr=True).print(table)
    print(json.dumps({"benchmark": "latency_intervals", "trials": trials, "rows": rows}))


if __name__ == "__main__":
    main()
