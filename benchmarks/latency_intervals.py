"""How often the intervals of latency hold the truth, though measuring stops as soon as they are narrow.

Two models of which the second is known to be 1.03, 1.5 or 10 times as fast take turns through the shipped `interleave`;
their blocks are drawn, not timed: normal noise, some blocks held up by something else, and a machine that slows down.

Six models, as a ResNet-50 leaves behind on its way to INT8, then go through the shipped `latency` on a clock that moves
only as they are called: what measuring takes, and how narrow it ends, with blocks of at least 3 calls and of 10.

    python benchmarks/latency_intervals.py [--trials 2000]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table

import compress.runtime.latency as shipped
from compress.runtime.latency import interleave, latency, ratio

NOISE = (0.005, 0.02, 0.03, 0.04, 0.05, 0.1)
HELD_UP = (0.0, 0.1)  # share of blocks that something else holds up
TRUTHS = (1.03, 1.5, 10.0)  # near 1, and where measuring may end once no limit would make an interval narrow


def simulate(noise: float, held_up: float, trials: int, truth: float) -> dict[str, float]:
    """Coverage of the ratio's interval, rounds that were needed, and how often the wrong one was called faster."""
    rng = np.random.default_rng(0)
    inside = wrong = rounds = foreseen = 0
    for _ in range(trials):
        drift = 1.0

        def block(ms: float) -> Callable[[], list[float]]:
            def take() -> list[float]:
                nonlocal drift
                drift *= 1.002
                late = 1 + rng.exponential(0.5) if rng.random() < held_up else 1.0
                return [ms * drift * late * (1 + noise * rng.standard_normal())]

            return take

        found = interleave({"first": block(truth), "second": block(1.0)}, claimed=("second",))
        pair = ratio(found["first"].rounds_ms, found["second"].rounds_ms)
        if pair is None or pair.low is None or pair.high is None:
            continue  # counts as outside
        inside += pair.low <= truth <= pair.high
        wrong += pair.high < 1
        rounds += found.rounds
        foreseen += found.foreseen
    return {
        "truth": truth, "noise": noise, "held_up": held_up, "coverage": inside / trials, "rounds": rounds / trials,
        "foreseen": foreseen / trials, "wrong_claims": wrong / trials,
    }  # fmt: skip


# Milliseconds of a call on one core: torch, ONNX Runtime, pruned, exported, folded, quantized.
MODELS = {"original": 57.0, "original_onnx": 26.0, "pruned": 35.0, "exported": 15.0, "folded": 15.0, "result": 5.0}
# Of a call, of a model's whole turn, and the share of calls that something else holds up.
MADE_OF = ((0.01, 0.01, 0.0), (0.03, 0.01, 0.02), (0.01, 0.03, 0.02), (0.05, 0.05, 0.05), (0.3, 0.05, 0.1))
BLOCKS = {"3 calls": ((3, 200), 0.02), "10 calls": ((10, 200), 0.1)}  # CALLS and LONG_CALL


class Clock:
    """Stands for the module `time`."""

    now, last = 0.0, ""

    def perf_counter(self) -> float:
        return self.now

    def perf_counter_ns(self) -> int:
        return round(self.now * 1e9)


class Simulated:
    """A model whose calls only move the clock."""

    runtime, emulated = "none", False

    def __init__(self, clock: Clock, name: str, seed: int, noise: tuple[float, float, float]) -> None:
        self.clock, self.name, self.rng, self.noise, self.turn = (
            clock,
            name,
            random.Random(f"{name} {seed}"),  # noqa: S311  noise, not a secret
            noise,
            1.0,
        )

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        call, turn, held_up = self.noise
        if self.clock.last != self.name:
            self.turn, self.clock.last = 1 + turn * self.rng.gauss(0, 1), self.name
        late = 1 + self.rng.expovariate(1) if self.rng.random() < held_up else 1.0
        share = self.turn * late * (1 + call * self.rng.gauss(0, 1))
        self.clock.now += max(0.1, share) * MODELS[self.name] / 1e3
        return {}


def blocks(fewest: str, noise: tuple[float, float, float], trials: int) -> dict[str, Any]:
    """Simulated seconds, width at the end, rounds and coverage of one kind of blocks."""
    clock = Clock()
    seconds = spread = rounds = inside = 0.0
    calls, long_call = BLOCKS[fewest]
    with mock.patch.multiple(shipped, time=clock, CALLS=calls, LONG_CALL=long_call):
        for seed in range(trials):
            clock.last, begun = "", clock.now
            models = {name: Simulated(clock, name, seed, noise) for name in MODELS}
            found = latency(models, {}, references=("original", "original_onnx"), claimed=("result",))
            seconds += clock.now - begun
            spread += found.spread or 1.0
            rounds += found.rounds
            for before in ("original", "original_onnx"):
                pair = ratio(found[before].rounds_ms, found["result"].rounds_ms)
                if pair is not None and pair.low is not None and pair.high is not None:
                    inside += pair.low <= MODELS[before] / MODELS["result"] <= pair.high
    return {
        "blocks": fewest, "call": noise[0], "turn": noise[1], "held_up": noise[2], "seconds": seconds / trials,
        "spread": spread / trials, "rounds": rounds / trials, "coverage": inside / (2 * trials),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    trials = parser.parse_args().trials
    rows = [simulate(noise, held_up, trials, truth) for truth in TRUTHS for noise in NOISE for held_up in HELD_UP]
    table = Table(title=f"How many times as fast the second is; {trials} trials each, intervals of 95%")
    for column in (
        "times",
        "noise of a block",
        "blocks held up",
        "intervals that hold it",
        "rounds",
        "ended early",
        "wrong claims",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['truth']:g}", f"{row['noise']:.1%}", f"{row['held_up']:.0%}", f"{row['coverage']:.1%}",
            f"{row['rounds']:.1f}", f"{row['foreseen']:.0%}", f"{row['wrong_claims']:.2%}",
        )  # fmt: skip
    Console(stderr=True).print(table)
    costs = [blocks(fewest, noise, max(1, trials // 10)) for noise in MADE_OF for fewest in BLOCKS]
    second = Table(title=f"Six models of a ResNet-50; {max(1, trials // 10)} trials each, a simulated clock")
    for column in ("noise: call, turn, held up", "blocks of", "seconds", "width ±", "rounds", "intervals that hold it"):
        second.add_column(column, justify="right")
    for cost in costs:
        second.add_row(
            f"{cost['call']:.0%}, {cost['turn']:.0%}, {cost['held_up']:.0%}", cost["blocks"], f"{cost['seconds']:.1f}",
            f"{cost['spread']:.1%}", f"{cost['rounds']:.1f}", f"{cost['coverage']:.1%}",
        )  # fmt: skip
    Console(stderr=True).print(second)
    print(json.dumps({"benchmark": "latency_intervals", "trials": trials, "rows": rows, "blocks": costs}))


if __name__ == "__main__":
    main()
