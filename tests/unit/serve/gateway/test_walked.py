"""What a client's JSON takes is bounded by its bytes, whatever stands in it: it is walked before numpy sees it."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.gateway.edge import embedding_values, rerank_values
from serve.gateway.edge.predict_values import message_of
from serve.gateway.errors import BadInputError, GatewayError
from serve.gateway.oip.contract import Contract
from serve.gateway.oip.metadata import ModelMetadata, TensorMetadata
from serve.gateway.oip.protocol import parse_request
from serve.gateway.oip.request import check_json_bytes, loaded, read_request
from serve.gateway.oip.tensors import DATATYPES, NoNumbersError, ProtocolError, plain_numbers
from serve.hooks.packed.values import to_array
from serve.load.ask.check import outputs_of_plain

TIMES, BESIDE = 100, 200_000  # bytes for a byte of the body, and what an answer to the shortest takes
NUMBERS = [name for name in DATATYPES if name != "BYTES"]
LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20) | st.just({"base64": "aGFsbG8="}) | st.just({"base64": 7})
)  # fmt: skip
VALUES = st.recursive(LEAVES, lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text(max_size=4), parts))


def model_of(datatype: str) -> ModelMetadata:
    spec = TensorMetadata("x", datatype, (-1, -1))
    return ModelMetadata("m", ("1",), (spec,), (), batched=True)


def peak_of(read: Callable[[], object]) -> int:
    """Bytes that are there at a time while something is read, or refused."""
    with suppress(GatewayError, ProtocolError):  # what is loaded once is loaded now
        read()
    tracemalloc.start()
    try:
        with suppress(GatewayError, ProtocolError):
            read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def readers(value: str, datatype: str) -> dict[str, Callable[[], object]]:
    """Every reader of clients' JSON, given the text of a value where numbers or texts are looked for."""
    model = model_of(datatype)
    tensor = f'{{"name": "x", "datatype": "{datatype}", "shape": [1, 7], "data": {value}}}'.encode()
    infer = b'{"inputs": [' + tensor + b"]}"
    texts = '{"model": "m", "query": "q", "FIELD": VALUE}'.replace("VALUE", value)
    embed, rank = texts.replace('"query": "q", "FIELD"', '"input"'), texts.replace("FIELD", "documents")
    return {
        "predict": lambda: message_of(loaded(b'{"x": %b}' % value.encode()), model, 0),
        "infer": lambda: read_request(infer, None, Contract.of(model)).json(),
        "tensors": lambda: parse_request(infer),
        "embeddings": lambda: embedding_values.asked_of(loaded(embed.encode())),
        "rerank": lambda: rerank_values.asked_of(loaded(rank.encode())),
    }


def check_all(value: str, datatype: str) -> None:
    for name, read in readers(value, datatype).items():
        assert peak_of(read) <= TIMES * len(value.encode()) + BESIDE, (name, value[:200])


@settings(max_examples=60, deadline=None)
@given(VALUES, VALUES, st.integers(1, 2000), st.sampled_from([0, 1, 30_000]), st.sampled_from([*NUMBERS, "BYTES"]))
def test_no_reader_takes_more_than_its_body_allows(unit: Any, last: Any, times: int, long: int, datatype: str) -> None:
    one = json.dumps(unit)
    times = max(1, min(times, 20_000 // len(one)))
    check_all(f'[{",".join([one] * times)},"{"a" * long}",{json.dumps(last)}]', datatype)


@pytest.mark.parametrize("datatype", ["FP32", "INT64", "BOOL", "BYTES"])
@pytest.mark.parametrize(
    "value",
    [
        [1] * 6000 + ["a" * 50_000],
        [True] * 6000 + ["a" * 50_000],
        [[1], [2]] * 3000 + [["a" * 50_000]],
        [None] * 6000 + ["a" * 50_000],
        [{"base64": "YQ=="}] * 2000 + [{"base64": "YWFh" * 12_000}],
        ["a"] * 6000 + ["é" * 25_000],
        [2**64 - 1, -1, 0.5] * 2000 + ["9" * 50_000],
        [[[]]] * 6000 + [[["a" * 50_000]]],
    ],
    ids=["number", "boolean", "in lists", "null", "base64", "texts", "large", "empty"],
)
def test_a_long_text_among_many_short_values_is_not_copied_for_each(value: Any, datatype: str) -> None:
    check_all(json.dumps(value, ensure_ascii=False, separators=(",", ":")), datatype)


@pytest.mark.parametrize(
    ("value", "kind"), [([1] * 5 + ["a"], "a mixture"), (["a"], "text"), ([True, 1], "a mixture"), ([{}], "a mixture")]
)
def test_what_is_not_numbers_alone_is_told(value: Any, kind: str) -> None:
    with pytest.raises(NoNumbersError) as caught:
        plain_numbers(value)
    assert caught.value.kind == kind
    with pytest.raises(BadInputError) as refused:
        message_of({"x": value}, model_of("FP32"), 0)
    assert kind in refused.value.why


@given(st.sampled_from(NUMBERS), st.integers(0, 3), st.integers(0, 3), st.data())
def test_numbers_are_what_numpy_makes_of_them(datatype: str, rows: int, columns: int, data: st.DataObject) -> None:
    dtype = DATATYPES[datatype]
    if dtype.kind in "iu":
        one: st.SearchStrategy[Any] = st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    else:
        one = st.booleans() if dtype.kind == "b" else st.floats(width=16, allow_nan=False, allow_infinity=False)
    value = [[data.draw(one) for _ in range(columns)] for _ in range(rows)]
    found = plain_numbers(orjson.loads(orjson.dumps(value)))
    assert np.array_equal(found.astype(dtype), np.array(value, dtype))
    assert found.shape == np.array(value, dtype).shape


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [([2**64 - 1, 0], "u8"), ([2**63 - 1, -(2**63)], "i8"), ([2**63, -1], "f8"), ([2**70, 0.5], "f8"), ([], "f8")],
)
def test_whole_numbers_stay_exact_as_far_as_there_is_a_type(numbers: list[Any], dtype: str) -> None:
    found = plain_numbers(numbers)
    assert (found.dtype, found.tolist()) == (np.dtype(dtype), [found.dtype.type(each) for each in numbers])


@pytest.mark.parametrize("value", [[[1], [1, 2]], [1, [2]], [[1], 2], [2**70]])
def test_lists_of_unlike_lengths_are_none(value: Any) -> None:
    with pytest.raises(ValueError, match=r"different lengths|64 bits"):
        plain_numbers(value)


UNITS = {
    "numbers": b"0.5,", "ones": b"1,", "texts": b'"a",', "words": b'"some words here",', "lists": b"[],",
    "objects": b'{"a":1},', "wide": '"😀",'.encode(), "wide words": ('"' + "a" * 60 + '😀",').encode(),
    "escaped": b'"' + b"a" * 60 + rb'\ud83d\ude00",', "empty names": b'{"":[]},', "deep": b"[" * 300 + b"]" * 300 + b",",
    "objects in objects": b'{"a":' * 300 + b"1" + b"}" * 300 + b",",
}  # fmt: skip


@pytest.mark.parametrize("kind", [*UNITS, "names", "one text", "one wide text"])
def test_json_becomes_no_more_than_is_counted(kind: str) -> None:
    text = b"[" + UNITS.get(kind, b"") * (400_000 // len(UNITS.get(kind, b"a"))) + b"1]"
    if kind == "names":
        text = b"{" + b",".join(b'"%06d":1' % at for at in range(40_000)) + b"}"
    elif kind not in UNITS:
        text = b'["' + b"a" * 400_000 + ("😀" if "wide" in kind else "a").encode() + b'"]'
    tracemalloc.start()
    try:
        value = loaded(text)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert value
    check_json_bytes(text, 120 * len(text))
    with pytest.raises(GatewayError) as caught:
        check_json_bytes(text, kept)
    assert caught.value.status == 413


def test_what_hooks_give_and_what_is_compared_is_not_padded_either() -> None:
    value = [1.5] * 6000 + ["a" * 50_000]

    def gives() -> None:
        with pytest.raises(ValueError, match=r"gave string\[6001\], wanted float32\[\?\]"):
            to_array(value, "array", "TYPE_FP32", [-1])

    assert peak_of(gives) < 4_000_000, "300 MB of texts"
    body = json.dumps({"outputs": {"y": value}}).encode()
    assert peak_of(lambda: outputs_of_plain(body)) < 8_000_000
