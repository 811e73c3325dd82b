"""Accuracy-aware mixed precision: INT8 everywhere but in the few nodes that cost the task too much."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx

from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.errors import BudgetError
from compress.evaluate.gains import drop_told
from compress.evaluate.intervals import CONFIDENCE
from compress.evaluate.judge import Budget, Drop, Judge
from compress.evaluate.metrics import Metric
from compress.model import Model, OnnxModel, TorchModel
from compress.onnx_export.file import save
from compress.quantize.calibrate import calibrate, trained_ranges
from compress.quantize.faster import fastest, times_as_fast, turns
from compress.quantize.int8_onnx import finish, plain
from compress.quantize.put_back import Mixed
from compress.quantize.quantize_faster import left_in_float
from compress.quantize.quantize_onnx import QuantizeOnnx, quantized
from compress.quantize.shield import shield
from compress.quantize.tied_tables import ties
from compress.runtime.backends import OnnxBackend, open_model
from compress.runtime.machine import machine_of
from compress.runtime.measure import cores
from compress.stage import Given, Progress

__all__ = ["QuantizeWithin"]

RANKING_SAMPLES = 256
REFINEMENTS = 8


@dataclass(frozen=True)
class QuantizeWithin:
    """Quantize statically; put nodes back to float until the drop is inside the limit.

    Each node that computes in 8 bits, additions and normalizations included, is put back alone, the others being INT8,
    and ranked by how much nearer the outputs come to the original's: squared error sees what a few hundred labels
    can't. The task metric then decides how many of the ranking go back, and whether each is really needed; with all
    of them back, the model is the float one. The model is quantized once: putting back takes Q/DQ nodes away (see
    `Mixed`). What is judged on the data that chooses is judged kindly: the report's row is over other samples.

    Attributes:
        quantize: how; static.
        reference: the original model.
        data: to choose by.
        metric: what is judged by.
        max_drop: against the original, in points.
        confidence: of the interval whose upper end is to be inside; None holds the estimate against the limit.
        faster: threads to measure with, where nodes that gain no time stay in float from the beginning (`fastest`).
    """

    quantize: QuantizeOnnx
    reference: TorchModel | OnnxModel
    data: Dataset
    metric: Metric
    max_drop: float
    confidence: float | None = CONFIDENCE
    faster: int | None = None

    name: ClassVar[str] = "quantize_within"
    takes: ClassVar[type] = OnnxModel
    gives: ClassVar[type] = OnnxModel

    @property
    def options(self) -> Mapping[str, Any]:
        options: dict[str, Any] = {
            "target": self.quantize.target,
            "quantize": dict(self.quantize.options),
            "data": self.data.sha256,
            "metric": dict(self.metric.identity),
            "max_drop": self.max_drop,
            "confidence": self.confidence,
        }
        if self.faster is not None:
            options |= {"threads": self.faster, "machine": machine_of(self.faster)}
        return options

    def check(self, model: Model) -> None:
        self.quantize.check(model)

    @property
    def seen(self) -> tuple[str, ...]:
        """What is to be said of the calibration data."""
        return self.quantize.seen

    def run(self, model: OnnxModel, folder: Path, progress: Progress) -> Given:
        assert self.quantize.calibration is not None  # noqa: S101  checked
        ranges = trained_ranges(model) or calibrate(
            model.path, self.quantize.calibration, self.quantize.calibrator, progress
        )
        original = plain(model.path)
        mixed = Mixed(
            original, quantized(self.quantize, original, ranges), rounds_outputs=self.quantize.target == "cpu"
        )
        path = folder / "model.onnx"
        choice = None
        if self.faster is not None:
            choice = fastest(mixed, original, *turns(mixed, original, model, self.faster), progress)
        if choice is not None and len(choice.back) == choice.units:
            return left_in_float(model, path, choice, None)
        slow = frozenset() if choice is None else choice.back
        tried = _Tried(mixed, OnnxModel(path, model.signature), slow)
        judge = Judge(open_model(self.reference, threads=cores()), self.data, self.metric, confidence=self.confidence)
        whole = judge.drop(tried(()))
        sensitivity: dict[str, float] = {}
        back: list[str] = []
        drop = whole
        if not self._kept(whole):
            sensitivity = self._ranking(tried, progress)
            back, drop = self._put_back(model, tried, list(sensitivity), judge, progress)
        finish(mixed.model({*back, *slow}), path, ties(original), integers=self.quantize.target != "tensorrt")
        gain = None
        if choice is not None and self.faster is not None:
            gain = times_as_fast(model, OnnxModel(path, model.signature), self.faster)
            if gain is None or not gain.faster:
                return left_in_float(model, path, choice, gain)
        given = self.quantize.given(model, path, progress, exclude={*back, *slow})
        costs = node_costs(original, back)
        metric = self.metric.name
        did = f"{given.did}; {drop_told(drop.points, metric=metric)} of {metric}, at most {self.max_drop:g}"
        if back:
            did += f"; {len(back)} put back to float ({drop_told(whole.points, metric=metric)} before)"
        if gain is not None:
            did += f"; {len(slow)} left in float for speed, {gain.value:.2f} times as fast as in float"
        details = {
            "max_drop": self.max_drop,
            "drop_all_int8": whole.points,
            "drop": drop.points,
            "samples": len(self.data),
            "put_back": {
                name: {"error_share": sensitivity[name], "bytes": costs[name][0], "weights_share": costs[name][1]}
                for name in back
            },
            "sensitivity": sensitivity,
        }
        if gain is not None:
            details |= {"left_in_float": sorted(slow), "times_as_fast": gain.value}
        return Given(given.model, did=did, details={**given.details, **details}, warnings=given.warnings)

    def _kept(self, drop: Drop) -> bool:
        """Whether a drop is inside the limit: the one place that decides."""
        return drop.counted <= self.max_drop

    def _ranking(self, tried: _Tried, progress: Progress) -> dict[str, float]:
        """By node, the share of the squared output error that goes when it is in float, largest first."""
        original = open_model(self.reference, threads=cores())
        judge = Judge.of_part(original, self.data, self.metric, RANKING_SAMPLES)
        everywhere = judge.squared_error(tried(()))
        found: dict[str, float] = {}
        for number, unit in enumerate(tried.units, 1):
            found[unit] = 1 - judge.squared_error(tried((unit,))) / everywhere if everywhere else 0.0
            progress(number, len(tried.units), f"{unit} in float: {found[unit]:+.1%} of the error gone")
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def _put_back(
        self, model: OnnxModel, tried: _Tried, ranked: Sequence[str], judge: Judge, progress: Progress
    ) -> tuple[list[str], Drop]:
        """The shortest beginning of the ranking that is enough, less those that turn out not to be needed."""
        known: dict[int, Drop] = {}

        def drop(count: int) -> Drop:
            if count not in known:
                known[count] = judge.drop(tried(ranked[:count]))
                told = drop_told(known[count].points, metric=self.metric.name)
                progress(count, len(ranked), f"{counted(count, 'nodes')} in float: {told}")
            return known[count]

        low, high = 0, min(1, len(ranked))
        while high < len(ranked) and not self._kept(drop(high)):
            low, high = high, min(2 * high, len(ranked))
        if not self._kept(drop(high)):
            best = min(known.values(), key=lambda found: (found.counted, found.points))
            floats = judge.drop(OnnxBackend(model, cores()))
            what, mend = "INT8", "allow more, try another --calibrator or --int8 qat, or prune less"
            if not self._kept(floats):
                what, mend = "the model, before INT8,", "allow more, prune less, or recover longer (--epochs)"
            budget = Budget(self.max_drop, self.confidence).beside(judge.constant)
            nothing = any(budget.lost_all(found.points) for found in known.values())
            nearest, before = (budget.words(each.points, each.high) for each in (best, floats))
            same = f"; an answer that looks at nothing loses {budget.constant:.4g}" if nothing else ""
            raise BudgetError(
                f"{what} can't stay inside {counted(self.max_drop, 'points')}",
                why=f"the drop of the nearest is {nearest}; that of the float model before it is {before} "
                f"({counted(len(judge), 'samples')}{same})",
                mend=mend,
            )
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._kept(drop(middle)) else (middle, high)
        back, found = list(ranked[:high]), drop(high)
        for unit in reversed(back[:-1][-REFINEMENTS:]):
            without = [name for name in back if name != unit]
            less = judge.drop(tried(without))
            if self._kept(less):
                back, found = without, less
        return back, found


class _Tried:
    """Mixtures as models that run, one at a time in the same file."""

    def __init__(self, mixed: Mixed, model: OnnxModel, floats: Collection[str]) -> None:
        self._mixed, self._model, self._floats = mixed, model, floats
        self.units = [name for name in mixed.units if name not in floats]

    def __call__(self, back: Collection[str]) -> OnnxBackend:
        mixed = self._mixed.model({*back, *self._floats})
        shield(mixed)
        save(mixed, self._model.path)
        return OnnxBackend(self._model, cores())


def node_costs(model: onnx.ModelProto, names: Collection[str]) -> dict[str, tuple[int, float]]:
    """What a node costs in float: bytes that INT8 would save, and its share of all weights' elements."""
    graph = model.graph
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in graph.initializer}
    total = sum(sizes.values()) or 1
    matrices = {tensor.name for tensor in graph.initializer if len(tensor.dims) >= 2}
    own = {node.name: sum(sizes[name] for name in {*node.input} & matrices) for node in graph.node}
    return {name: (3 * own[name], own[name] / total) for name in names}
