"""Whether two models give the same answers at sizes that are not the usual ones, each dimension by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from compress.artifact import Signature
from compress.evaluate.parity import TOLERANCE
from compress.formats.exported.decisions import Decision, Decisions
from compress.model import Arrays
from compress.model.drawn import draws, indices_of
from compress.model.infer import runs_at
from compress.model.inputs import telling
from compress.model.odd_sizes import LEAST, STEPS, WALK, odd_sizes
from compress.model.without_memory import refuses_at
from compress.onnx_export.equal import BATCHES, Wording, equal_at, is_no_number
from compress.runtime.backends import Backend, TorchBackend
from compress.stage import Progress
from compress.storage.shortages import raise_shortage

__all__ = ["Elsewhere", "equal_elsewhere"]

BATCH = 1
OTHER_BATCHES = (3, 4, 8)  # beside those that everything is compared at; 4 and 8 of small inputs
MOST_TIMES, SMALL = 8, 1 << 18  # as many elements of inputs as of one usual sample; below so many, any
ROOM = 1 << 28  # bytes of inputs, and of the largest tensor inside; what the usual sizes took is taken again
WORD = 4  # of most inputs
MOST_TRIED = 40  # sizes of a dimension at which guards fail; those that the model refuses count, too


@dataclass(frozen=True)
class Elsewhere:
    """What came of it.

    Attributes:
        equal: by dimension, the sizes that they were compared at.
        untried: by dimension, a size that takes too much to be tried at, and what is known to hold at others alone.
        too_many: by dimension, the same of a size that was not tried, as so many others were.
        unseen: by dimension, sizes at which the model does not run, and what is known to hold at others alone; which
            sizes it takes there was not found.
        nowhere: dimensions of which no size was compared.
    """

    equal: dict[str, list[int]] = field(default_factory=dict)
    untried: dict[str, tuple[int, str]] = field(default_factory=dict)
    too_many: dict[str, tuple[int, str]] = field(default_factory=dict)
    unseen: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    nowhere: list[str] = field(default_factory=list)


def equal_elsewhere(
    module: nn.Module,
    first: Backend,
    second: Backend,
    signature: Signature,
    progress: Progress,
    words: Wording,
    *,
    done: tuple[int, int],
    tolerance: float = TOLERANCE,
    logistic: Collection[str] = (),
    decided: Decisions | None = None,
    smaller: bool = False,
) -> Elsewhere:
    """Prove that two models give the same answers at sizes that show what was decided by a size (see `odd_sizes`).

    Sizes that the first does not take are left out, and those of which its inputs would be far larger than usual, where
    nothing is known to be decided there.

    Args:
        module: the first model, which tells by running what sizes and indices it takes.
        first, second: the models, ready to run.
        signature: of both.
        progress: is told of each size that is tried, and of each dimension.
        words: for a difference.
        done: of the steps of the stage, and how many there are.
        tolerance, logistic: see `differences`.
        decided: what is known of sizes at which the second was made otherwise than the first is; tried, too.
        smaller: whether the second may fail at sizes below the usual ones: ONNX Runtime gives answers for pictures that
            are smaller than a pooling's window, which torch refuses. Pictures of one row are left out, then.

    Raises:
        StageError: see `equal_at`.
    """
    decided = decided or Decisions({})
    usual = signature.at(BATCH)
    found = Elsewhere()

    def trying(dim: str, size: int) -> None:
        progress(*done, f"trying {dim} = {size}")

    compare = _Comparisons(
        module, first, second, signature, words, tolerance, logistic, smaller, found.equal, decided, trying
    )
    compare.known = {dim: list(decided.of(dim, usual, 1)) for dim in usual}
    for dim in usual:
        step = _odd_ones(compare, dim, told=decided.places is not None)
        for decision in compare.known[dim] if step in (None, 1) else decided.of(dim, usual, step):
            _beyond(compare, dim, decision, found, stepped=step is not None)
        if dim in found.equal:
            progress(*done, f"equal at {dim} = {', '.join(map(str, sorted(found.equal[dim])))}")
        elif dim not in signature.batches:
            found.nowhere.append(dim)
    return found


class _Comparisons:
    """Of two models, at one size of a dimension after the other.

    Attributes:
        usual: sizes of all dimensions.
        equal: sizes, by dimension, that both are equal at.
        known: by dimension, what was decided by its size.
        asked: sizes of dimensions that guards were asked about.
    """

    known: Mapping[str, list[Decision]]

    def __init__(
        self, module: nn.Module, first: Backend, second: Backend, signature: Signature, words: Wording,
        tolerance: float, logistic: Collection[str], smaller: bool, equal: dict[str, list[int]], decided: Decisions,
        trying: Callable[[str, int], None],
    ) -> None:  # fmt: skip
        self.inside, self._trying = decided.inside, trying
        self.first, self.second, self.signature, self.words = first, second, signature, words
        self.tolerance, self.logistic, self.smaller, self.equal = tolerance, logistic, smaller, equal
        self.usual, self.runs = signature.at(BATCH), runs_at(module, signature.inputs)
        self.refuses = refuses_at(module, signature.inputs, self.usual)
        self.most = max(ROOM, self._bytes(signature.at(max(BATCHES))))
        self.indices = indices_of(module, signature)
        self.asked: dict[str, set[int]] = {dim: set() for dim in self.usual}
        self._tried: dict[tuple[str, int], bool] = {}

    def elements(self, dim: str, size: int) -> int:
        """Of all inputs."""
        return self._elements(self.usual | {dim: size})

    def _elements(self, sizes: Mapping[str, int]) -> int:
        return sum(math.prod(spec.at(sizes)) for spec in self.signature.inputs)

    def _bytes(self, sizes: Mapping[str, int]) -> int:
        """Of all inputs, or of the largest tensor inside, as far as that is known."""
        return max(WORD * self._elements(sizes), self.inside.largest(sizes))

    def fits(self, dim: str, size: int) -> bool:
        """Whether neither inputs nor a tensor inside take too much there."""
        return size <= self.usual[dim] or self._bytes(self.usual | {dim: size}) <= self.most

    def takes(self, dim: str, size: int) -> bool:
        """Whether the first model runs there."""
        self._trying(dim, size)
        return self.runs(self.usual | {dim: size})

    def at(self, dim: str, size: int) -> bool:
        """Whether the first takes a size; both are equal there, then.

        Raises:
            StageError: they are not.
        """
        if (dim, size) not in self._tried:
            self._tried[dim, size] = self._at(dim, size)
        return self._tried[dim, size]

    def _at(self, dim: str, size: int) -> bool:
        self._trying(dim, size)
        # What a small input does not run at, torch's own answers tell; of a large one, want of memory is no error.
        if not ((isinstance(self.first, TorchBackend) and self.elements(dim, size) <= SMALL) or self.takes(dim, size)):
            return False
        at = self.usual | {dim: size}
        drawn = draws(self.signature, at, self.indices, size)
        inputs = next((found for given in drawn if (found := _numbers_for(self.first, given)) is not None), None)
        if inputs is None or (self.smaller and size < self.usual[dim] and not _takes(self.second, inputs)):
            return False
        otherwise = next((each for each in self.known.get(dim, []) if not each.holds(size)), None)
        told = _told(dim, size, self.equal.get(dim, []), otherwise)
        equal_at(self.first, self.second, self.signature, inputs, told, self.words, self.tolerance, self.logistic)
        self.equal.setdefault(dim, []).append(size)
        return True


def _odd_ones(compare: _Comparisons, dim: str, *, told: bool) -> int | None:
    """Compare at the sizes that show most branches; gives a step that the first model takes sizes in, if one is found.

    Args:
        compare: compares.
        dim: whose sizes these are.
        told: whether batches at which something is decided are known.
    """
    usual, skipped = compare.usual[dim], LEAST if compare.smaller else ()
    if dim in compare.signature.batches:
        for batch in OTHER_BATCHES:
            untold = not told and compare.elements(dim, batch) <= SMALL
            if batch == OTHER_BATCHES[0] or untold:
                compare.at(dim, batch)
        return 1

    def cheap(sizes: Iterable[int]) -> Iterator[int]:
        most = max(MOST_TIMES * compare.elements(dim, usual), SMALL)
        return (each for each in sizes if each > 0 and compare.elements(dim, each) <= most and compare.fits(dim, each))

    def takes(size: int) -> bool:
        return size > 0 and compare.fits(dim, size) and compare.takes(dim, size)

    ran = {size: compare.at(dim, size) for size in cheap(odd_sizes(usual)) if size not in skipped}
    above = [taken for size, taken in ran.items() if size > usual]
    if above and all(above):
        return 1
    for step in (1, *STEPS, *(each for each in range(2, WALK + 1) if each not in STEPS)):
        times = (1, 3, 13) if step == 1 else (1, 3)  # a few in a row are taken by networks that go by 32, too
        if any(all(takes(usual + sign * each * step) for each in times) for sign in (1, -1)):
            for size in cheap(odd_sizes(usual, step)):
                if size not in skipped:
                    compare.at(dim, size)
            return step
    return None


def _beyond(compare: _Comparisons, dim: str, decision: Decision, found: Elsewhere, *, stepped: bool) -> None:
    """Compare at sizes where a decision does not hold, as far as they are within bounds.

    Args:
        compare: compares.
        dim: whose sizes these are.
        decision: what holds at others.
        found: is told of sizes that were not compared.
        stepped: whether it is known in which steps the first model takes sizes: it refuses what is beyond them, then.
    """
    usual = compare.usual[dim]
    for group in decision.sizes:
        above = group[0] > usual
        equal = compare.equal.get(dim, [])
        if not decision.alone and any(not decision.holds(size) and (size > usual) is above for size in equal):
            continue
        for size in group:
            if not compare.fits(dim, size):
                if not compare.refuses(compare.usual | {dim: size}):
                    found.untried.setdefault(dim, (size, decision.text))
                    break
            else:
                asked = set() if decision.alone else compare.asked[dim]
                asked.add(size)
                if len(asked) > MOST_TRIED:
                    found.too_many.setdefault(dim, (size, decision.text))
                    break
                if compare.at(dim, size):
                    break
        else:
            if decision.alone and not stepped:
                found.unseen.setdefault(dim, (group, decision.text))


def _told(dim: str, size: int, equal: list[int], decision: Decision | None) -> str:
    """A size, with those at which it is otherwise, as far as these are known."""
    if decision is not None:
        return f"{dim} = {size}, where what torch.export decided by a size holds for {decision.text}"
    return f"{dim} = {size}" + (f" (it is equal at {', '.join(map(str, sorted(equal)))})" if equal else "")


def _numbers_for(backend: Backend, given: Arrays) -> Arrays | None:
    """The inputs, or what `telling` makes of them; None where the model does not take them, or gives no numbers."""
    answers: Arrays = {}

    def run(inputs: Arrays) -> Iterable[np.ndarray[Any, Any]]:
        nonlocal answers
        answers = backend.infer(inputs)
        return answers.values()

    try:
        inputs = telling(given, run)
    except Exception as err:  # torch and ONNX Runtime: anything may come out of them
        raise_shortage(err)
        return None
    return None if any(map(is_no_number, answers.values())) else inputs


def _takes(backend: Backend, inputs: Arrays) -> bool:
    try:
        backend.infer(inputs)
    except Exception as err:  # torch and ONNX Runtime: anything may come out of them
        raise_shortage(err)
        return False
    return True
