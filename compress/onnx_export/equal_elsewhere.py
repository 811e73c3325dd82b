"""Whether two models give the same answers at sizes that are not the usual ones, each dimension by itself."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import nn

from compress.artifact import Signature
from compress.evaluate.parity import TOLERANCE
from compress.model import Arrays
from compress.model.drawn import drawn_inputs, indices_of
from compress.model.infer import runs_at
from compress.model.inputs import telling
from compress.model.odd_sizes import Range, odd_sizes
from compress.onnx_export.equal import Wording, equal_at, is_no_number
from compress.runtime.backends import Backend
from compress.stage import Progress
from compress.storage.shortages import raise_shortage

__all__ = ["equal_elsewhere"]

BATCH = 1
OTHER_BATCH = 3  # beside those that everything is compared at
MOST_TIMES, SMALL = 8, 1 << 18  # as many elements of inputs as of one usual sample; below so many, any


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
    ranges: Mapping[str, Range] | None = None,
    smaller: bool = False,
) -> dict[str, list[int]]:
    """Prove that two models give the same answers at sizes that show what was decided by a size (see `odd_sizes`).

    Sizes that the first does not take are left out, and those of which its inputs would be far larger than usual.

    Args:
        module: the first model, which tells by running what sizes and indices it takes.
        first, second: the models, ready to run.
        signature: of both.
        progress: is told of each dimension.
        words: for a difference.
        done: of the steps of the stage, and how many there are.
        tolerance, logistic: see `differences`.
        ranges: of dimensions, where the second is known to hold; tried beyond their ends, too.
        smaller: whether the second may fail at sizes below the usual ones: ONNX Runtime gives answers for pictures that
            are smaller than a pooling's window, which torch refuses.

    Returns:
        By dimension, the sizes that they were compared at.

    Raises:
        StageError: see `equal_at`.
    """
    runs, indices = runs_at(module, signature.inputs), indices_of(module, signature)
    found: dict[str, list[int]] = {}
    for dim, usual, sizes in _tried(signature, ranges or {}):
        for size in sizes:
            at = signature.at(BATCH) | {dim: size}
            if not runs(at):
                continue
            inputs = _numbers_for(first, drawn_inputs(signature, at, indices, seed=size))
            if inputs is None:
                continue
            if smaller and size < usual and not _takes(second, inputs):
                continue
            told = _told(dim, size, found.get(dim, []), (ranges or {}).get(dim))
            equal_at(first, second, signature, inputs, told, words, tolerance, logistic)
            found.setdefault(dim, []).append(size)
        if dim in found:
            progress(*done, f"equal at {dim} = {', '.join(map(str, sorted(found[dim])))}")
    return found


def _tried(signature: Signature, ranges: Mapping[str, Range]) -> Iterator[tuple[str, int, list[int]]]:
    """By dimension its usual size, and those that it is tried at."""
    usual = signature.at(BATCH)
    here = _elements(signature, usual)
    for dim, size in usual.items():
        sizes = [OTHER_BATCH] if dim in signature.batches else list(odd_sizes(size))
        sizes += ranges[dim].beyond if dim in ranges else ()
        fit = [
            each
            for each in dict.fromkeys(sizes)
            if each > 0 and _elements(signature, usual | {dim: each}) <= max(MOST_TIMES * here, SMALL)
        ]
        yield dim, size, fit


def _told(dim: str, size: int, equal: list[int], span: Range | None) -> str:
    """A size, with those at which it is otherwise, as far as these are known."""
    if span is not None and not span.holds(size):
        return f"{dim} = {size}, where what torch.export decided by a size holds for {dim} {span}"
    return f"{dim} = {size}" + (f" (it is equal at {', '.join(map(str, sorted(equal)))})" if equal else "")


def _elements(signature: Signature, sizes: Mapping[str, int]) -> int:
    return sum(math.prod(spec.at(sizes)) for spec in signature.inputs)


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
