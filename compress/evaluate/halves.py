"""Samples that choose and samples that prove: two halves without a common one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.data.overlap import alike
from compress.errors import RecipeError

__all__ = ["halves", "has_ids"]


def halves(data: Dataset) -> tuple[Dataset, Dataset]:
    """Two halves without a common sample: by seed, with as many of each label in both as there can be.

    Samples of the same inputs go into one of them, whatever their labels: what has chosen proves nothing. The seed is
    always 0: another one would be another try, and two commands on the same data share the split.

    Raises:
        RecipeError: there are no two samples that differ.
    """
    if len(data) < 2:
        raise RecipeError(
            "can't choose and prove on one sample",
            why="those that choose a model are kind to it: others have to prove it",
            mend="give a hundred or more evaluation samples",
        )
    groups = alike(data)
    if not groups.any():
        raise RecipeError(
            "can't choose and prove on copies of one sample",
            why=f"the {counted(len(data), 'samples')} of {data.source} have the same inputs",
            mend="give a hundred or more evaluation samples that differ",
        )
    second = _in_second(groups, np.asarray(data.labels) if has_ids(data) else np.zeros(len(data), np.int64))
    return data.part(np.flatnonzero(~second)), data.part(np.flatnonzero(second))


def _in_second(groups: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Which samples [n] go into the second half: the largest groups first, each to where fewer of its label are."""
    order = np.random.default_rng(0).permutation(len(groups))
    order = order[np.argsort(labels[order], kind="stable")]
    sizes, first = np.bincount(groups), np.zeros(len(groups), np.int64)
    first[groups[order[::-1]]] = np.arange(len(order))[::-1]
    order = order[np.lexsort((np.arange(len(order)), first[groups[order]], -sizes[groups[order]]))]
    second = np.zeros(len(groups), np.bool_)
    halves_of: dict[int, bool] = {}
    lead: Counter[int] = Counter()  # of a label, how many more the first half has
    ahead = 0
    for at, group, label in zip(order.tolist(), groups[order].tolist(), labels[order].tolist(), strict=True):
        if group not in halves_of:
            halves_of[group] = (lead[label] or ahead) > 0
        second[at] = halves_of[group]
        step = -1 if second[at] else 1
        lead[label] += step
        ahead += step
    return second


def has_ids(data: Dataset) -> bool:
    """Whether its labels are one class id for each sample."""
    return isinstance(data.labels, np.ndarray) and data.labels.ndim == 1 and data.labels.dtype.kind in "iu"
