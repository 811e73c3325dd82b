"""Which rows of a network's tensors are padding: proven by changing what is fed there, since no shape tells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.model import Arrays

__all__ = ["padding_orders"]

Array = np.ndarray[Any, Any]
Run = Callable[[Arrays], Mapping[str, Any]]
FEW = 256  # samples among which some with padding are looked for
TRIED = 4
ALIKE = 1e-3  # of the largest: what a row may differ by and still be called the same


def padding_orders(run: Run, names: Iterable[str], outputs: Iterable[str], data: Dataset, mask: str) -> dict[str, bool]:
    """Of tensors whose rows at padded tokens are padding: whether samples lead (True), or tokens.

    Other numbers are fed at padded tokens. Answers must stay, but for those of padded tokens, and of a tensor exactly
    the rows of padded tokens must change. Where the input is another sequence's, answers change; where a tensor's rows
    were turned round, others do; a tensor of another sequence does not change at all.

    Args:
        run: gives all tensors and outputs for inputs.
        names: tensors, floating point, of which those [.., .., width] and [rows, width] can be told.
        outputs: of the model.
        data: that some samples are taken of.
        mask: the input [samples, tokens] that is 1 for what counts.
    """
    names, outputs = list(names), list(outputs)
    some = np.unique(np.linspace(0, len(data) - 1, min(len(data), FEW)).astype(int))
    inputs, _ = data.take(some)
    told = inputs[mask].astype(bool)
    padded = np.flatnonzero((~told).any(1) & told.any(1))[:TRIED]
    fed = [name for name, array in inputs.items() if name != mask and array.shape[:2] == told.shape]
    own = [name for name in fed if _padded_alike(inputs[name], told, alone=len(fed) == 1)]
    if not len(padded) or not own:
        return {}
    others = [name for name in fed if name not in own]
    one_by_one = [padded[at : at + 1] for at in range(len(padded))]
    for batches in ([padded], one_by_one):
        try:
            tried = [_Tried(run, inputs, told, batch, own, others) for batch in batches]
        except StageError:  # it takes one sample at a time
            continue
        if not all(each.answers_stay(name) for each in tried for name in outputs):
            return {}
        found = {name: [order for order in (True, False) if all(t.fits(name, order) for t in tried)] for name in names}
        single = batches is one_by_one
        return {name: orders[0] for name, orders in found.items() if len(orders) == 1 or (orders and single)}
    return {}


def _padded_alike(array: Array, told: Array, *, alone: bool) -> bool:
    """Whether an input may be of the mask's sequence: ids have one value wherever it says padding.

    So have numbers, where there are several sequences that they could be of.
    """
    behind = array[~told]
    return bool(len(behind)) and ((alone and array.dtype.kind == "f") or bool((behind == behind[:1]).all()))


class _Tried:
    """What a model gave for some samples before and after."""

    def __init__(self, run: Run, inputs: Arrays, told: Array, places: Array, own: list[str], others: list[str]) -> None:
        self.told = told[places]
        given = {name: array[places] for name, array in inputs.items()}
        self.first = run(given)
        filled = {name: array.copy() for name, array in given.items()}
        random = np.random.default_rng(0)
        for name in own:
            real = inputs[name][told]
            filled[name][~self.told] = real[random.integers(0, len(real), int((~self.told).sum()))]
        self.filled = run(filled)
        # Another sequence's part in a row: with it changed, a row of padding alone stays.
        rolled = {name: np.ascontiguousarray(np.roll(inputs[name], 1, 0)[places]) for name in others}
        self.rolled = run(given | rolled) if others else self.first

    def answers_stay(self, name: str) -> bool:
        """Whether an output changed nowhere but at padded tokens, if at all."""
        first, second = self.first[name], self.filled[name]
        if not isinstance(first, np.ndarray) or first.shape != second.shape:
            return False
        if not _changed(first.reshape(1, -1), second.reshape(1, -1)).any():
            return True
        for mask in (self.told, self.told.T):
            if first.shape[:2] == mask.shape or (first.ndim == 2 and len(first) == mask.size):
                rows = mask.size, first.size // mask.size
                if not _changed(first.reshape(rows), second.reshape(rows))[mask.reshape(-1)].any():
                    return True
        return False

    def fits(self, name: str, by_sample: bool) -> bool:
        """Whether in this order exactly rows of padded tokens changed, and those not with another sequence."""
        first = self.first[name]
        mask = self.told if by_sample else self.told.T
        if not (first.shape[:2] == mask.shape and first.ndim == 3) and not (
            first.ndim == 2 and len(first) == mask.size
        ):
            return False
        flat, filled, rolled = (each[name].reshape(mask.size, -1) for each in (self.first, self.filled, self.rolled))
        if not np.array_equal(_changed(flat, filled), ~mask.reshape(-1)):
            return False
        return not _changed(flat, rolled)[~mask.reshape(-1)].any()


def _changed(first: Array, second: Array) -> Array:
    """Which rows did, bool [rows]."""
    if first.dtype.kind != "f":
        differ: Array = (first != second).any(1)
        return differ
    if not first.size:
        return np.zeros(len(first), bool)
    near = np.abs(first - second) <= ALIKE * float(np.abs(first).max())
    return ~near.all(1)  # type: ignore[no-any-return]
