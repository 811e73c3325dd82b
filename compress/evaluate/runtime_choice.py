"""Which runtime serves a finished file: the faster one, if it computes the file as the other does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from compress.artifact import RUNTIME_NAMES, Runtime
from compress.errors import ToolkitError
from compress.model import Arrays
from compress.model.apart import by_scale
from compress.runtime.backends import Backend
from compress.runtime.latency import Ratio

__all__ = ["BATCHED", "Choice", "RuntimeFigures", "choose", "distances", "most_apart"]

BATCHED = 8  # samples in a call, at which the runtimes are timed once more: a server may join requests to batches
# Two runtimes sum in other orders. What that does to float32 stays under this, as a share of an output's size (RMS).
ROUNDING = 1e-3
# Two roundings of one network, each as far from it as the other, are at most twice that apart.
APART = 2.0
# In half precision one computes between two roundings what the other rounds, too: a MobileNet in BF16 is 1.5 times as
# far from its float32 file on OpenVINO as on ONNX Runtime, and the two up to 2.2 times that apart.
APART_IN_HALF = 4.0
HALF = 0.5  # of an output's size (RMS): more is no rounding, whatever the file loses by it


@dataclass(frozen=True)
class RuntimeFigures:
    """The finished file on one runtime; None is "not measured".

    Attributes:
        runtime: which.
        p50_ms: at batch 1; `p50_low_ms` and `p50_high_ms` bound its 95% interval.
        value, drop, drop_high: of the metric, where there is data.
        difference: RMS of its outputs minus ONNX Runtime's, as a share of theirs.
    """

    runtime: Runtime
    p50_ms: float | None = None
    p50_low_ms: float | None = None
    p50_high_ms: float | None = None
    value: float | None = None
    drop: float | None = None
    drop_high: float | None = None
    difference: float | None = None


@dataclass(frozen=True)
class Choice:
    """What serves the file, and why.

    Attributes:
        runtime: the one that is chosen.
        why: in one sentence.
        figures: of both, ONNX Runtime's first; of the one alone, where the other can't run here.
        speedup: how many times as fast as ONNX Runtime OpenVINO is, paired by round; what the choice is made by.
        batched: the same at batch 8, where that was timed: it is told where it says otherwise, and chooses nothing.
        most_apart: the largest `difference` that is taken for rounding.
        compared: by dimension that varies, the sizes that both were compared at.
        doubtful: whether OpenVINO can't run the file, or computes it differently.
    """

    runtime: Runtime
    why: str = ""
    figures: tuple[RuntimeFigures, ...] = ()
    speedup: Ratio | None = None
    batched: Ratio | None = None
    most_apart: float | None = None
    compared: Mapping[str, Sequence[int]] = field(default_factory=dict)
    doubtful: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: an infinite difference is null."""
        told = asdict(self)
        for row in told["figures"]:
            row["difference"] = _finite(row["difference"])
        return told


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def choose(
    figures: tuple[RuntimeFigures, RuntimeFigures],
    speedup: Ratio | None,
    quantized: float,
    *,
    at: str,
    batched: Ratio | None = None,
    keeps: tuple[bool, bool] = (True, True),
    worse: bool = False,
    half: bool = False,
) -> Choice:
    """The faster runtime that keeps the accuracy; within noise, ONNX Runtime.

    Args:
        figures: ONNX Runtime's and OpenVINO's.
        speedup: of OpenVINO over ONNX Runtime.
        quantized: how far the file is from the float32 file before it, both on ONNX Runtime, as `difference` has it; 0
            for a float32 file.
        at: what the speedup was measured at, "at batch 1 with 1 thread".
        batched: the speedup at batch 8.
        keeps: whether each keeps the budget.
        worse: whether OpenVINO's metric is below ONNX Runtime's beyond doubt.
        half: whether the file is in half precision, which each runtime rounds to at other places.
    """
    difference = figures[1].difference or 0.0
    most = most_apart(quantized, half=half)
    apart = not difference <= most
    if apart:
        far = f"its outputs are {difference:.2g} of their size from ONNX Runtime's, and rounding explains {most:.2g}"
        far = far if math.isfinite(difference) else "it gives no numbers where ONNX Runtime gives some"
        why = f"OpenVINO computes the file differently: {far}. ONNX Runtime serves it."
        return Choice("onnxruntime", why, figures, speedup, batched, most, doubtful=True)
    if figures[0].p50_ms is None and figures[1].p50_ms is not None and keeps[1] and not worse:
        why = "ONNX Runtime only emulates the file's BF16 on this CPU: OpenVINO serves it."
        return Choice("openvino", why, figures, speedup, batched, most)
    told = _told(speedup, at)
    if worse or (keeps[0] and not keeps[1]):
        lost = "loses more of the metric" if worse else "does not keep the largest drop"
        return Choice(
            "onnxruntime", f"OpenVINO {lost}, and is not taken: it is {told}.", figures, speedup, batched, most
        )
    chosen: Runtime = "openvino" if speedup is not None and speedup.faster else "onnxruntime"
    why = f"On this machine OpenVINO is {told}: {RUNTIME_NAMES[chosen]} serves it."
    return Choice(chosen, why + _turned(chosen, batched), figures, speedup, batched, most)


def most_apart(quantized: float, *, half: bool) -> float:
    """The largest difference that is taken for rounding.

    Args:
        quantized: see `choose`.
        half: whether the file is in half precision.
    """
    return max(ROUNDING, min(HALF, (APART_IN_HALF if half else APART) * quantized))


def _told(speedup: Ratio | None, at: str) -> str:
    if speedup is None:
        return "not timed beside ONNX Runtime"
    if speedup.low is None or speedup.high is None:
        return f"{speedup.value:.2f} times as fast as ONNX Runtime {at}, after too few rounds to tell"
    interval = f"{speedup.low:.2f} to {speedup.high:.2f}"
    noise = "" if speedup.faster or speedup.slower else ", within noise"
    return f"{speedup.value:.2f} times as fast as ONNX Runtime ({interval}{noise}) {at}"


def _turned(chosen: Runtime, batched: Ratio | None) -> str:
    """A sentence more, where at a larger batch the other runtime is faster beyond doubt; else nothing."""
    if batched is None or not (batched.slower if chosen == "openvino" else batched.faster):
        return ""
    other = "onnxruntime" if chosen == "openvino" else "openvino"
    return (
        f" At batch {BATCHED} it is {batched.value:.2f} times as fast ({batched.low:.2f} to {batched.high:.2f}): for a "
        f"server that joins requests to batches, give --runtime {other}."
    )


def distances(models: Mapping[str, Backend], reference: str, batches: Sequence[Arrays]) -> dict[str, float]:
    """How far each model's outputs are from the reference's: RMS of the difference over RMS of the reference.

    Of several outputs the largest counts, and of values far above the rest and that rest, as of a mask's fills and
    scores; of integers, the share that differ. NaN where the reference has none, an output that is missing or of
    another shape, and a batch that a model refuses, are infinitely far. What the reference refuses is left out.

    Args:
        models: by name; the reference among them.
        reference: its name.
        batches: inputs.
    """
    sums: dict[str, dict[tuple[str, int], list[float]]] = {name: {} for name in models if name != reference}
    for inputs in batches:
        try:
            expected = models[reference].infer(inputs)
        except ToolkitError:
            continue
        for name, by_output in sums.items():
            try:
                got = models[name].infer(inputs)
            except ToolkitError:
                got = {}
            for output, want in expected.items():
                for part, (error, size) in enumerate(_squares(want, got.get(output))):
                    held = by_output.setdefault((output, part), [0.0, 0.0])
                    held[0] += error
                    held[1] += size
    return {
        name: max((_share(error, size) for error, size in by_output.values()), default=0.0)
        for name, by_output in sums.items()
    }


def _squares(want: np.ndarray[Any, Any], got: np.ndarray[Any, Any] | None) -> list[tuple[float, float]]:
    """Sums of the differences' squares and of those expected; of what is far above the rest, such as fills, apart."""
    if got is None or got.shape != want.shape:
        return [(math.inf, 1.0)]
    if want.dtype.kind != "f":
        return [(float((want != got).sum()), float(want.size))]
    x, y = want.astype(np.float64), got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.square(x - y))
    error, sizes = np.nan_to_num(error, nan=np.inf), np.square(np.where(np.isfinite(x), x, 0.0))
    return [(float(error[part].sum()), float(sizes[part].sum())) for part in by_scale(x)]


def _share(error: float, size: float) -> float:
    if error == 0.0:
        return 0.0
    return math.sqrt(error / size) if size else math.inf
