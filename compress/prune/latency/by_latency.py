"""Pruning to a share of the latency: tables, the choice by them, and what measuring the whole says of both."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compress.console.durations import ms_text
from compress.console.wording import Note, counted
from compress.errors import StageError
from compress.model import TorchModel, sample_inputs
from compress.prune.channels import Channels
from compress.prune.choose_channels import MOST, TOLERANCE, fewest_of, step_of
from compress.prune.finished import finished
from compress.prune.follow_channels import ChannelGroup
from compress.prune.latency.allocate import Curve, Gone, Predicted, allocated, error_of
from compress.prune.latency.layers import LIKED, LIKED_WIDE, WIDE, layers_of
from compress.prune.latency.tables import SECONDS, Clocked, Tables, tables_of
from compress.prune.rank_by_obs import MOST_BY_OBS, shares_at
from compress.prune.repair.obs import Elimination
from compress.runtime.backends import open_model
from compress.runtime.latency import BLOCK_SECONDS, FEWEST, latency, ratio
from compress.runtime.latency import MOST as ROUNDS
from compress.stage import Given, Progress, Stage
from compress.storage.stage_cache import StageCache

__all__ = ["ByLatency", "Timed", "held_to_it", "like_macs", "nearest", "timed"]

LIKE_MACS = 64  # allocations by MACs that are looked at, from nothing to all that can go
TRIES = 3  # prunings, each measured, by which the tables' share is brought to the network's


@dataclass(frozen=True)
class ByLatency:
    """How what a network takes is told.

    Attributes:
        on: what layers are timed on.
        tail: the stages from torch to the finished file.
        cache: of tables; None for none.
        seconds: for the tables.
    """

    on: Clocked
    tail: tuple[Stage, ...]
    cache: StageCache | None = None
    seconds: float = SECONDS

    @property
    def options(self) -> dict[str, Any]:
        """What decides the result, as JSON values."""
        tail = [[stage.name, dict(stage.options)] for stage in self.tail]
        return {**self.on.options, "tail": tail, "seconds": self.seconds}


@dataclass(frozen=True)
class Timed:
    """A network's layers, timed.

    Attributes:
        predicted: what they take, by how many units are gone.
        tables: where that is from.
        whole: milliseconds with all units.
        share: milliseconds by the tables that stand for all of the network's latency.
    """

    predicted: Predicted
    tables: Tables
    whole: float
    share: float


def timed(by: ByLatency, channels: Channels, progress: Progress) -> Timed:
    """Time the layers that can lose channels, or find in the cache what they take.

    Raises:
        StageError: there is none, or one that can't be timed.
    """
    layers = layers_of(channels)
    if not layers:
        raise StageError(
            "can't prune to a share of the latency",
            why="no layer that can lose channels is a linear layer or a convolution",
            mend="leave --allocate latency out for this model",
        )
    tables = tables_of(layers, by.on, progress, by.cache, by.seconds)
    predicted = Predicted(layers, tables.found)
    whole = predicted.total({})
    return Timed(predicted, tables, whole, whole)


def nearest(
    found: Timed,
    groups: Sequence[ChannelGroup],
    eliminated: Mapping[str, Elimination],
    fraction: float,
    round_to: int | None,
) -> tuple[float, dict[str, int], int]:
    """The share of the latency that goes, by the tables, how many units of each group go for it, and the rounding.

    The share is at least the fraction, where that can be reached. Counts are multiples of 16 or 8, as a group's width
    likes them (told as a rounding of 0), or of less where that overshoots. No group loses more than obs can tell of,
    unless all have to.

    Args:
        found: what layers take.
        groups: that can lose channels.
        eliminated: in which order, and for what error, by root.
        fraction: of the latency.
        round_to: what counts are multiples of; None for what is liked.
    """
    budget = found.whole - fraction * found.share
    best: tuple[float, dict[str, int], int] = (0.0, {}, 0)
    least = float("inf")
    for rounded in (0, 4, 2, 1) if round_to is None else (round_to,):
        for most in (MOST_BY_OBS, MOST):
            curves = [_curve(group, eliminated[group.root], rounded, most) for group in groups]
            starts = _by_macs(curves, eliminated)
            gone = allocated(curves, found.predicted, budget, starts)
            if gone is not None:
                break
        if gone is None:
            widest = {curve.root: int(curve.gone[-1]) for curve in curves}
            share = (found.whole - found.predicted.total(widest)) / found.share
            best = (share, widest, rounded) if least == float("inf") and share > best[0] else best
            continue
        share = (found.whole - found.predicted.total(gone)) / found.share
        if error_of(curves, gone) < least:
            least, best = error_of(curves, gone), (share, gone, rounded)
        if share <= fraction + TOLERANCE:
            break
    return best


def held_to_it(
    by: ByLatency,
    whole: TorchModel,
    found: Timed,
    fraction: float,
    cut: Callable[[Timed], tuple[Given, Gone, int]],
    rival: Callable[[Gone, int], TorchModel | None],
    progress: Progress,
) -> Given:
    """Prune, measure the finished whole, and prune again where the tables were wrong about how much that brings.

    What a layer takes by itself is not what it takes between others: the share that tables tell is brought to what the
    network shows, by a secant.

    Args:
        by: how to measure.
        whole: the network with all its channels.
        found: what its layers take.
        fraction: of the latency that is to go.
        cut: prunes, by tables whose share was brought to the network's.
        rival: the network that by MACs alone loses the same by the tables' errors; None where that is the same one.
        progress: is told of measurements.

    Raises:
        StageError: so much can't go, by the tables or, after a measurement, by the network.
    """
    said = _Measurements(by, whole)
    with said:
        before = said.alone()
        overhead = min(found.tables.overhead_ms, before / 2)
        first = dataclasses.replace(found, share=found.whole * before / (before - overhead))
        now, given, rounded = first, Given(whole, ""), 0
        gone: Gone = {}
        tried: list[dict[str, float]] = []
        for number in range(TRIES):
            given, gone, rounded = cut(now)
            assert isinstance(given.model, TorchModel)  # noqa: S101  it was pruned
            share = said.share_gone(given.model)
            by_tables = (found.whole - found.predicted.total(gone)) / now.share
            tried.append({"predicted": by_tables, "measured": share})
            progress(number + 1, TRIES + 1, f"−{by_tables:.0%} of the latency by tables: −{share:.0%} as measured")
            if abs(share - fraction) <= TOLERANCE or share <= TOLERANCE:
                break
            now = dataclasses.replace(now, share=(found.whole - found.predicted.total(gone)) / share)
        progress(TRIES, TRIES + 1, "measuring beside what MACs alone would choose")
        assert isinstance(given.model, TorchModel)  # noqa: S101  it was pruned
        details, notes = said.compared(given.model, rival(gone, rounded))
    whole_ms, now_ms = details["whole_ms"], details["latency_ms"]
    predicted = whole_ms * (1 - (found.whole - found.predicted.total(gone)) / first.share)
    off = predicted / now_ms - 1
    told = (
        f"Latency by tables of the layers' shapes: {ms_text(predicted)} ms, measured {ms_text(now_ms)} ms "
        f"of {ms_text(whole_ms)} ms, so that they told {abs(off):.0%} {'more' if off > 0 else 'less'} than it takes"
        + (f" before {counted(len(tried) - 1, 'corrections')}." if len(tried) > 1 else ".")
    )
    warnings = list(given.warnings)
    went = 1 - now_ms / whole_ms
    if went < fraction - 2 * TOLERANCE:
        asked = f"{fraction:.0%} of the latency were to go, and {went:.0%} went"
        warnings.append(f"{asked}: what was pruned is not all that takes time.")
    if found.tables.scaled:
        warnings.append(
            f"time for tables ran out after {by.seconds:g} s: what {counted(len(found.tables.scaled), 'layers')} take "
            f"was told by their MACs ({', '.join(found.tables.scaled[:3])})"
        )
    told_of = {
        **by.on.options, **details, "predicted_ms": predicted, "off": off, "tried": tried,
        "table_seconds": found.tables.seconds, "shapes": len(found.tables.found), "scaled": list(found.tables.scaled),
    }  # fmt: skip
    return dataclasses.replace(
        given, details={**given.details, "by_latency": told_of}, warnings=(*warnings, Note(told), *map(Note, notes))
    )


def like_macs(
    groups: Sequence[ChannelGroup],
    eliminated: Mapping[str, Elimination],
    round_to: int,
    gone: Gone,
) -> dict[str, int] | None:
    """What one error for all groups, the choice by MACs, gives where it costs no less than a choice; None: the same."""
    curves = [_curve(group, eliminated[group.root], round_to, MOST) for group in groups]
    least = error_of(curves, gone)
    dearer = [each for each in _by_macs(curves, eliminated) if error_of(curves, each) >= least]
    other = min(dearer, key=lambda each: error_of(curves, each), default=None)
    return None if other is None or other == dict(gone) else other


class _Measurements:
    """Finished files that take turns with that of the whole network."""

    def __init__(self, by: ByLatency, whole: TorchModel) -> None:
        self._by, self._whole, self._inputs = by, whole, sample_inputs(whole.signature, 1)

    def __enter__(self) -> None:
        self._held = tempfile.TemporaryDirectory()
        self._count = 0
        self._opened = self._open(self._whole)

    def __exit__(self, *_: object) -> None:
        self._held.cleanup()

    def _open(self, model: TorchModel) -> Any:
        folder = Path(self._held.name) / str(self._count)
        folder.mkdir()
        self._count += 1
        file = dataclasses.replace(finished(model, self._by.tail, folder), runtime=self._by.on.runtime)
        return open_model(file, threads=self._by.on.threads)

    def alone(self) -> float:
        """Milliseconds of the whole."""
        turns = latency({"whole": self._opened}, self._inputs, rounds=FEWEST, block_seconds=BLOCK_SECONDS)
        return turns["whole"].p50_ms

    def share_gone(self, pruned: TorchModel) -> float:
        """Of the whole's latency, what went with the channels."""
        models = {"whole": self._opened, "pruned": self._open(pruned)}
        turns = latency(models, self._inputs, rounds=FEWEST, block_seconds=BLOCK_SECONDS)
        found = ratio(turns["pruned"].rounds_ms, turns["whole"].rounds_ms)
        return 0.0 if found is None else 1 - found.value

    def compared(self, pruned: TorchModel, rival: TorchModel | None) -> tuple[dict[str, Any], list[str]]:
        """Figures of both, and what they say of the two ways to choose."""
        models = {"whole": self._opened, "latency": self._open(pruned)}
        if rival is not None:
            models["macs"] = self._open(rival)
        turns = latency(models, self._inputs, references=("whole", "macs"), rounds=ROUNDS, block_seconds=BLOCK_SECONDS)
        details: dict[str, Any] = {f"{name}_ms": each.p50_ms for name, each in turns.items()}
        if rival is None:
            return details, ["Allocating by MACs would have chosen the same channels, or can't go so far."]
        found = ratio(turns["macs"].rounds_ms, turns["latency"].rounds_ms)
        if found is None or found.low is None or found.high is None:
            return details, []
        details |= {"over_macs": found.value, "over_macs_low": found.low, "over_macs_high": found.high}
        told = f"{found.value:.2f} times as fast ({found.low:.2f} to {found.high:.2f})"
        by_obs = "at no greater sum of obs' errors, which is no metric,"
        if found.faster:
            return details, [f"Allocating by latency: {by_obs} it is {told} as allocating by MACs."]
        told = f"gained nothing beyond noise here: {by_obs} it is {told} as allocating by MACs"
        return details, [f"Allocating by latency {told}. --allocate macs needs no tables."]


def _curve(group: ChannelGroup, one: Elimination, round_to: int, most: float) -> Curve:
    """Numbers of units that leave round counts, with the error of each; rounded to 0: as the group's width likes."""
    step = step_of(group, round_to or (LIKED_WIDE if group.width >= WIDE else LIKED))
    fewest = max(fewest_of(group), int(np.ceil((1 - most) * group.units - 1e-9)))
    left = [count for count in range(step, group.units, step) if count >= fewest]
    gone = np.array([0, *(group.units - count for count in reversed(left))], np.int64)
    return Curve(group.root, gone, np.array([0.0, *one.errors])[gone])


def _by_macs(curves: Sequence[Curve], eliminated: Mapping[str, Elimination]) -> list[dict[str, int]]:
    """What the choice by MACs comes by, from nothing to all, in the counts of these curves."""
    roots = {curve.root: eliminated[curve.root] for curve in curves}

    def count(curve: Curve, share: float) -> int:
        away = np.abs(curve.gone - share * len(roots[curve.root].order))
        return int(curve.gone[away.argmin()])

    every = (shares_at(roots, number / LIKE_MACS) for number in range(LIKE_MACS + 1))
    return [{curve.root: count(curve, shares[curve.root]) for curve in curves} for shares in every]
