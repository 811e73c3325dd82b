"""F1 of a class for each token: of whole entities, where the classes are named so, or of the tokens themselves.

F1 of all samples together is no mean of their scores; each sample is given one that is, the F1 and the sample's
influence on it, so that intervals of a mean are its intervals: it is a ratio of sums, 2 right / (given + there).
Entities are those of conlleval (Tjong Kim Sang & Buchholz, CoNLL-2000), as seqeval has them where it is not strict.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from compress.model import Arrays

__all__ = ["OUTSIDE", "TagF1", "are_entities"]

Array = np.ndarray[Any, Any]
OUTSIDE = "O"
_PART = re.compile(r"([BIES])-(.+)")


def are_entities(names: Sequence[str]) -> bool:
    """Whether classes are parts of entities: B-PER, I-PER, O."""
    return any(_PART.fullmatch(name) for name in names) and all(n == OUTSIDE or _PART.fullmatch(n) for n in names)


class TagF1:
    """Scores [n] of samples whose mean is the F1 of all; a token counts if its label is a class of the model.

    An answer of logits that are no numbers, or all the same, is none. It serves as `Accumulator` and as `Chance`.

    Args:
        names: of the classes by number; the one called O is no entity, and a token of it counts for nothing where it is
            given as that.
        entities: whether whole entities count, else tokens.
        axis: of the classes, in the output.
        output: that is judged; None is the first.
    """

    def __init__(self, names: Sequence[str], axis: int, output: str | None = None, *, entities: bool) -> None:
        self._names, self._axis, self._output, self._entities = [*names], axis, output, entities
        self._counts: list[tuple[int, int, int]] = []  # of a sample: right, given, there
        self._words = 0
        self._alone: dict[str, int] = {}  # of what there is: how much a class that is always given would hit

    def update(self, outputs: Arrays, labels: Array | None) -> None:
        """Take a batch."""
        values = next(iter(outputs.values())) if self._output is None else outputs[self._output]
        logits = np.moveaxis(values, self._axis, -1)
        answers = np.isfinite(logits.max(-1)) & (logits != logits[..., :1]).any(-1)
        given = np.where(answers, logits.argmax(-1), logits.shape[-1])
        names = [*self._names, *(f"LABEL_{at}" for at in range(len(self._names), logits.shape[-1])), OUTSIDE]
        for mine, wanted in zip(given, np.asarray(labels), strict=True):
            known = (wanted >= 0) & (wanted < logits.shape[-1])
            there, found = ([names[at] for at in each[known].tolist()] for each in (wanted, mine))
            truth, told = set(self._parts(there)), set(self._parts(found))
            self._counts.append((len(truth & told), len(told), len(truth)))
            self._words += len(there)
            for start, end, kind in truth:
                if end == start + 1:
                    self._alone[kind] = self._alone.get(kind, 0) + 1

    def _parts(self, tags: Sequence[str]) -> Iterator[tuple[int, int, str]]:
        return _entities(tags) if self._entities else (
            (at, at + 1, tag) for at, tag in enumerate(tags) if tag != OUTSIDE
        )  # fmt: skip

    def compute(self) -> Array:
        """Scores [n], 0 to 1 in the mean."""
        right, given, there = np.asarray(self._counts, np.float64).reshape(-1, 3).T
        sizes = given + there
        if not sizes.any():
            return np.ones(len(right))
        value = 2 * right.sum() / sizes.sum()
        return np.asarray(value + (2 * right - value * sizes) / sizes.mean())

    def add(self, outputs: Arrays, labels: Array | None) -> None:
        """Take a batch: see `compress.evaluate.chance.Chance`."""
        if labels is not None:
            self.update(outputs, labels)

    def doubt(self, low: float | None, told: str) -> str | None:
        """See `compress.evaluate.chance.Chance`."""
        if not any(there for _, _, there in self._counts):
            return "No token of the evaluation data has a label that counts: nothing can be found, rightly or not."
        rate = self.rate()
        if low is None or low > rate:
            return None
        whoever = f"whoever always gives the class that fits best has {rate:.1%}"
        return f"The original is no better than chance on the evaluation data: {told}, and {whoever}."

    def rate(self) -> float:
        """See `compress.evaluate.chance.Chance`."""
        there = sum(each[2] for each in self._counts)
        return 2 * max(self._alone.values(), default=0) / max(self._words + there, 1)


def _entities(tags: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Where each begins and ends, and what it is."""
    begun, before, kind = 0, OUTSIDE, ""
    for at, tag in enumerate((*tags, OUTSIDE)):
        found = _PART.fullmatch(tag)
        part, named = (found[1], found[2]) if found else (OUTSIDE, "")
        goes_on = part in "IE" and before in "BI" and named == kind
        if before != OUTSIDE and not goes_on:
            yield begun, at, kind
        if not goes_on:
            begun = at
        before, kind = part, named
