"""Outputs of another shape are refused by name, not stretched to each other; texts are the same or not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.evaluate.answers import likeness
from compress.evaluate.compare import compare
from compress.evaluate.judge import Judge
from compress.evaluate.metrics import METRICS
from compress.model import Arrays

SAMPLES = 8
X = np.random.default_rng(0).standard_normal((SAMPLES, 3)).astype(np.float32)
DATA = Dataset("data", {"x": X}, None, "")
KINDS = np.array(["cat", "dog", "owl"])


class Backend:
    """What it gives of its inputs."""

    runtime, emulated = "none", False

    def __init__(self, gives: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> None:
        self.gives = gives

    def infer(self, inputs: Arrays) -> Arrays:
        return {"y": self.gives(inputs["x"])}


WIDE, NARROW = Backend(lambda x: x), Backend(lambda x: x[:, :1])


def ask(by: str, first: Backend, second: Backend) -> None:
    if by == "likeness":
        likeness({"first": first.infer, "second": second.infer}, {"x": X}, None, SAMPLES)
    elif by == "errors":
        Judge(first, DATA, METRICS["cosine"]).squared_errors(second)
    else:
        compare("first", {"first": first, "second": second}, DATA, METRICS[by])


@pytest.mark.parametrize(("first", "second"), [(WIDE, NARROW), (NARROW, WIDE)], ids=["to one", "to many"])
@pytest.mark.parametrize("by", ["agreement", "cosine", "mse", "likeness", "errors"])
def test_one_value_is_not_held_against_many(first: Backend, second: Backend, by: str) -> None:
    shapes = [f"[{SAMPLES}, {model.gives(X).shape[1]}]" for model in (second, first)]
    with pytest.raises(StageError) as caught:
        ask(by, first, second)
    assert caught.value.what.startswith("can't compare the output 'y' of ")
    assert re.findall(r"\[.*?\]", caught.value.why) == shapes


def test_texts_agree_where_they_are_the_same() -> None:
    first = Backend(lambda x: KINDS[x.argmax(1)])
    second = Backend(lambda x: np.where(x[:, 0] > x[:, 1], "cat", KINDS[x.argmax(1)]))
    same = float((first.gives(X) == second.gives(X)).mean())
    assert 0 < same < 1
    models = {"first": first, "second": second}
    found = compare("first", models, DATA, METRICS["agreement"].of("y"))
    assert (found["first"].value, found["second"].value) == (1.0, same)
    assert (found["first"].max_abs_error, found["second"].max_abs_error) == (0.0, 1.0)
    told = likeness({name: model.infer for name, model in models.items()}, {"x": X}, None, SAMPLES)
    assert (told["first"].cosine_similarity, told["second"].cosine_similarity) == (1.0, 0.0)
