"""How alike the answers of several models are, over the data that is given, as far as that is worth its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from compress.data.dataset import Dataset
from compress.evaluate.compare import max_abs_error
from compress.evaluate.metrics import cosine_similarity, not_finite, refuse_other_shapes
from compress.model import Arrays

__all__ = ["Likeness", "likeness"]

MOST = 256  # samples: what the least of more would tell is no more of a model's worth
SECONDS = 20.0  # after these no further batch is run


@dataclass(frozen=True)
class Likeness:
    """Of one model's answers to the first model's.

    Attributes:
        samples: that both answered; 0 where these were random inputs, or the data has not as many as a batch takes.
        cosine_similarity: the least of any sample and output.
        max_abs_error: the largest of any sample and output.
        not_finite: of `looked_at` samples, those for which an output holds NaN or infinity.
        looked_at: samples that it answered, random ones, too.
    """

    samples: int
    cosine_similarity: float
    max_abs_error: float
    not_finite: int = 0
    looked_at: int = 0


def likeness(
    run: Mapping[str, Callable[[Arrays], Arrays]],
    timed: Arrays,
    data: Dataset | None,
    batch: int,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[str, Likeness]:
    """Run every model on the inputs that are timed, and on as many batches of the data as there is time for.

    Args:
        run: by model, what gives its outputs, as many as the first: by the names of its, whatever their order; where
            the names differ, in its order.
        timed: one batch.
        data: whose samples are drawn without order, but the same ones each time; None for random inputs.
        batch: samples in a call.
        progress: is told samples of the data done and in all; at the end, as many as there was time for.

    Raises:
        StageError: outputs are of other shapes than the first model's.
    """
    first = next(iter(run))
    cosines, errors, samples = dict.fromkeys(run, 1.0), dict.fromkeys(run, 0.0), 0
    looked_at, odd = 0, dict.fromkeys(run, 0)
    begun = time.perf_counter()
    total = _count(data, batch)
    for answered, inputs in _batches(timed, data, batch):
        expected = run[first](inputs)
        for name, infer in run.items():
            outputs = expected if name == first else infer(inputs)
            got = outputs if outputs.keys() == expected.keys() else dict(zip(expected, outputs.values(), strict=True))
            refuse_other_shapes(expected, got, name, first)
            alike = [
                float(np.min(cosine_similarity(values, got[key]), initial=1.0)) for key, values in expected.items()
            ]
            cosines[name] = min([cosines[name], *alike])
            errors[name] = max(errors[name], max_abs_error(expected, got))
            odd[name] += not_finite(got)
        samples += answered
        if total:
            progress(samples, total)
        looked_at += next((len(values) for values in inputs.values() if np.ndim(values)), 1)
        if time.perf_counter() - begun > SECONDS:
            break
    if samples < total:
        progress(samples, samples)
    return {name: Likeness(samples, cosines[name], errors[name], odd[name], looked_at) for name in run}


def _count(data: Dataset | None, batch: int) -> int:
    """How many samples of the data full batches have, of those that are looked at."""
    return 0 if data is None else min(len(data), max(MOST, batch)) // batch * batch


def _batches(timed: Arrays, data: Dataset | None, batch: int) -> Iterator[tuple[int, Arrays]]:
    """Full batches only, and how many samples of the data each has: some models take no others."""
    count = _count(data, batch)
    if data is None or not count:
        yield 0, timed
        return
    places = np.random.default_rng(0).permutation(len(data))[:count]
    for start in range(0, count, batch):
        yield batch, data.take(np.sort(places[start : start + batch]))[0]
