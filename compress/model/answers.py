"""A few answers of a module to inputs made up for it: what tells at once that it is another than it was."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from compress.model import TorchModel, call, sample_inputs
from compress.model.apart import by_scale
from compress.storage.files_read import FilesRead, files_read

__all__ = ["answers_of", "apart", "read_by"]

Answers = Sequence[Sequence[float | None]]

MOST = 512
"""Values of an output that are kept."""
TOLERANCE = 1e-4
"""Of the largest value: another number of threads rounds otherwise."""


def answers_of(model: TorchModel) -> Answers | None:
    """Values of each output, float32, spread over it, and the mean of its squares; None for each that is not finite.

    None where it can't be run on inputs made up: text, or sizes that it refuses.
    """
    try:
        outputs = _run(model)
    except Exception:  # the user's forward: anything may come out of it
        return None
    found = []
    for output in outputs.values():
        values = output.detach().cpu().reshape(-1).to(torch.float32)
        places = torch.linspace(0, max(len(values) - 1, 0), min(MOST, len(values))).long()
        told = [*values[places].tolist(), float(values.square().mean())]
        found.append([value if np.isfinite(value) else None for value in told])
    return found


def apart(one: Answers, other: Answers) -> bool:
    """Whether answers are of two models, by more than rounding."""
    shapes = [[[value is None for value in output] for output in each] for each in (one, other)]
    if shapes[0] != shapes[1]:
        return True
    for mine, its in zip(one, other, strict=True):
        # The mean of squares is of another scale than the values, and off by twice as much.
        for part, allowed in ((slice(-1), TOLERANCE), (slice(-1, None), 2 * TOLERANCE)):
            a, b = (np.array([value for value in each[part] if value is not None]) for each in (mine, its))
            for scale in by_scale(a):
                sizes = np.maximum(np.abs(a[scale]), np.abs(b[scale]))
                if bool((np.abs(a - b)[scale] > allowed * sizes.max(initial=0)).any()):
                    return True
    return False


def read_by(model: TorchModel) -> FilesRead:
    """What files the forward reads; whatever else it does, such as asking a server, is told as `beyond`."""
    with files_read() as found:
        answers_of(model)
    return found


def _run(model: TorchModel) -> dict[str, torch.Tensor]:
    arrays = sample_inputs(model.signature, 1 if model.signature.singly else 2)
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return call(model.module, model.signature.inputs, arrays)
