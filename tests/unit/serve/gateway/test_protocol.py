"""Tensors and messages survive the way out and back."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.gateway.oip.protocol import build_request, parse_request, parse_response
from serve.gateway.oip.tensors import (
    DATATYPES,
    ProtocolError,
    Tensor,
    decode_bytes,
    encode_bytes,
    from_raw,
    object_array,
    to_raw,
)

NUMBERS = tuple(set(DATATYPES) - {"BYTES", "BF16"})
SHAPES = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def tensors(draw: st.DrawFn, *, text: bool = False) -> Tensor:
    datatype = draw(st.sampled_from(sorted({"BYTES", *NUMBERS} - ({"FP16"} if text else set()))))
    shape = draw(SHAPES)
    size = int(np.prod(shape, dtype=int))
    name = draw(st.text(min_size=1, max_size=8))
    if datatype == "BYTES":
        element = st.text(max_size=5).map(str.encode) if text else st.binary(max_size=5)
        return Tensor(name, datatype, object_array(draw(st.lists(element, min_size=size, max_size=size)), name, shape))
    dtype = DATATYPES[datatype]
    raw = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    data = np.frombuffer(raw, dtype=np.uint8 if datatype == "BOOL" else dtype)
    data = data % 2 == 1 if datatype == "BOOL" else data
    if text and dtype.kind == "f":
        data = np.nan_to_num(data)  # JSON has no NaN
    return Tensor(name, datatype, data.reshape(shape))


def assert_same(one: Tensor, other: Tensor) -> None:
    assert (one.name, one.datatype, one.shape) == (other.name, other.datatype, other.shape)
    np.testing.assert_array_equal(one.data, other.data)


@given(tensors())
def test_raw_round_trip(tensor: Tensor) -> None:
    assert_same(from_raw(tensor.name, tensor.datatype, tensor.shape, to_raw(tensor)), tensor)


@given(st.lists(tensors(), max_size=3))
def test_binary_round_trip(inputs: list[Tensor]) -> None:
    message = build_request(inputs)
    assert message.header_length is not None
    assert dict(message.headers)[b"inference-header-content-length"] == str(message.header_length).encode()
    for one, other in zip(parse_request(message.body, message.header_length), inputs, strict=True):
        assert_same(one, other)


@given(st.lists(tensors(text=True), max_size=3))
def test_json_round_trip(inputs: list[Tensor]) -> None:
    message = build_request(inputs, binary=False)
    assert message.header_length is None
    for one, other in zip(parse_request(message.body), inputs, strict=True):
        assert_same(one, other)


@given(st.lists(st.binary(max_size=20)))
def test_bytes_elements(elements: list[bytes]) -> None:
    raw = encode_bytes(elements)
    assert len(raw) == sum(4 + len(element) for element in elements)
    assert decode_bytes(raw) == elements


@given(st.binary(max_size=40))
def test_rubbish_is_no_bytes_tensor_or_a_whole_one(raw: bytes) -> None:
    try:
        elements = decode_bytes(raw)
    except ProtocolError:
        return
    assert encode_bytes(elements) == raw


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5))
def test_bfloat16_keeps_eight_bits(values: list[float]) -> None:
    data = np.array(values, np.float32)
    back = from_raw("x", "BF16", data.shape, to_raw(Tensor("x", "BF16", data))).data
    with np.errstate(invalid="ignore", over="ignore"):
        close = np.abs(back - data) <= np.maximum(np.abs(data) * 2.0**-8, 2.0**-133)
    assert np.all(close | (back == data) | np.isinf(back))
    assert np.isnan(from_raw("x", "BF16", [1], to_raw(Tensor("x", "BF16", np.array([np.nan], np.float32)))).data).all()


def test_the_response_of_either_form() -> None:
    outputs = {"name": "y", "datatype": "INT64", "shape": [1, 2]}
    header = {"model_name": "m", "model_version": "3"}
    plain = orjson.dumps({**header, "outputs": [{**outputs, "data": [1, 2]}]})
    text = orjson.dumps({**header, "outputs": [{**outputs, "parameters": {"binary_data_size": 16}}]})
    raw = np.array([1, 2], "<i8").tobytes()
    for response in (parse_response(plain), parse_response(text + raw, len(text))):
        assert (response.model_name, response.model_version) == ("m", "3")
        assert response.outputs[0].data.tolist() == [[1, 2]]


def test_an_example_may_hold_one_element_as_base64() -> None:
    item = {"name": "image", "datatype": "BYTES", "shape": [1, 1], "base64": base64.b64encode(b"\xff\0").decode()}
    (tensor,) = parse_request(orjson.dumps({"inputs": [item]}))
    assert tensor.data.tolist() == [[b"\xff\0"]]


X: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}


@pytest.mark.parametrize(
    "header",
    [
        [],
        {},
        {"inputs": {}},
        {"inputs": [[]]},
        {"inputs": [X | {"datatype": "FP31"}]},
        {"inputs": [X | {"shape": [-1]}]},
        {"inputs": [X | {"shape": [True, 2]}]},
        {"inputs": [X | {"shape": [3]}]},
        {"inputs": [X | {"data": ["a", "b"]}]},
        {"inputs": [X | {"data": [[1], [2, 3]]}]},
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}]},
        {"inputs": [X | {"parameters": {"binary_data_size": 8}}]},
        {"inputs": [X | {"parameters": {"binary_data_size": "8"}}]},
        {"inputs": [X | {"datatype": "UINT8", "data": [1, 300]}]},
        {"inputs": [X | {"datatype": "BYTES", "data": [1, 2]}]},
        {"inputs": [X | {"datatype": "BYTES", "base64": "!"}]},
    ],
)
def test_no_request(header: object) -> None:
    with pytest.raises(ProtocolError):
        parse_request(orjson.dumps(header))


def test_no_request_at_all() -> None:
    for body, length in ((b"{", None), (b"{}", 3), (b"{}", -1), (b'{"inputs":[]}x', 13)):
        with pytest.raises(ProtocolError):
            parse_request(body, length)


def test_what_has_no_json_form() -> None:
    half = Tensor("x", "FP16", np.zeros(1, np.float16))
    image = Tensor("x", "BYTES", object_array([b"\xff"], "x", [1]))
    for tensor in (half, image):
        with pytest.raises(ProtocolError, match="binary form"):
            build_request([tensor], binary=False)
    with pytest.raises(ProtocolError, match="can't hold"):
        Tensor("x", "FP32", np.zeros(1, np.float64))
