"""What layers are ranked by: differences of floats; numbers of classes are the same or not, and stand back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from compress.data.dataset import Dataset
from compress.evaluate.judge import Judge
from compress.evaluate.metrics import METRICS
from compress.model import Arrays

SAMPLES = 8
RNG = np.random.default_rng(0)
DATA = Dataset("data", {"x": np.zeros((SAMPLES, 1), np.float32)}, None, "")
SCORES = RNG.random((SAMPLES, 5)).astype(np.float32)
CLASSES = np.arange(SAMPLES) % 5


class Backend:
    """Gives these."""

    runtime, emulated = "none", False

    def __init__(self, **outputs: np.ndarray[Any, Any]) -> None:
        self.outputs: Mapping[str, np.ndarray[Any, Any]] = outputs

    def infer(self, inputs: Arrays) -> Arrays:
        return {name: values[: len(inputs["x"])] for name, values in self.outputs.items()}


def error(first: Backend, second: Backend) -> float:
    return Judge(first, DATA, METRICS["cosine"]).squared_error(second)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.bool_, np.str_])
def test_classes_beside_scores_do_not_hide_what_the_scores_lose(dtype: type) -> None:
    classes: np.ndarray[Any, Any]
    others: np.ndarray[Any, Any]
    classes, others = CLASSES.astype(dtype), CLASSES[::-1].astype(dtype)
    off = SCORES + np.float32(0.01) * RNG.standard_normal(SCORES.shape).astype(np.float32)
    alone = error(Backend(scores=SCORES), Backend(scores=off))
    beside = error(Backend(label=classes, scores=SCORES), Backend(label=others, scores=off))
    assert beside == pytest.approx(alone)
    assert error(Backend(label=classes, scores=SCORES), Backend(label=others, scores=SCORES)) == 0


@pytest.mark.parametrize("wrong", [1, 4, 100_000])
def test_classes_alone_count_by_the_share_that_differs_whatever_their_numbers(wrong: int) -> None:
    others = CLASSES.copy()
    others[::4] += wrong
    assert error(Backend(label=CLASSES), Backend(label=others)) == pytest.approx(2 / SAMPLES)
    assert error(Backend(label=CLASSES), Backend(label=CLASSES)) == 0


def test_booleans_alone_count_by_the_share_that_differs() -> None:
    mask = RNG.random((SAMPLES, 100)) < 0.1
    other = mask.copy()
    other[:, :25] ^= True
    assert error(Backend(mask=mask), Backend(mask=other)) == pytest.approx(0.25)
