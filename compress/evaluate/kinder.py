"""Figures that are kinder than they should be: of samples that a model is made with, or that are copies of others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.data.overlap import DUPLICATES, Overlap, copies, overlaps
from compress.model import OnnxModel, TorchModel
from compress.options import CompressOptions

__all__ = ["copies_told", "made_with", "overlap_told", "overlap_words"]

# What is done with the data of an option: it should have no sample of those that judge.
MADE_WITH = {
    "finetune": "trained on",
    "validation": "kept for its best epoch by",
    "calibration": "calibrated on",
}


def made_with(
    options: CompressOptions, data: Dataset, opened: Mapping[str, str], model: TorchModel | OnnxModel
) -> dict[str, Overlap]:
    """What of the data that a model is made with stands in the evaluation data, by the option's name."""
    asked = [name for name in MADE_WITH if getattr(options, name) is not None]
    same = [name for name in asked if _place(opened[name]) == _place(opened["eval"])]
    whole = Overlap(len(data), len(data), len(data), len(data))
    others = {name: Dataset.open(opened[name], model.signature) for name in asked if name not in same}
    found = dict.fromkeys(same, whole) | (overlaps(data, others) if others else {})
    return {name: found[name] for name in asked if found[name].counts}


def overlap_words(data: Dataset, others: Mapping[str, Dataset]) -> tuple[str, ...]:
    """A warning for each set that a model is made with, by option, and that shares samples with what judges it."""
    found = overlaps(data, others) if others else {}
    return tuple(overlap_told(name, others[name].source, each) for name, each in found.items() if each.counts)


def copies_told(data: Dataset) -> tuple[str, ...]:
    """A warning where more samples than data has doubles of its own are copies: each counts as one of its own."""
    count, looked_at = copies(data)
    if count <= max(1, DUPLICATES * looked_at):
        return ()
    what = "pairs" if data.pairs else "samples"
    found = f"Of {counted(looked_at, f'evaluation {what}')} {count:,} have the inputs of another one"
    return (f"{found}: intervals take each for one of its own, and are narrower than they should be.",)


def _place(source: str) -> str:
    return os.path.realpath(source) if Path(source).exists() else source


def overlap_told(name: str, source: str, found: Overlap) -> str:
    """The warning for one of them."""
    if found.shared == found.samples == found.others:
        where = f"the evaluation data itself (--{name} {source})"
    else:
        where = f"samples that judge it ({found.told} --{name} stand in --eval, too)"
    verb = MADE_WITH.get(name, "trained on")
    return f"The model is {verb} {where}: its figures are kinder than on data that it has not seen."
