"""INT8 that pays, or none: nodes that measure faster in INT8 get it, the others stay in float."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import onnx
from onnx import ModelProto

from compress.console.wording import counted
from compress.model import Model, OnnxModel
from compress.onnx_export.file import save
from compress.quantize.calibrate import calibrate, trained_ranges
from compress.quantize.faster import Choice, DynamicMixture, Mixture, fastest, times_as_fast, turns
from compress.quantize.int8_onnx import finish, plain
from compress.quantize.precision import operators, precisions
from compress.quantize.put_back import Mixed
from compress.quantize.quantize_onnx import QuantizeOnnx, quantized
from compress.quantize.tied_tables import ties
from compress.quantize.weights_onnx import RECURRENT
from compress.runtime.latency import Ratio
from compress.runtime.machine import machine_of
from compress.stage import Given, Progress

__all__ = ["QuantizeFaster", "left_in_float", "mixture_of"]


@dataclass(frozen=True)
class QuantizeFaster:
    """Quantize what gains from it, as measured here with ONNX Runtime; see `fastest`.

    The result is measured once more, by itself, against the float model: where that leaves doubt, the model stays as
    it was.

    Attributes:
        quantize: how; static or dynamic, for the CPU.
        threads: that the models are measured with.
    """

    quantize: QuantizeOnnx
    threads: int = 1

    name: ClassVar[str] = "quantize_faster"
    takes: ClassVar[type] = OnnxModel
    gives: ClassVar[type] = OnnxModel

    @property
    def options(self) -> Mapping[str, Any]:
        return {**self.quantize.options, "threads": self.threads, "machine": machine_of(self.threads)}

    def check(self, model: Model) -> None:
        self.quantize.check(model)

    @property
    def seen(self) -> tuple[str, ...]:
        """What is to be said of the calibration data."""
        return self.quantize.seen

    def run(self, model: OnnxModel, folder: Path, progress: Progress) -> Given:
        path = folder / "model.onnx"
        original = plain(model.path)
        given = self._tried(self.quantize, model, original, path, progress)
        # Of a recurrent layer, static INT8 leaves the arithmetic in float: what it gains nothing on, dynamic may.
        recurrent = any(node.op_type in RECURRENT for node in original.graph.node)
        if recurrent and self.quantize.mode == "static" and not given.details["layers"]["int8"]:
            dynamic = dataclasses.replace(self.quantize, mode="dynamic", calibration=None)
            return self._tried(dynamic, model, original, path, progress)
        return given

    def _tried(
        self, quantize: QuantizeOnnx, model: OnnxModel, original: ModelProto, path: Path, progress: Progress
    ) -> Given:
        mixture = mixture_of(quantize, model, original, progress)
        choice = fastest(mixture, original, *turns(mixture, original, model, self.threads), progress)
        if len(choice.back) == choice.units:
            return left_in_float(model, path, choice, None)
        finish(mixture.model(choice.back), path, ties(original))
        gain = times_as_fast(model, OnnxModel(path, model.signature), self.threads)
        if gain is None or not gain.faster:
            return left_in_float(model, path, choice, gain)
        given = quantize.given(model, path, progress, exclude=choice.back)
        did = f"{given.did}; {_times(gain)} as fast as in float"
        if choice.back:
            units = counted(choice.units, "nodes")
            did += f", {len(choice.back)} of {units} left in float"
            did += f" ({_times(choice.whole)} with none)" if choice.whole is not None else ""
        return Given(given.model, did, {**given.details, **_details(choice, gain)}, given.warnings)


def mixture_of(options: QuantizeOnnx, model: OnnxModel, original: ModelProto, progress: Progress) -> Mixture:
    """What can be chosen from: calibrated for static INT8.

    Args:
        options: how to quantize.
        model: float32, folded.
        original: the same, as `plain` gives it.
    """
    if options.mode == "dynamic":
        return DynamicMixture(options, original)
    assert options.calibration is not None  # noqa: S101  checked
    ranges = trained_ranges(model) or calibrate(model.path, options.calibration, options.calibrator, progress)
    return Mixed(original, quantized(options, original, ranges), rounds_outputs=True)


def left_in_float(model: OnnxModel, path: Path, choice: Choice, gain: Ratio | None) -> Given:
    """The model as it was, in a file of its own, and why.

    Args:
        gain: of the mixture that was chosen at first; None where none was.
    """
    save(onnx.load(model.path), path)
    floats = precisions(path).floats
    whole = "" if choice.whole is None else f"; {_times(choice.whole)} as fast with all of it in INT8"
    found = f"none of {counted(choice.tried, 'mixtures')}"
    if gain is not None:
        found = f"none of {counted(choice.tried, 'mixtures')} beyond doubt (the best: {_times(gain)} as fast)"
    did = f"nothing: INT8 gains no time here, {found}{whole}" if choice.units else "nothing: it has no layer for INT8"
    details = {"layers": {"int8": 0, "float": len(floats)}, "layers_float": floats, "operators": operators(path)}
    return Given(OnnxModel(path, model.signature), did, {**details, **_details(choice, gain)})


def _details(choice: Choice, gain: Ratio | None) -> dict[str, Any]:
    return {
        "left_in_float": sorted(choice.back),
        "units": choice.units,
        "mixtures": choice.tried,
        "times_as_fast": None if gain is None else gain.value,
        "times_as_fast_all_int8": None if choice.whole is None else choice.whole.value,
    }


def _times(ratio: Ratio) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.2f} times"
    return f"{ratio.value:.2f} times ({ratio.low:.2f} to {ratio.high:.2f})"
