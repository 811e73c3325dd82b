"""Samples whose values are so much larger than all others' that a range over all of them holds nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np

from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.data.spread import spread_over

__all__ = ["far_beyond"]

TIMES = 1000.0  # of what nearly all samples reach: 8 bits have 255 steps, of which theirs would be a quarter of one
NEARLY_ALL = 0.9
MADE = 1000  # samples that are made for it
BATCH = 256


def far_beyond(data: Dataset) -> tuple[str, ...]:
    """What a reader should know of lone samples that decide how far an input reaches, a sentence for each input.

    Args:
        data: all of it is read, a batch at a time; of what a user's code makes, at most 1,000 samples from all over.
    """
    places = spread_over(len(data), len(data) if data.fetcher is None else MADE)
    names = [name for name, array in data.inputs.items() if array.dtype.kind == "f"]
    reaches: dict[str, list[float]] = {name: [] for name in names}
    for start in range(0, len(places) if names else 0, BATCH):
        inputs, _ = data.take(places[start : start + BATCH])
        for name in names:
            reaches[name] += np.abs(inputs[name].reshape(len(inputs[name]), -1)).max(axis=1, initial=0.0).tolist()
    return tuple(words for name in names if (words := _told(name, np.array(reaches[name]), places)))


def _told(name: str, reach: np.ndarray[Any, Any], places: np.ndarray[Any, Any]) -> str:
    usual = float(np.quantile(reach, NEARLY_ALL, method="lower"))
    far = np.flatnonzero(reach > TIMES * usual)
    if not usual or not far.size:
        return ""
    first = far[int(reach[far].argmax())]
    which = f"sample {places[first]}" if far.size == 1 else f"{counted(far.size, 'samples')}, as sample {places[first]}"
    return (
        f"Of the calibration data, {which} reaches {reach[first]:.3g} in the input {name!r}, where nearly all stay "
        f"within {usual:.3g}: the range of INT8 is made by that, and leaves them hardly a step. Leave out what is no "
        "typical input."
    )
