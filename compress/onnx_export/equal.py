"""Whether a file gives the answers of the model that it was made of: at several batches, at other sizes, on data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from compress.artifact import Signature
from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.evaluate.parity import TOLERANCE, differences
from compress.model import Arrays
from compress.model.drawn import drawn_taken, indices_of
from compress.model.infer import elsewhere, runs_at
from compress.model.inputs import telling
from compress.runtime.backends import Backend
from compress.stage import Progress
from compress.storage.shortages import raise_shortage

__all__ = ["BATCHES", "Wording", "changes", "equal_at", "equal_throughout", "is_no_number", "sizes_assumed"]

BATCHES = (1, 2, 5)
MOVED_BATCH = 2  # where what else varies has another size than the representative one
SAMPLES = 8  # of the data
DRAWS = 16  # a mask of few values is drawn twice in a row now and then


@dataclass(frozen=True)
class Wording:
    """How a difference is told.

    Attributes:
        made, before: what is proven, and what it is held against.
        fails, differs: how to mend either.
        fixed: what else mends it where it is met at other sizes than the representative ones alone.
        unsigned: how to mend a signature that does not hold at all sizes.
    """

    made: str = "the exported model"
    before: str = "in torch"
    fails: str = "look in the forward for sizes written as numbers, such as reshape(2, -1)"
    differs: str = "look in the forward for branches on shapes, such as `if x.shape[0] == 1`"
    fixed: str = ""
    unsigned: str = "save the model again with compress.save, or give the --size that is usual"


def equal_throughout(
    module: nn.Module,
    first: Backend,
    second: Backend,
    signature: Signature,
    data: Dataset | None,
    progress: Progress,
    words: Wording,
    *,
    tolerance: float = TOLERANCE,
    steps: tuple[int, int] = (0, 0),
    doubted: Callable[[Arrays, StageError], None] = lambda _inputs, _err: None,
    both: bool = False,
    logistic: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """Prove that two models give the same answers: to random inputs at every batch, at one with other sizes, on data.

    Args:
        module: the first model, which tells by running what sizes and indices it takes.
        first, second: the models, ready to run.
        signature: of both.
        data: samples of it are compared, too.
        progress: is told of each comparison.
        words: for a difference.
        tolerance: see `differences`.
        steps: that come before and behind these, for the progress.
        doubted: is given what the second fails at first, and may raise another error.
        both: where the second fails at the first other sizes that the first model takes, to try such as both take:
            ONNX Runtime gives answers for pictures that are smaller than a pooling's window, which torch refuses.
        logistic: see `differences`.

    Returns:
        How far they are apart, as JSON values, by what they were compared on.

    Raises:
        StageError: see `equal_at`.
    """
    before, behind = steps
    total = before + len(BATCHES) + (data is not None) + behind
    parity: dict[str, dict[str, Any]] = {}
    for done, (key, moved, inputs) in enumerate(
        _comparisons(module, signature, first, data, second if both else None), before + 1
    ):
        at = "".join(f", {dim} = {size}" for dim, size in moved.items())
        told = data.source if data is not None and key == "data" else f"batch {key}{at}"
        said = words
        if moved and words.fixed:
            here = f"; {words.fixed.format(', '.join(moved))}"
            said = dataclasses.replace(words, fails=words.fails + here, differs=words.differs + here)
        try:
            parity[key] = equal_at(first, second, signature, inputs, told, said, tolerance, logistic)
        except StageError as err:
            doubted(inputs, err)
            raise
        progress(done, total, f"{told}: off by {parity[key]['max_abs_error']:.2g}")
    return parity


def changes(backend: Backend, inputs: Arrays) -> bool:
    """Whether a model gives other answers when it is given the same inputs again."""
    first = backend.infer(inputs)
    return any(_differs(first, backend.infer(inputs)) for _ in range(DRAWS))


def _differs(first: Arrays, second: Arrays) -> bool:
    return not all(
        np.array_equal(values, second[name], equal_nan=values.dtype.kind == "f") for name, values in first.items()
    )


def _comparisons(
    module: nn.Module, signature: Signature, first: Backend, data: Dataset | None, second: Backend | None
) -> Iterator[tuple[str, dict[str, int], Arrays]]:
    """What to compare on: a name for it, the sizes that are not the representative ones, and inputs.

    These are random ones at every batch, at one with other sizes, and the data.

    Args:
        module: the model, which tells by running what sizes and indices it takes.
        signature: of it.
        first: the same model, ready to run.
        data: samples of it are compared, too.
        second: what is to take the other sizes as well, if there are such.
    """
    runs = runs_at(module, signature.inputs)
    indices = indices_of(module, signature)

    def taken(given: Arrays) -> Arrays:
        return telling(given, lambda given: first.infer(given).values())

    def drawn(sizes: Mapping[str, int], batch: int) -> Arrays:
        return drawn_taken(taken, signature, sizes, indices, batch)

    def answers(sizes: Mapping[str, int]) -> bool:
        """Nothing can be held against answers that are no numbers, or where what is drawn is refused."""
        try:
            return runs(sizes) and not any(map(is_no_number, first.infer(drawn(sizes, MOVED_BATCH)).values()))
        except Exception as err:  # torch and ONNX Runtime: anything may come out of them
            raise_shortage(err)
            return False

    def takes(sizes: Mapping[str, int]) -> bool:
        try:
            second.infer(drawn(sizes, MOVED_BATCH)) if second is not None else None
        except Exception as err:  # torch and ONNX Runtime: anything may come out of them
            raise_shortage(err)
            return False
        return True

    for batch in BATCHES:
        usual = signature.at(batch)
        sizes = dict(usual)
        if batch == MOVED_BATCH:
            sizes = elsewhere(answers, usual, signature.told)
            if second is not None and not takes(sizes):
                shared = elsewhere(lambda tried: answers(tried) and takes(tried), usual, signature.told)
                sizes = sizes if any(shared[dim] == usual[dim] != sizes[dim] for dim in usual) else shared
        yield str(batch), {dim: sizes[dim] for dim in usual if sizes[dim] != usual[dim]}, drawn(sizes, batch)
    if data is not None:
        yield "data", {}, data.take(data.places(SAMPLES))[0]


def equal_at(
    first: Backend,
    second: Backend,
    signature: Signature,
    inputs: Arrays,
    told: str,
    words: Wording,
    tolerance: float,
    logistic: Collection[str],
) -> dict[str, Any]:
    """Prove that two models give the same answers to some inputs; gives how far these are apart, as JSON values.

    Raises:
        StageError: an output of the first holds no number, the second fails, its answers are others or of another
            type, or the signature does not tell the shapes and types of both.
    """
    shapes = ", ".join(f"{name} {list(values.shape)}" for name, values in inputs.items())
    expected = first.infer(inputs)
    for name, values in expected.items():
        if is_no_number(values):
            raise StageError(
                f"the answers {words.before} are no numbers at {told}",
                why=f"for {shapes} all of its output {name!r} is NaN or infinite, and nothing can be held against that",
                mend="look for NaN and infinities among its weights; where its training went wrong, train it anew",
            )
    try:
        got = second.infer(inputs)
    except Exception as err:  # ONNX Runtime's own exception classes have no common base but this
        raise StageError(
            f"{words.made} fails at {told}",
            why=f"{shapes}: {str(err.__cause__ or err).strip().splitlines()[-1][:300]}",
            mend=words.fails,
        ) from err
    for spec in signature.outputs:
        shape = expected[spec.name].shape
        fixed = [at for at, size in enumerate(spec.shape) if isinstance(size, int) and (at or not signature.singly)]
        if len(shape) != len(spec.shape) or any(spec.shape[at] != shape[at] for at in fixed):
            raise StageError(
                f"the signature does not hold at {told}",
                why=f"it says that the model gives {spec}, for {shapes} it gives {list(shape)}",
                mend=words.unsigned,
            )
        kinds = [str(answers[spec.name].dtype) for answers in (expected, got)]
        if kinds[0] != kinds[1]:
            raise StageError(
                f"{words.made} gives answers of another type at {told}",
                why=f"its output {spec.name!r} is {kinds[1]}, {words.before} it is {kinds[0]}",
                mend=words.differs,
            )
        if kinds[0] != spec.dtype:
            raise StageError(
                f"the signature does not hold at {told}",
                why=f"it says that the model gives {spec}, and it gives {kinds[0]}",
                mend="save the model again with compress.save",
            )
    found = differences(expected, got, tolerance, logistic)
    for name, apart in found.items():
        if not apart.fits:
            here, there = (list(answers[name].shape) for answers in (expected, got))
            is_off = str(apart) if here == there else f"{there}, {words.before} it is {here}"
            raise StageError(
                f"{words.made} gives other answers at {told}",
                why=f"for {shapes} its output {name!r} is {is_off}",
                mend=words.differs,
            )
    return {
        "max_abs_error": max(apart.max_abs_error for apart in found.values()),
        "cosine_similarity": min(apart.cosine_similarity for apart in found.values()),
        "relative_error": {name: apart.relative_error for name, apart in found.items()},
        "shapes": {name: list(values.shape) for name, values in inputs.items()},
    }


def is_no_number(values: np.ndarray[Any, Any]) -> bool:
    return values.dtype.kind == "f" and bool(values.size) and not np.isfinite(values).any()


def sizes_assumed(signature: Signature) -> tuple[str, ...]:
    """A warning where nothing says how large what varies usually is."""
    if not signature.unsaid:
        return ()
    sizes = ", ".join(f"{dim} = {size}" for dim, size in signature.unsaid.items())
    flags = " ".join(f"--size {dim}=…" for dim in signature.unsaid)
    said = f"Nothing says how large an input usually is: the model was measured, counted and tried at {sizes}."
    return (f"{said} {flags} sets that, or data does.",)
