"""A request to rank documents read, sent, and answered, without a server."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.gateway.edge.rerank_values import LONGEST_QUERY, Asked, Judge, asked_of, fitting, judge_of, ranking_of
from serve.gateway.errors import GatewayError, UpstreamBrokenError
from serve.gateway.oip.metadata import ModelMetadata, TensorMetadata
from serve.gateway.oip.protocol import parse_request

BY = Judge("value", "tokens", 3)
TEXTS = (TensorMetadata("text", "BYTES", (-1, 1)), TensorMetadata("text_pair", "BYTES", (-1, 1)))
MODEL = ModelMetadata(
    "judge", ("1",), TEXTS, (TensorMetadata("value", "FP32", (-1, 1)), TensorMetadata("tokens", "INT32", (-1, 1))), True,
    max_batch_size=3, task="sequence-classification",
)  # fmt: skip
BODY: dict[str, Any] = {"model": "m", "query": "a", "documents": ["b", {"text": "ä"}]}


def answer(numbers: list[float], tokens: int = 4) -> tuple[bytes, None]:
    """Triton's, in JSON."""
    shape = [len(numbers), 1]
    outputs = [
        {"name": "value", "datatype": "FP32", "shape": shape, "data": numbers},
        {"name": "tokens", "datatype": "INT32", "shape": shape, "data": [tokens] * len(numbers)},
    ]
    return orjson.dumps({"model_name": "judge", "model_version": "1", "outputs": outputs}), None


def asked(count: int, top_n: int | None = None, whole: bool = False) -> Asked:
    return Asked("m", b"a", tuple(b"document %d" % at for at in range(count)), top_n or count, whole)


def test_a_cross_encoder_is_known_by_its_task_and_its_tensors_never_by_its_name() -> None:
    assert judge_of(MODEL) == judge_of(replace(MODEL, inputs=TEXTS[::-1])) == BY
    for other in (
        replace(MODEL, task="embeddings"),
        replace(MODEL, batched=False),
        replace(MODEL, inputs=TEXTS[:1]),
        replace(MODEL, inputs=(TEXTS[0], TensorMetadata("other", "BYTES", (-1, 1)))),
        replace(MODEL, outputs=(TensorMetadata("scores", "FP32", (-1, 3)),)),
        replace(MODEL, outputs=(TensorMetadata("a", "FP32", (-1, 1)), TensorMetadata("b", "FP32", (-1, 1)))),
    ):
        assert judge_of(other) is None
        with pytest.raises(GatewayError, match="does not rank"):
            fitting(asked(1), other)
    with pytest.raises(GatewayError, match="does not exist"):
        fitting(asked(1), None)


def test_each_document_goes_with_the_query() -> None:
    message = BY.message(asked(3), (2, 0))
    first, second = parse_request(message.body, message.header_length)
    assert (first.name, first.data.ravel().tolist()) == ("text", [b"a", b"a"])
    assert (second.name, second.data.ravel().tolist()) == ("text_pair", [b"document 2", b"document 0"])


def test_documents_are_texts_or_objects_with_a_text() -> None:
    found = asked_of(BODY | {"top_n": 5, "return_documents": True})
    assert found == Asked("m", b"a", (b"b", "ä".encode()), 2, True)
    assert found.sizes == [2, 3]
    assert found.kept() == found
    assert asked_of(BODY).kept().held == 1


def test_the_best_come_first_equals_as_they_came_and_tokens_are_added() -> None:
    answers = [answer([3.0, -1.0]), answer([3.0])]
    told = orjson.loads(ranking_of(answers, [(2, 0), (1,)], asked(3, whole=True), BY)[0])
    assert [each["index"] for each in told["results"]] == [1, 2, 0]
    assert [each["document"]["text"] for each in told["results"]] == ["document 1", "document 2", "document 0"]
    assert told["results"][0]["relevance_score"] == pytest.approx(1 / (1 + math.exp(-3)))
    assert told["usage"] == {"prompt_tokens": 12, "total_tokens": 12}
    short = orjson.loads(ranking_of(answers, [(2, 0), (1,)], asked(3, top_n=1), BY)[0])
    assert [each.keys() for each in short["results"]] == [{"index", "relevance_score"}]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_scores_are_between_0_and_1_and_in_the_order_of_the_models_numbers(numbers: list[float]) -> None:
    told = orjson.loads(ranking_of([answer(numbers)], [range(len(numbers))], asked(len(numbers)), BY)[0])
    scores = [each["relevance_score"] for each in told["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)
    best = [numbers[each["index"]] for each in told["results"]]
    assert best == sorted(best, reverse=True)


@pytest.mark.parametrize(("numbers", "count"), [([1.0], 2), ([1.0, 2.0], 1)])
def test_an_answer_that_is_no_ranking_is_never_passed_on(numbers: list[float], count: int) -> None:
    with pytest.raises(UpstreamBrokenError, match="no ranking"):
        ranking_of([answer(numbers)], [range(count)], asked(count), BY)
    body = answer([1.0])[0].replace(b"1.0", b"1e39")
    with pytest.raises(UpstreamBrokenError), np.errstate(over="ignore"):
        ranking_of([(body, None)], [range(1)], asked(1), BY)


WRONG: list[tuple[Any, str]] = [
    ([], "no JSON object"),
    (BODY | {"model": ""}, "no model is named"),
    ({"model": "m", "documents": ["b"]}, "no query"),
    ({"model": "m", "query": "a"}, "no documents"),
    (BODY | {"query": " "}, "query is empty"),
    (BODY | {"query": ["a"]}, "query is no text"),
    (BODY | {"query": "a" * (LONGEST_QUERY + 1)}, "query is too long"),
    (BODY | {"documents": []}, "documents is empty"),
    (BODY | {"documents": "b"}, "documents is no list"),
    (BODY | {"documents": ["b", ""]}, "documents 1 is empty"),
    (BODY | {"documents": [{"text": "b", "title": "c"}]}, "documents 0 is no text"),
    (BODY | {"documents": [None]}, "documents 0 is no text"),
    (BODY | {"documents": ["b"] * 2049}, "documents is too long"),
    (BODY | {"top_n": 0}, "top_n is no number above 0"),
    (BODY | {"top_n": True}, "top_n is no number above 0"),
    (BODY | {"return_documents": "yes"}, "neither true nor false"),
    (BODY | {"max_chunks_per_doc": 2}, "is not known here"),
]


@pytest.mark.parametrize(("body", "told"), WRONG)
def test_what_is_no_request_is_refused(body: Any, told: str) -> None:
    with pytest.raises(GatewayError, match=told) as caught:
        asked_of(body)
    assert caught.value.status == 400
