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
    always 0: another one would be another try, and two commands on the same data share the split. Of pairs none is
    parted, and a sample may be in both halves, beside another.

    Raises:
        RecipeError: there are no two samples that differ, or the model takes all of them at once.
    """
    if data.call > 1:
        raise RecipeError(
            "can't choose and prove on the samples of one call",
            why=f"the model takes {counted(data.call, 'samples')} at once, no fewer: a half is no input of it",
            mend="save the model with an input whose batch varies, as in x:float32[batch,8]",
        )
    if len(data) < 2:
        raise RecipeError(
            "can't choose and prove on one sample",
            why="those that choose a model are kind to it: others have to prove it",
            mend="give a hundred or more evaluation samples",
        )
    groups = _of_pairs(alike(data)) if data.pairs else alike(data)
    if not groups.any():
        raise RecipeError(
            "can't choose and prove on copies of one sample",
            why=f"the {counted(len(data), 'samples')} of {data.source} have the same inputs",
            mend="give a hundred or more evaluation samples that differ",
        )
    second = _in_second(groups, np.asarray(data.labels) if has_ids(data) else np.zeros(len(groups), np.int64))
    parts = np.flatnonzero(~second), np.flatnonzero(second)
    first, last = (data.part(data.whole_pairs(part) if data.pairs else part) for part in parts)
    return first, last


def _of_pairs(groups: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers of pairs [n], the same for those of the same two samples, whichever is first. One text may be in many."""
    _, found = np.unique(np.sort(groups.reshape(-1, 2), axis=1), axis=0, return_inverse=True)
    return np.asarray(found.reshape(-1))


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
