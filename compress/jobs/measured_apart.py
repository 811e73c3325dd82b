"""Whether two runtimes compute a file alike, of models that `compress measure` has opened on both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from compress.data.dataset import Dataset
from compress.evaluate.runtime_choice import ROUNDING, distances, most_apart
from compress.jobs.compared_inputs import inputs_beyond
from compress.jobs.serving_runtime import exact
from compress.model import Arrays, Model, OnnxModel
from compress.runtime.backends import Backend
from compress.runtime.backends.onnxrt import is_half
from compress.signature import Signature

__all__ = ["beyond", "computed_differently"]


def computed_differently(
    models: Mapping[str, Model], on: Mapping[str, Mapping[str, Backend]], groups: Sequence[Sequence[Arrays]]
) -> dict[str, float]:
    """By name of what ran, how far its answers are from ONNX Runtime's to the same file, where no rounding explains it.

    As an export has it, what a file loses to its float32 file bounds what two runtimes may differ by; the first of the
    models stands for that.

    Args:
        models: by name.
        on: by model, what it was opened on, ONNX Runtime before OpenVINO.
        groups: of inputs, of which each is looked at by itself.
    """
    first = next(iter(next(iter(on.values())).values()))
    found: dict[str, float] = {}
    for name, model in models.items():
        if not isinstance(model, OnnxModel) or len(on[name]) < 2:
            continue
        (here, believed), *others = on[name].items()
        for batches in groups:
            away = distances({here: believed, "": first, **dict(others)}, here, batches)
            for there, _ in others:
                if not away[there] <= _most(model, away[""] if first is not believed else math.inf):
                    found[there] = max(away[there], found.get(there, 0.0))
    return found


def _most(model: OnnxModel, from_first: float) -> float:
    if exact(model):
        return ROUNDING
    return most_apart(from_first, half=is_half(model.path))


def beyond(signature: Signature, data: Dataset | None, on: Mapping[str, Mapping[str, Backend]]) -> list[Arrays]:
    """One sample with more of what varies, see `inputs_beyond`, where a model was opened on two runtimes."""
    for each in on.values():
        here, *others = each.values()
        if others:
            return [*inputs_beyond(data, signature, here, others[0])]
    return []
