"""Which rows of a network's tensors are padding: proven by changing what is fed there, since no shape tells.

What is padding is what no answer hangs on. An input of ones and zeros may be a mask of it, by either of the two; other
numbers are fed where it says padding, and answers are to stay, but for those of padded tokens. Of a tensor, exactly the
rows of padded tokens are to change, in one of the orders (samples, tokens) and (tokens, samples): where its rows were
turned round, others do; a tensor of another sequence does not change at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.model import Arrays

__all__ = ["Padding", "Tokens", "padding_of"]

Array = np.ndarray[Any, Any]
Run = Callable[[Arrays], tuple[Mapping[str, Any], Mapping[str, Any]]]
NAME = "attention_mask"  # by Hugging Face's word 1 is what counts; of no other name is that known
FEW = 256  # samples among which some with padding are looked for
TRIED = 4
ALIKE = 1e-3  # of the largest: what a row may differ by and still be called the same


@dataclass(frozen=True)
class Tokens:
    """How a tensor's rows lie, of which some are padding.

    Attributes:
        mask: the input [samples, tokens] that tells which.
        counts: what it says of a token that counts.
        by_sample: whether samples lead, or tokens.
    """

    mask: str
    counts: bool
    by_sample: bool

    def kept(self, inputs: Mapping[str, Array]) -> Array:
        """Which rows are no padding, bool [samples, tokens] or [tokens, samples]."""
        told = _told(inputs[self.mask], counts=self.counts)
        return told if self.by_sample else told.T


@dataclass
class Padding:
    """What is proven of a model: tensors and outputs, by name, that have rows of padding. All rows of others count."""

    tensors: dict[str, Tokens] = field(default_factory=dict)
    outputs: dict[str, Tokens] = field(default_factory=dict)


def padding_of(run: Run, data: Dataset) -> Padding:
    """What some samples of the data prove.

    Args:
        run: gives for inputs tensors, of which those of vectors can be told, [.., .., width] and [rows, width], and all
            of the model's outputs, of which those can be whose first two dimensions are samples and tokens. By name.
        data: that some samples are taken of.
    """
    found = Padding()
    kinds = {name: (len(array.shape), np.dtype(array.dtype).kind) for name, array in data.inputs.items()}
    masks = [name for name, (dims, kind) in kinds.items() if dims == 2 and kind in "iub"]
    if not masks:
        return found
    some = np.unique(np.linspace(0, len(data) - 1, min(len(data), FEW)).astype(int))
    inputs, _ = data.take(some)
    masks = [name for name in masks if np.isin(inputs[name], (0, 1)).all()]
    for mask in sorted(masks, key=lambda name: name != NAME):
        proofs = [_Proof(run, inputs, masks, mask, counts=True, known=mask == NAME)]
        if not (proofs[0].stands and mask == NAME):
            proofs.append(_Proof(run, inputs, masks, mask, counts=False))
        standing = [proof for proof in proofs if proof.stands]
        if len(standing) == 1:  # by both, nothing tells which of its values is padding
            found.tensors = standing[0].padding.tensors | found.tensors
            found.outputs = standing[0].padding.outputs | found.outputs
    return found


class _Proof:
    """One of a mask's two readings, tried.

    Args:
        run: see `padding_of`.
        inputs: samples.
        masks: inputs of ones and zeros.
        mask: one of them.
        counts: what it says of a token that counts.
        known: whether that is known. If not, it has to be shown that the mask is what hides padded tokens: where it
            says that all count, they change answers. So no halves of a text are taken for it, of which a model that
            looks back alone reads the second for nothing of the first.

    Attributes:
        stands: whether answers are independent of what is fed at padded tokens.
        padding: what has rows of it.
    """

    def __init__(
        self, run: Run, inputs: Arrays, masks: list[str], mask: str, *, counts: bool, known: bool = False
    ) -> None:
        self.stands, self.padding = False, Padding()
        told = _told(inputs[mask], counts=counts)
        padded = _some_padded(told)
        fed = [name for name, array in inputs.items() if name != mask and array.shape[:2] == told.shape]
        alone = len(set(fed) - set(masks)) == 1
        own = [name for name in fed if _padded_alike(inputs[name], told, alone=alone)]
        if not len(padded) or not own:
            return
        one_by_one = [padded[at : at + 1] for at in range(len(padded))]
        for places in ([padded], one_by_one):
            try:
                tried = [_Tried(run, inputs, mask, told, each, own) for each in places]
                if not all(each.stays() and (known or each.hidden()) for each in tried):
                    return
            except StageError:  # it takes one sample at a time
                continue
            self.stands = True
            for kind, found in enumerate((self.padding.tensors, self.padding.outputs)):
                for name in tried[0].names(kind):
                    orders = [each for each in (True, False) if all(t.fits(kind, name, each) for t in tried)]
                    if len(orders) == 1 or (orders and places is one_by_one):  # of one sample, both are the same
                        found[name] = Tokens(mask, counts, orders[0])
            return


class _Tried:
    """What a model gave for some samples, before and after padded tokens were changed."""

    def __init__(self, run: Run, inputs: Arrays, mask: str, told: Array, places: Array, own: list[str]) -> None:
        self._run, self._mask, self.told = run, mask, told[places]
        self._given = {name: array[places] for name, array in inputs.items()}
        self._changed = {name: array.copy() for name, array in self._given.items()}
        random = np.random.default_rng(0)
        for name in own:
            real = inputs[name][told]
            unlike = real[real != inputs[name][~told][0]] if real.ndim == 1 else real
            real = unlike if len(unlike) else real
            self._changed[name][~self.told] = real[random.integers(0, len(real), int((~self.told).sum()))]
        self._first, self._filled = run(self._given), run(self._changed)
        # Another sequence's part in a row: with it changed, a row of padding alone stays.
        others = [name for name, array in inputs.items()
                  if name not in (mask, *own) and array.shape[:2] == told.shape]  # fmt: skip
        rolled = {name: np.ascontiguousarray(np.roll(inputs[name], 1, 0)[places]) for name in others}
        self._rolled = run(self._given | rolled) if others else self._first

    def names(self, kind: int) -> list[str]:
        """Of tensors (0) or outputs (1)."""
        return list(self._first[kind])

    def stays(self) -> bool:
        """Whether answers changed nowhere but at padded tokens, if at all."""
        return bool(self.names(1)) and self._answers_alike(self._first[1], self._filled[1])

    def hidden(self) -> bool:
        """Whether answers would have changed, had the mask said that all tokens count."""
        every = self._given[self._mask].copy()
        every[~self.told] = self._given[self._mask][self.told][0]
        first, second = (self._run(given | {self._mask: every})[1] for given in (self._given, self._changed))
        numbers = all(np.isfinite(value).all() for each in (first, second) for value in each.values())
        return numbers and not self._answers_alike(first, second)

    def fits(self, kind: int, name: str, by_sample: bool) -> bool:
        """Whether in this order exactly rows of padded tokens changed, and those not with another sequence."""
        mask = self.told if by_sample else self.told.T
        runs = (self._first, self._filled, self._rolled)
        first, filled, rolled = (_rows(each[kind].get(name), mask, any_shape=kind == 1) for each in runs)
        if first is None or filled is None or rolled is None:
            return False
        padded = ~mask.reshape(-1)
        return np.array_equal(_changed(first, filled), padded) and not _changed(first, rolled)[padded].any()

    def _answers_alike(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
        return all(self._alike(value, second[name]) for name, value in first.items())

    def _alike(self, first: Any, second: Any) -> bool:
        if not isinstance(first, np.ndarray) or first.shape != second.shape:
            return False
        if not _changed(first.reshape(1, -1), second.reshape(1, -1)).any():
            return True
        for mask in (self.told, self.told.T):
            rows, others = (_rows(each, mask, any_shape=True) for each in (first, second))
            if rows is not None and others is not None and not _changed(rows, others)[mask.reshape(-1)].any():
                return True
        return False


def _told(mask: Array, *, counts: bool) -> Array:
    told: Array = mask.astype(bool) == counts
    return told


def _some_padded(told: Array) -> Array:
    """Places of some samples that have padding and others, those that have it elsewhere first."""
    padded = np.flatnonzero((~told).any(1) & told.any(1))
    _, unlike = np.unique(told[padded], axis=0, return_index=True)
    order = np.concatenate([np.sort(unlike), np.setdiff1d(np.arange(len(padded)), unlike)]).astype(int)
    found: Array = padded[order][:TRIED]
    return found


def _padded_alike(array: Array, told: Array, *, alone: bool) -> bool:
    """Whether an input may be of the mask's sequence: ids have one value wherever it says padding.

    So have numbers, where there are several sequences that they could be of.
    """
    behind = array[~told]
    return bool(len(behind)) and ((alone and array.dtype.kind == "f") or bool((behind == behind[:1]).all()))


def _rows(array: Any, mask: Array, *, any_shape: bool) -> Array | None:
    """A tensor by the rows of a mask in its order; None where it does not lie so."""
    if not isinstance(array, np.ndarray) or not array.ndim:
        return None
    lies = array.shape[:2] == mask.shape and (any_shape or array.ndim == 3)
    flat = array.ndim == 2 and len(array) == mask.size
    return array.reshape(mask.size, -1) if lies or flat else None


def _changed(first: Array, second: Array) -> Array:
    """Which rows did, bool [rows]."""
    if first.dtype.kind != "f":
        differ: Array = (first != second).any(1)
        return differ
    if not first.size:
        return np.zeros(len(first), bool)
    near = np.abs(first - second) <= ALIKE * float(np.abs(first).max())
    return ~near.all(1)  # type: ignore[no-any-return]
