"""Accuracy-aware mixed precision: INT8 everywhere but in the few layers that cost the task too much."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx

from compress.backends import OnnxBackend, open_model
from compress.dataset import Dataset
from compress.errors import BudgetError
from compress.intervals import CONFIDENCE
from compress.judge import Drop, Judge
from compress.measure import cores
from compress.metrics import Metric
from compress.model import Model, OnnxModel, TorchModel
from compress.stages import Given, Progress
from compress.stages.calibrate import calibrate
from compress.stages.precision import LAYERS
from compress.stages.quantize_onnx import QuantizeOnnx, Ranges, quantize

__all__ = ["QuantizeWithin"]

RANKING_SAMPLES = 256
REFINEMENTS = 8


@dataclass(frozen=True)
class QuantizeWithin:
    """Quantize statically; put layers back to float until the drop is inside the limit.

    Each layer alone is put back, the others being INT8, and ranked by how much nearer the outputs come to the
    original's: squared error sees what a few hundred labels can't. The task metric then decides how many of the
    ranking go back, and whether each is really needed. Ranges are calibrated once. What is judged on the data that
    chooses is judged kindly: the report's row is over other samples.

    Attributes:
        quantize: how; static.
        reference: the original model.
        data: to choose by.
        metric: what is judged by.
        max_drop: against the original, in points.
        confidence: of the interval whose upper end is to be inside; None holds the estimate against the limit.
    """

    quantize: QuantizeOnnx
    reference: TorchModel
    data: Dataset
    metric: Metric
    max_drop: float
    confidence: float | None = CONFIDENCE

    name: ClassVar[str] = "quantize_within"
    takes: ClassVar[type] = OnnxModel
    gives: ClassVar[type] = OnnxModel

    @property
    def options(self) -> Mapping[str, Any]:
        return {
            "quantize": dict(self.quantize.options),
            "data": self.data.sha256,
            "metric": self.metric.name,
            "max_drop": self.max_drop,
            "confidence": self.confidence,
        }

    def check(self, model: Model) -> None:
        self.quantize.check(model)

    def run(self, model: OnnxModel, folder: Path, progress: Progress) -> Given:
        assert self.quantize.calibration is not None  # noqa: S101  checked
        ranges = calibrate(model.path, self.quantize.calibration, self.quantize.calibrator, progress)
        original = open_model(self.reference, threads=cores())
        judge = Judge(original, self.data, self.metric, confidence=self.confidence)
        path = folder / "model.onnx"
        whole = self._drop(model, path, ranges, (), judge)
        sensitivity: dict[str, float] = {}
        back: list[str] = []
        drop = whole
        if whole.counted > self.max_drop:
            layers = layer_names(model.path)
            sensitivity = self._ranking(model, path, ranges, layers, progress)
            back, drop = self._put_back(model, path, ranges, list(sensitivity), judge, progress)
            quantize(self.quantize, model.path, path, ranges, back)
        given = self.quantize.given(model, path, progress, exclude=back)
        costs = layer_costs(model.path, back)
        did = f"{given.did}; {drop.points:+.2f} points of {self.metric.name}, at most {self.max_drop:g}"
        if back:
            did += f"; {len(back)} put back to float ({whole.points:+.2f} before)"
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
        return Given(given.model, did=did, details={**given.details, **details}, warnings=given.warnings)

    def _drop(self, model: OnnxModel, path: Path, ranges: Ranges, back: Collection[str], judge: Judge) -> Drop:
        quantize(self.quantize, model.path, path, ranges, back)
        return judge.drop(OnnxBackend(OnnxModel(path, model.signature), cores()))

    def _ranking(
        self, model: OnnxModel, path: Path, ranges: Ranges, layers: Sequence[str], progress: Progress
    ) -> dict[str, float]:
        """By layer, the share of the squared output error that goes when it is in float, largest first."""
        original = open_model(self.reference, threads=cores())
        judge = Judge.of_part(original, self.data, self.metric, RANKING_SAMPLES)

        def error(back: Collection[str]) -> float:
            quantize(self.quantize, model.path, path, ranges, back)
            return judge.squared_error(OnnxBackend(OnnxModel(path, model.signature), cores()))

        everywhere = error(())
        found: dict[str, float] = {}
        for number, layer in enumerate(layers, 1):
            found[layer] = 1 - error((layer,)) / everywhere if everywhere else 0.0
            progress(number, len(layers), f"{layer} in float: {found[layer]:+.1%} of the error gone")
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def _put_back(
        self, model: OnnxModel, path: Path, ranges: Ranges, ranked: Sequence[str], judge: Judge, progress: Progress
    ) -> tuple[list[str], Drop]:
        """The shortest beginning of the ranking that is enough, less those that turn out not to be needed."""
        known: dict[int, Drop] = {}

        def drop(count: int) -> Drop:
            if count not in known:
                known[count] = self._drop(model, path, ranges, ranked[:count], judge)
                progress(count, len(ranked), f"{count} layers in float: {known[count].points:+.2f} points")
            return known[count]

        low, high = 0, 1
        while high < len(ranked) and drop(high).counted > self.max_drop:
            low, high = high, min(2 * high, len(ranked))
        if drop(high).counted > self.max_drop:
            best = min(known.values(), key=lambda found: found.counted)
            floats = judge.drop(OnnxBackend(model, cores()))
            raise BudgetError(
                f"INT8 can't stay inside {self.max_drop:g} points",
                why=f"the nearest loses {best.points:+.2f}, the float model before it {floats.points:+.2f}; "
                f"counted with their intervals {best.counted:+.2f} and {floats.counted:+.2f} ({len(judge)} samples)",
                mend="allow more, try another --calibrator or --int8 qat, or prune less",
            )
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if drop(middle).counted <= self.max_drop else (middle, high)
        back, found = list(ranked[:high]), drop(high)
        for layer in reversed(back[:-1][-REFINEMENTS:]):
            without = [name for name in back if name != layer]
            tried = self._drop(model, path, ranges, without, judge)
            if tried.counted <= self.max_drop:
                back, found = without, tried
        return back, found


def layer_names(path: Path) -> list[str]:
    """The nodes of a float file that have weights."""
    graph = onnx.load(path, load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    return [node.name for node in graph.node if node.op_type in LAYERS and node.input[1] in weights]


def layer_costs(path: Path, names: Collection[str]) -> dict[str, tuple[int, float]]:
    """What a layer costs in float: bytes that INT8 would save, and its share of all weights' elements."""
    graph = onnx.load(path).graph
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in graph.initializer}
    total = sum(sizes.values()) or 1
    return {
        node.name: (3 * sizes[node.input[1]], sizes[node.input[1]] / total) for node in graph.node if node.name in names
    }
