"""Whether two runtimes compute a file alike, of models that `compress measure` has opened on both."""

from __future__ import annotations

import math
from collections.abc import Mapping

from compress.evaluate.runtime_choice import APART, APART_IN_HALF, ROUNDING, distances
from compress.jobs.serving_runtime import exact
from compress.model import Arrays, Model, OnnxModel
from compress.runtime.backends import Backend
from compress.runtime.backends.onnxrt import is_half

__all__ = ["computed_differently"]

HALF = 0.5  # of an output's size (RMS): more is no rounding, of whatever the file was made


def computed_differently(
    models: Mapping[str, Model], on: Mapping[str, Mapping[str, Backend]], inputs: Arrays
) -> dict[str, float]:
    """By name of what ran, how far its answers are from ONNX Runtime's to the same file, where no rounding explains it.

    As an export has it, what a file loses to its float32 file bounds what two runtimes may differ by; the first of the
    models stands for that.

    Args:
        models: by name.
        on: by model, what it was opened on, ONNX Runtime before OpenVINO.
        inputs: one batch.
    """
    first = next(iter(next(iter(on.values())).values()))
    found: dict[str, float] = {}
    for name, model in models.items():
        if not isinstance(model, OnnxModel) or len(on[name]) < 2:
            continue
        (here, believed), *others = on[name].items()
        away = distances({here: believed, "": first, **dict(others)}, here, [inputs])
        for there, _ in others:
            if not away[there] <= _most(model, away[""] if first is not believed else math.inf):
                found[there] = away[there]
    return found


def _most(model: OnnxModel, from_first: float) -> float:
    if exact(model):
        return ROUNDING
    return min(HALF, max(ROUNDING, (APART_IN_HALF if is_half(model.path) else APART) * from_first))
