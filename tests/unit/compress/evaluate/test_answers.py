"""Answers that are no numbers are counted where models are compared: a model is not like itself there."""

from __future__ import annotations

import numpy as np
import pytest

from compress.evaluate.answers import likeness
from compress.evaluate.metrics import not_finite
from compress.model import Arrays

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("outputs", "count"),
    [
        ({"a": [[1, 2], [3, 4]]}, 0),
        ({"a": [[1, NAN], [3, 4]]}, 1),
        ({"a": [[1, 2], [INF, -INF]]}, 1),
        ({"a": [[NAN, NAN], [3, 4]], "b": [1, INF]}, 2),
        ({"a": [[NAN, NAN], [3, 4]], "b": [NAN, 1]}, 1),
        ({"a": [[NAN, 1], [3, 4], [5, 6]], "b": [INF]}, 2),
        ({"a": np.array([[1], [2]])}, 0),
        ({}, 0),
    ],
)
def test_samples_with_what_is_no_number_in_any_output_are_counted(outputs: dict[str, object], count: int) -> None:
    arrays = {
        name: np.asarray(v) if isinstance(v, np.ndarray) else np.asarray(v, np.float32) for name, v in outputs.items()
    }
    assert not_finite(arrays) == count


def test_a_model_that_gives_nan_is_told_to_even_against_itself() -> None:
    def odd(inputs: Arrays) -> Arrays:
        return {"y": np.where(inputs["x"] > 0, inputs["x"], np.float32("nan"))}

    timed = {"x": np.array([[1], [-1], [2], [-2]], np.float32)}
    found = likeness({"odd": odd, "sound": lambda inputs: {"y": inputs["x"]}}, timed, None, 4)
    assert (found["odd"].not_finite, found["odd"].looked_at) == (2, 4)
    assert found["odd"].cosine_similarity == -1
    assert found["sound"].not_finite == 0
