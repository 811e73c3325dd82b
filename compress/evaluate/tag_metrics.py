"""F1 of a class for each token: of whole entities, where the classes are named so, or of the tokens themselves.

F1 of all samples together is no mean of their scores; each sample is given one that is, the F1 and the sample's
influence on it, so that intervals of a mean are its intervals: it is a ratio of sums, 2 right / (given + there).
Entities are those of conlleval (Tjong Kim Sang & Buchholz, CoNLL-2000), as seqeval has them where it is not strict.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from compress.evaluate.chance import no_better
from compress.evaluate.influences import Influences, unseen
from compress.model import Arrays

__all__ = ["OUTSIDE", "TagF1", "are_entities", "f1_scores"]

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
        self._words = self._rows = 0
        self._classes: list[str] = []
        # Of what there is: how much a class that is always given would hit, by whether all of it is one.
        self._alone: Counter[tuple[str, bool]] = Counter()

    def update(self, outputs: Arrays, labels: Array | None) -> None:
        """Take a batch."""
        values = next(iter(outputs.values())) if self._output is None else outputs[self._output]
        logits = np.moveaxis(values, self._axis, -1)
        answers = np.isfinite(logits.max(-1)) & (logits != logits[..., :1]).any(-1)
        given = np.where(answers, logits.argmax(-1), logits.shape[-1])
        names = [*self._names, *(f"LABEL_{at}" for at in range(len(self._names), logits.shape[-1])), OUTSIDE]
        self._classes = names[: logits.shape[-1]]
        for mine, wanted in zip(given, np.asarray(labels), strict=True):
            known = (wanted >= 0) & (wanted < logits.shape[-1])
            there, found = ([names[at] for at in each[known].tolist()] for each in (wanted, mine))
            truth, told = set(self._parts(there)), set(self._parts(found))
            self._counts.append((len(truth & told), len(told), len(truth)))
            self._words += len(there)
            self._rows += bool(there)
            self._alone.update((kind, False) for start, end, kind in truth if end == start + 1)
            self._alone.update((kind, True) for start, end, kind in truth if (start, end) == (0, len(there)))

    def _parts(self, tags: Sequence[str]) -> Iterator[tuple[int, int, str]]:
        return _entities(tags) if self._entities else (
            (at, at + 1, tag) for at, tag in enumerate(tags) if tag != OUTSIDE
        )  # fmt: skip

    def compute(self) -> Array:
        """Scores [n], 0 to 1 in the mean."""
        return f1_scores(np.asarray(self._counts, np.float64).reshape(-1, 3))

    def add(self, outputs: Arrays, labels: Array | None) -> None:
        """Take a batch: see `compress.evaluate.chance.Chance`."""
        if labels is not None:
            self.update(outputs, labels)

    def doubt(self, low: float | None, told: str) -> str | None:
        """See `compress.evaluate.chance.Chance`."""
        if not any(there for _, _, there in self._counts):
            return "No token of the evaluation data has a label that counts: nothing can be found, rightly or not."
        return no_better(low, self.rate(), told, f"whoever always gives the class that fits best has {self.rate():.1%}")

    def rate(self) -> float:
        """See `compress.evaluate.chance.Chance`."""
        there = sum(each[2] for each in self._counts)
        best = 0.0
        for tag in self._classes:
            parts = list(self._parts([tag, tag]))  # one for each word, one for all of them, or none
            if parts:
                whole = len(parts) == 1
                sizes = (self._rows if whole else self._words) + there
                best = max(best, 2 * self._alone[parts[0][2], whole] / max(sizes, 1))
        return best


def f1_scores(counts: Array) -> Array:
    """Scores [n] whose mean is the F1 of all.

    Args:
        counts: of each sample [n, 3], what is right, given and there.
    """
    right, given, there = counts.T
    sizes = given + there
    if not sizes.any():
        return np.ones(len(right))
    value = 2 * right.sum() / sizes.sum()
    return Influences.of(value + (2 * right - value * sizes) / sizes.mean(), TagOutcomes(right, given, there))


class TagOutcomes:
    """What errors that were not seen would do to F1, where few samples hold anything.

    Args:
        right, given, there: of each sample [n].
    """

    bias = 0.0  # a ratio of sums has next to none

    def __init__(self, right: Array, given: Array, there: Array) -> None:
        self.right, self.given, self.there = right, given, there

    def fall(self, confidence: float, before: TagOutcomes | None = None) -> float:
        """See `compress.evaluate.influences.Outcomes`: such a sample loses all that it holds, or is given one more."""
        holds, found = self.there > 0, self.right > 0
        missed, wrong = self.right < self.there, self.given > self.right
        if before is not None:
            missed, wrong = self.right < before.right, self.given - self.right > before.given - before.right
        lost, more = (self._more(each & these, these, confidence) for each, these in ((missed, holds), (wrong, ~holds)))
        each = self.right[found].mean() if found.any() else 0.0
        lost = min(lost * each, self.right.sum())
        sizes = self.given.sum() + self.there.sum()
        figure = 2 * self.right.sum() / sizes
        left = 2 * (self.right.sum() - lost) / max(sizes - lost, 1), 2 * self.right.sum() / (sizes + more)
        return max(0.0, float(figure - min(left)))

    def rise(self, confidence: float) -> float:
        """See `compress.evaluate.influences.Outcomes`: such a sample is given all that it holds."""
        holds = self.there > 0
        missed = self.there - self.right
        whole = holds & (missed == 0)
        more = self._more(whole, holds, confidence)
        found = min(more * (self.there[holds].mean() if holds.any() else 0.0), missed.sum())
        sizes = self.given.sum() + self.there.sum()
        return max(0.0, float(2 * (self.right.sum() + found) / (sizes + found) - 2 * self.right.sum() / sizes))

    def spread(self, *_: object) -> tuple[float, float]:
        """See `compress.evaluate.influences.Outcomes`: a sample's influence tells what it does."""
        return 0.0, 0.0

    def _more(self, which: Array, of: Array, confidence: float) -> float:
        return float(unseen(np.atleast_1d(which.sum()), np.atleast_1d(of.sum()), confidence)[0])


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
