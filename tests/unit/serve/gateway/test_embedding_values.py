"""A request for embeddings read, parted, and answered, without a server."""

from __future__ import annotations

import base64
import gc
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from serve.gateway.edge.embedding_values import Asked, Embedder, asked_of, embedder_of, embeddings_of
from serve.gateway.edge.lengths import parts_of
from serve.gateway.edge.listed import AT_ONCE, Work
from serve.gateway.errors import GatewayError, UpstreamBrokenError
from serve.gateway.oip.metadata import ModelMetadata, TensorMetadata
from serve.gateway.oip.protocol import parse_request
from serve.gateway.oip.tensors import encode_bytes

BY = Embedder("text", "embeddings", "tokens", 2, 3)
MODEL = ModelMetadata(
    "minilm", ("1",), (TensorMetadata("text", "BYTES", (-1, 1)),),
    (TensorMetadata("embeddings", "FP32", (-1, 2)), TensorMetadata("tokens", "INT32", (-1, 1))), True,
    max_batch_size=3, task="embeddings",
)  # fmt: skip


def answer(rows: list[list[float]], tokens: list[int] | None = None) -> tuple[bytes, bytes]:
    """Triton's, in the binary form."""
    arrays: dict[str, Any] = {"embeddings": ("FP32", np.array(rows, "<f4"))}
    if tokens is not None:
        arrays["tokens"] = ("INT32", np.array(tokens, "<i4")[:, None])
    head = orjson.dumps(
        {
            "model_name": "minilm", "model_version": "1",
            "outputs": [
                {"name": name, "datatype": kind, "shape": list(data.shape), "parameters": {"binary_data_size": data.nbytes}}
                for name, (kind, data) in arrays.items()
            ],
        }
    )  # fmt: skip
    return head + b"".join(data.tobytes() for _, data in arrays.values()), b"%d" % len(head)


def test_a_model_is_known_by_its_task_and_its_tensors_never_by_its_name() -> None:
    assert embedder_of(MODEL) == BY
    for other in (
        replace(MODEL, task=""),
        replace(MODEL, batched=False),
        replace(MODEL, inputs=(*MODEL.inputs, TensorMetadata("text_pair", "BYTES", (-1, 1)))),
        replace(MODEL, inputs=(TensorMetadata("input_ids", "INT64", (-1, -1)),)),
        replace(MODEL, outputs=(TensorMetadata("embeddings", "FP32", (-1, -1, 2)),)),
    ):
        assert embedder_of(other) is None
    assert embedder_of(replace(MODEL, outputs=MODEL.outputs[:1])) == replace(BY, tokens="")


def test_texts_are_parted_by_the_largest_batch_and_the_longest_come_first() -> None:
    texts = [b"a", "ä".encode(), b"c", b"d"]
    asked = Asked("m", tuple(texts), False, None)
    parts = parts_of(asked.sizes, BY.most, 4096)
    messages = [BY.message(asked, part.places) for part in parts]
    sent = [parse_request(message.body, message.header_length)[0] for message in messages]
    assert [tensor.shape for tensor in sent] == [(3, 1), (1, 1)]
    assert [part.places for part in parts] == [(1, 0, 2), (3,)]
    assert [text for tensor in sent for text in tensor.data.ravel()] == [texts[at] for at in (1, 0, 2, 3)]
    assert [part.cost for part in parts] == [6, 1]
    assert encode_bytes(texts)


@pytest.mark.parametrize(("most", "texts"), [(1, [b"a"] * 2048), (8, [b"a"] * 2048), (8, [b"a" * 1_000_000] * 3)])
def test_a_list_counts_for_what_it_makes_the_gateway_hold(most: int, texts: list[bytes]) -> None:
    by = replace(BY, most=most)
    gc.collect()
    tracemalloc.start()
    asked = Asked("m", tuple(bytes(bytearray(text)) for text in texts), False, None)
    work = Work(asked, by, None, parts_of(asked.sizes, most, 4096))
    messages = [by.message(asked, part.places) for part in work.parts[:AT_ONCE]]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert messages
    assert held < work.held


def test_answers_stand_where_their_texts_did_and_tokens_are_added() -> None:
    answers = [answer([[1, 2], [3, 4]], [5, 6]), answer([[5, 6]], [7])]
    told = orjson.loads(embeddings_of(answers, [(2, 0), (1,)], Asked("m", (), False, None), BY)[0])
    assert [each["embedding"] for each in told["data"]] == [[3, 4], [5, 6], [1, 2]]
    assert [each["index"] for each in told["data"]] == [0, 1, 2]
    assert told["usage"] == {"prompt_tokens": 18, "total_tokens": 18}


@pytest.mark.parametrize(
    ("row", "cut"), [([0.6, 0.0, 0.8], [1.0, 0.0]), ([3.0, 4.0, 12.0], [3.0, 4.0]), ([0.0, 0.0, 1.0], [0.0, 0.0])]
)
def test_an_embedding_that_is_cut_has_length_one_where_the_whole_has(row: list[float], cut: list[float]) -> None:
    by = replace(BY, width=3, shorter=(2,))
    told, _ = embeddings_of([answer([row], [1])], [(0,)], Asked("m", (), False, 2), by)
    assert orjson.loads(told)["data"][0]["embedding"] == pytest.approx(cut)


def test_lengths_that_are_none_shorter_are_not_offered() -> None:
    assert embedder_of(replace(MODEL, dimensions=(0, 1, 2, 5))) == replace(BY, shorter=(1,))


def test_base64_is_of_single_precision_as_openais_is() -> None:
    told = orjson.loads(embeddings_of([answer([[0.1, -2]])], [(0,)], Asked("m", (), True, None), BY)[0])
    assert (
        np.frombuffer(base64.b64decode(told["data"][0]["embedding"]), "<f4").tolist()
        == np.array([0.1, -2], np.float32).tolist()
    )
    assert told["usage"]["total_tokens"] == 0


@pytest.mark.parametrize(("rows", "count"), [([[1.0, 2.0]], 2), ([[1.0, float("nan")]], 1), ([[1.0, 2.0, 3.0]], 1)])
def test_an_answer_that_is_no_embeddings_is_never_passed_on(rows: list[list[float]], count: int) -> None:
    with pytest.raises(UpstreamBrokenError, match="no embeddings"):
        embeddings_of([answer(rows)], [[*range(count)]], Asked("m", (), False, None), BY)


@pytest.mark.parametrize(
    "values",
    [None, [], {}, {"model": "m"}, {"model": "m", "input": []}, {"model": "", "input": "a"}, {"model": "m", "input": [True]},
     {"model": "m", "input": 3}, {"model": "m", "input": [["a"]]}, {"model": "m", "input": "a", "dimensions": 0},
     {"model": "m", "input": "a", "": 1}],
)  # fmt: skip
def test_what_is_no_request_is_refused(values: Any) -> None:
    with pytest.raises(GatewayError) as caught:
        asked_of(values)
    assert caught.value.status == 400
