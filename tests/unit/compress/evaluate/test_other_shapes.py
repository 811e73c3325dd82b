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


BESIDE: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "a number": lambda x: x.mean(),
    "a constant": lambda _: np.ones(2, np.float32),
    "a constant as long as a batch": lambda _: np.ones((64, 3), np.float32),
    "samples second": lambda x: np.stack([x, 2 * x]),
    "some rows for each sample": lambda x: np.repeat(x, 2, axis=0),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("case", BESIDE)
@pytest.mark.parametrize("metric", ["agreement", "cosine", "mse"])
def test_an_output_without_a_row_for_each_sample_stands_beside_one_that_has(
    metric: str, case: str, *, first: bool
) -> None:
    """Batches are of 64 samples, and the last of 2."""

    class Two(Backend):
        def infer(self, inputs: Arrays) -> Arrays:
            both = {"y": self.gives(inputs["x"]), "other": np.asarray(BESIDE[case](inputs["x"]))}
            return both if first else dict(reversed(both.items()))

    samples = np.random.default_rng(0).standard_normal((66, 3)).astype(np.float32)
    data, judged = Dataset("data", {"x": samples}, None, ""), METRICS[metric]
    judged = judged.of("y") if metric == "agreement" else judged
    models = {"first": Two(lambda x: x), "same": Two(lambda x: x), "turned": Two(lambda x: -x)}
    found = compare("first", models, data, judged)
    best = 0.0 if metric == "mse" else 1.0
    assert [found[name].value == pytest.approx(best) for name in models] == [True, True, False]
    assert [len(found[name].scores) for name in models] == [66] * 3  # type: ignore[arg-type]
    judge = Judge(models["first"], data, judged)
    assert judge.drop(models["same"]).points == pytest.approx(0)
    assert judge.drop(models["turned"]).points > 0
    assert judge.squared_errors(models["turned"]).min() > 0
