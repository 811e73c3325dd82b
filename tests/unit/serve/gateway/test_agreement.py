"""When two answers are the same answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from serve.gateway.oip.protocol import InferResponse
from serve.gateway.oip.tensors import DATATYPES, Tensor
from serve.gateway.release.agreement import agreement, unlike
from serve.gateway.upstream.metadata import ModelMetadata, TensorMetadata

NAN, INF = float("nan"), float("inf")


def answer(*outputs: tuple[str, Any]) -> InferResponse:
    tensors = []
    for number, (datatype, values) in enumerate(outputs):
        data = np.array(values, dtype=object) if datatype == "BYTES" else np.array(values, DATATYPES[datatype])
        tensors.append(Tensor(f"y{number}", datatype, data))
    return InferResponse("m", "1", tuple(tensors))


SCORES = ("FP32", [[0.1, 0.9], [0.8, 0.2]])


@pytest.mark.parametrize(
    ("candidate", "baseline", "tolerance", "disagreed", "items"),
    [
        ([SCORES], [SCORES], None, 0, 2),
        ([("FP32", [[0.2, 0.7], [0.6, 0.5]])], [SCORES], None, 0, 2),
        ([("FP32", [[0.9, 0.1], [0.8, 0.2]])], [SCORES], None, 1, 2),
        ([("FP32", [[0.1, 0.9], [0.8, 0.21]])], [SCORES], 0.001, 1, 2),
        ([("FP32", [[0.1, 0.9], [0.8, 0.21]])], [SCORES], 0.1, 0, 2),
        ([("FP32", [[NAN, 0.9], [0.8, 0.2]])], [SCORES], None, 1, 2),
        ([("FP32", [[NAN, 0.9]])], [("FP32", [[NAN, 0.9]])], 0.0, 0, 1),
        ([("FP32", [[INF, 0.9]])], [("FP32", [[INF, 0.9]])], 0.0, 0, 1),
        ([("FP32", [[0.3], [0.4]])], [("FP32", [[0.5], [0.9]])], None, 0, 2),
        ([("FP32", [[0.3], [0.4]])], [("FP32", [[0.3], [0.9]])], 0.1, 1, 2),
        ([("INT64", [1, 2, 3])], [("INT64", [1, 5, 3])], None, 1, 3),
        ([("BYTES", [[b"cat"], [b"dog"]])], [("BYTES", [[b"cat"], [b"cow"]])], None, 1, 2),
        ([("BYTES", [[b"cat"]]), ("FP32", [[0.7]])], [("BYTES", [[b"cat"]]), ("FP32", [[0.8]])], None, 0, 1),
        ([("BOOL", [[True]])], [("BOOL", [[False]])], None, 1, 1),
        ([("FP32", [[0.1, 0.9]])], [SCORES], None, 2, 2),
        ([("FP64", [[0.1, 0.9], [0.8, 0.2]])], [SCORES], None, 2, 2),
        ([SCORES, SCORES], [SCORES], None, 2, 2),
        ([("FP32", np.zeros((2, 0)))], [("FP32", np.zeros((2, 0)))], None, 0, 2),
        ([("UINT64", [[2**63 + 1]])], [("UINT64", [[2**63]])], None, 1, 1),
    ],
)
def test_items_that_disagree(
    candidate: Any, baseline: Any, tolerance: float | None, disagreed: int, items: int
) -> None:
    found = agreement(answer(*candidate), answer(*baseline), batched=True, tolerance=tolerance)
    assert (found.disagreed, found.items) == (disagreed, items)


CLASSES = [[b"0.900000:1", b"0.100000:0"], [b"0.800000:0:cat", b"0.200000:1:dog"]]


@pytest.mark.parametrize(
    ("classes", "tolerance", "disagreed"),
    [
        (CLASSES, None, 0),
        ([[b"0.700000:1", b"0.300000:0"], [b"0.600000:0:cat", b"0.400000:1:dog"]], None, 0),
        ([[b"0.700000:0", b"0.300000:1"], [b"0.600000:0:cat", b"0.400000:1:dog"]], None, 1),
        ([[b"0.900001:1", b"0.099999:0"], [b"0.800000:0:cat", b"0.200000:1:dog"]], 0.001, 0),
        ([[b"0.910000:1", b"0.090000:0"], [b"0.800000:0:cat", b"0.200000:1:dog"]], 0.001, 1),
        ([[b"nan:1", b"0.100000:0"], [b"inf:0:cat", b"0.200000:1:dog"]], 0.001, 2),
        ([[b"0.900000:1"], [b"0.800000:0:cat"]], None, 2),
    ],
)
def test_classes_are_judged_as_the_scores_would_be(classes: Any, tolerance: float | None, disagreed: int) -> None:
    candidate, baseline = answer(("BYTES", classes)), answer(("BYTES", CLASSES))
    found = agreement(candidate, baseline, batched=True, tolerance=tolerance, texts=())
    assert (found.disagreed, found.items) == (disagreed, 2)
    same = agreement(candidate, candidate, batched=True, tolerance=tolerance, texts=())
    assert same.disagreed == 0


def test_classes_without_a_batch_are_one_item() -> None:
    candidate, baseline = answer(("BYTES", [b"0.7:2", b"0.3:1"])), answer(("BYTES", [b"0.9:2", b"0.1:0"]))
    found = agreement(candidate, baseline, batched=False, tolerance=None, texts=())
    assert (found.disagreed, found.items) == (0, 1)
    texts = agreement(candidate, baseline, batched=False, tolerance=None, texts=("y0",))
    assert (texts.disagreed, texts.items) == (1, 1)


def test_without_a_batch_a_request_is_one_item() -> None:
    scores = answer(("FP32", [0.1, 0.2, 0.9]))
    other = answer(("FP32", [0.9, 0.2, 0.1]))
    found = agreement(other, scores, batched=False, tolerance=None)
    assert (found.items, found.disagreed) == (1, 1)


def test_differences_are_of_all_numbers() -> None:
    found = agreement(answer(("FP32", [[1.0, 2.0]])), answer(("FP32", [[1.0, 2.5]])), batched=True, tolerance=None)
    assert (found.difference, found.largest) == (0.25, 0.5)


def metadata(inputs: list[tuple[str, str, tuple[int, ...]]]) -> ModelMetadata:
    tensors = tuple(TensorMetadata(*each) for each in inputs)
    return ModelMetadata("m", ("1",), tensors, (TensorMetadata("y", "FP32", (-1, 3)),), batched=True)


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ([("x", "FP32", (-1, 4))], ""),
        ([("x", "FP32", (8, 4))], ""),
        ([("z", "FP32", (-1, 4))], "its inputs are z, the baseline's x"),
        ([("x", "FP16", (-1, 4))], "it has x:FP16[-1,4], the baseline x:FP32[-1,4]"),
        ([("x", "FP32", (-1, 5))], "it has x:FP32[-1,5]"),
        ([("x", "FP32", (-1, 4, 1))], "it has x:FP32[-1,4,1]"),
    ],
)
def test_a_candidate_must_take_what_the_baseline_takes(
    inputs: list[tuple[str, str, tuple[int, ...]]], told: str
) -> None:
    found = unlike(metadata(inputs), metadata([("x", "FP32", (-1, 4))]))
    assert found.startswith(told)
    assert bool(found) == bool(told)
