"""What of a request reaches Triton: nothing that does not fit the model, over HTTP and gRPC alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as messages

from serve.gateway.errors import BadRequestError, TooManyElementsError
from serve.gateway.grpc.request import check_message
from serve.gateway.oip.contract import Contract, UnfitError, check_framing
from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.oip.request import raw_head, read_request
from serve.gateway.oip.tensors import encode_bytes

METADATA = orjson.dumps(
    {
        "name": "m",
        "versions": ["1"],
        "platform": "",
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [-1, 4]},
            {"name": "t", "datatype": "BYTES", "shape": [-1, -1]},
            {"name": "k", "datatype": "INT64", "shape": [-1, 1]},
        ],
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "label", "datatype": "BYTES", "shape": [-1, 1]},
        ],
    }
)
CONFIG = orjson.dumps({"max_batch_size": 8, "input": [{"name": "x"}, {"name": "t", "optional": True},
                                                       {"name": "k", "optional": True}]})  # fmt: skip
CONTRACT = Contract.of(ModelMetadata.parse(METADATA, CONFIG))
GOOD: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2.5, 3, 4]}
TEXT: dict[str, Any] = {"name": "t", "datatype": "BYTES", "shape": [1, 2], "data": ["a", "b"]}
RAW = {"name": "x", "datatype": "FP32", "shape": [2, 4], "parameters": {"binary_data_size": 32}}


def read(request: Any, tail_bytes: int | None = None, contract: Contract = CONTRACT) -> dict[str, Any]:
    """What goes on to Triton."""
    head = request if isinstance(request, bytes) else orjson.dumps(request)
    found: dict[str, Any] = orjson.loads(read_request(head, tail_bytes, contract).json())
    return found


@pytest.mark.parametrize(
    "request_",
    [
        {"inputs": [GOOD]},
        {"id": "a", "inputs": [GOOD, TEXT], "outputs": [{"name": "y"}, {"name": "label"}]},
        {"inputs": [GOOD | {"shape": [2, 4], "data": [[1, 2, 3, 4], [5, 6, 7, 8]]}]},
        {"inputs": [GOOD], "outputs": [{"name": "y", "parameters": {"classification": 2}}]},
        {"inputs": [GOOD], "parameters": {"priority": 1, "sequence_id": 7, "mine": "x", "up": True, "share": 0.5}},
        {"inputs": [GOOD, {"name": "k", "datatype": "INT64", "shape": [1, 1], "data": [-(2**63)]}]},
    ],
)
def test_what_fits_goes_on_as_it_came(request_: dict[str, Any]) -> None:
    assert read(request_) == request_


def test_raw_tensors_are_known_by_their_size() -> None:
    assert read({"inputs": [RAW]}, 32) == {"inputs": [RAW]}
    mixed = {"inputs": [RAW, TEXT | {"shape": [2, 1]}]}
    assert read(mixed, 32) == mixed


WITHOUT = {key: value for key, value in GOOD.items() if key != "data"}


@pytest.mark.parametrize(
    ("request_", "tail", "why"),
    [
        ([], None, "no JSON object"),
        ({}, None, "lacks the input x"),
        ({"inputs": {}}, None, "no list of inputs"),
        ({"inputs": [1]}, None, "no JSON object"),
        ({"inputs": []}, None, "lacks the input x"),
        ({"inputs": [TEXT]}, None, "lacks the input x"),
        ({"inputs": [GOOD, GOOD]}, None, "comes twice"),
        ({"inputs": [GOOD | {"name": "z"}]}, None, "no input 'z'"),
        ({"inputs": [GOOD | {"name": ["x"]}]}, None, "no input"),
        ({"inputs": [GOOD | {"datatype": "FP64"}]}, None, "is FP32, not 'FP64'"),
        ({"inputs": [GOOD | {"datatype": "BYTES"}]}, None, "is FP32"),
        ({"inputs": [GOOD | {"shape": [4]}]}, None, "has 2 dimensions"),
        ({"inputs": [GOOD | {"shape": [1] * 40_000}]}, None, "has 2 dimensions"),
        ({"inputs": [GOOD | {"shape": [1, 5]}]}, None, "has the shape"),
        ({"inputs": [GOOD | {"shape": ["1", 4]}]}, None, "has the shape"),
        ({"inputs": [GOOD | {"shape": [1.0, 4]}]}, None, "has the shape"),
        ({"inputs": [GOOD | {"shape": [True, 4]}]}, None, "has the shape"),
        ({"inputs": [GOOD | {"shape": [-1, 4]}]}, None, "has the shape"),
        ({"inputs": [GOOD | {"shape": "ab"}]}, None, "no shape"),
        ({"inputs": [GOOD | {"shape": [["a", 200_000_000], 4]}]}, None, "has the shape"),
        ({"inputs": [GOOD | {"shape": [0, 4], "data": []}]}, None, "batch-size must be <= 8"),
        ({"inputs": [GOOD | {"shape": [9, 4], "data": [0] * 36}]}, None, "batch-size must be <= 8"),
        ({"inputs": [GOOD | {"shape": [2**40, 4]}]}, None, "batch-size must be <= 8"),
        ({"inputs": [GOOD, TEXT | {"shape": [1, 2**40]}]}, None, f"{2**40} elements by its shape, and 2"),
        ({"inputs": [GOOD, TEXT | {"shape": [1, 2**62]}]}, None, "elements by its shape, and 2"),
        ({"inputs": [GOOD, TEXT | {"shape": [1, 2**63]}]}, None, "has the shape"),
        ({"inputs": [GOOD, TEXT | {"shape": [2, 1]}]}, None, "batches of different sizes"),
        ({"inputs": [GOOD | {"data": [1, 2, 3]}]}, None, "4 elements by its shape, and 3"),
        ({"inputs": [GOOD | {"data": [[1, 2], 3, 4]}]}, None, "not of its datatype"),
        ({"inputs": [GOOD | {"data": [[[1, 2, 3, 4]]]}]}, None, "nested deeper"),
        ({"inputs": [GOOD | {"data": ["1", 2, 3, 4]}]}, None, "not of its datatype"),
        ({"inputs": [GOOD | {"data": [None, 2, 3, 4]}]}, None, "not of its datatype"),
        ({"inputs": [GOOD | {"data": {"0": 1}}]}, None, "no data"),
        ({"inputs": [WITHOUT]}, None, "no data"),
        (
            {"inputs": [GOOD, TEXT | {"data": None, "base64": "AA=="}]},
            None,
            "no data; base64, as examples have it, is for",
        ),
        ({"inputs": [WITHOUT | {"parameters": {"binary_data_size": 16}}]}, None, "it is in the JSON"),
        ({"inputs": [GOOD | {"parameters": {"binary_data_size": 16}}]}, 16, "it is in the JSON"),
        ({"inputs": [RAW]}, 31, "32 bytes, and 31 follow"),
        ({"inputs": [RAW | {"parameters": {"binary_data_size": 31}}]}, 31, "32 bytes by its shape, and 31"),
        ({"inputs": [RAW | {"parameters": {"binary_data_size": -1}}]}, 32, "no number of bytes"),
        ({"inputs": [RAW | {"parameters": {"binary_data_size": True}}]}, 32, "no number of bytes"),
        ({"inputs": [RAW | {"parameters": {"shared_memory_region": "r"}}]}, 0, "keys with admin"),
        ({"inputs": [RAW | {"parameters": []}]}, 32, "no object"),
        ({"inputs": [GOOD], "parameters": {"a": [1]}}, None, "neither a number nor a text"),
        ({"inputs": [GOOD], "parameters": {"a": "x" * 5000}}, None, "too large"),
        ({"inputs": [GOOD], "parameters": {"a": 2**63}}, None, "too large"),
        ({"inputs": [GOOD], "parameters": {str(n): n for n in range(65)}}, None, "more than 64"),
        ({"inputs": [GOOD], "id": 5}, None, "its id"),
        ({"inputs": [GOOD], "outputs": [{"name": "z"}]}, None, "no output 'z'"),
        ({"inputs": [GOOD], "outputs": [{}]}, None, "no output"),
        ({"inputs": [GOOD], "outputs": [{"name": "y"}, {"name": "y"}]}, None, "asked for twice"),
        ({"inputs": [GOOD], "outputs": "y"}, None, "no list"),
        ({"inputs": [GOOD], "outputs": None}, None, "no list"),
        ({"inputs": [GOOD], "outputs": [{"name": "label", "parameters": {"classification": 1}}]}, None, "no classes"),
        (
            {"inputs": [GOOD], "outputs": [{"name": "y", "parameters": {"classification": 0}}]},
            None,
            "number of classes",
        ),
        ({"inputs": [GOOD], "outputs": [{"name": "y", "parameters": {"classification": 10**9}}]}, None, "number of"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(request_: Any, tail: int | None, why: str) -> None:
    with pytest.raises(UnfitError) as caught:
        read(request_, tail)
    assert why in caught.value.why
    assert len(caught.value.body) < 1000


WRONG = [
    ("priority", "abc"), ("priority", True), ("priority", -1), ("priority", 1.5), ("timeout", "1"), ("timeout", -1),
    ("timeout", 0.5), ("sequence_start", 1), ("sequence_end", "true"), ("sequence_id", -3), ("sequence_id", True),
    ("sequence_id", 1.5), ("sequence_id", "x" * 129), ("binary_data_output", "yes"), ("triton_mine", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_tritons_own_parameters_are_of_its_types(name: str, value: Any) -> None:
    with pytest.raises(UnfitError) as caught:
        read({"inputs": [GOOD], "parameters": {name: value}})
    assert name.partition("_")[0] in (caught.value.why or "")
    field = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
    asked = message(inputs=[tensor(fp32_contents=[1.0] * 4)])
    setattr(asked.parameters[name], field, value)
    with pytest.raises(UnfitError):
        check_message(asked, CONTRACT, shared_memory=False)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"{",
        b"[" * 50_000 + b"]" * 50_000,
        b'{"inputs":' + b"[" * 50_000,
        b"\xff\xfe",
        b'{"inputs":[NaN]}',
        b"{}{}",
    ],
)
def test_what_is_no_json_is_refused(head: bytes) -> None:
    with pytest.raises(BadRequestError):
        read(head)


def test_two_readers_of_one_json_read_the_same() -> None:
    good = orjson.dumps([GOOD])
    twice = b'{"inputs":%b,"inputs":%b}' % (orjson.dumps([GOOD | {"shape": [2**40, 4]}]), good)
    assert read(twice) == {"inputs": [GOOD]}
    assert read({"inputs": [GOOD | {"more": {"deep": []}}], "model_name": "other"}) == {"inputs": [GOOD]}


def test_a_bound_on_elements_is_kept_whatever_the_dimensions_allow() -> None:
    bounded = Contract.of(ModelMetadata.parse(METADATA, CONFIG), 8)
    assert read({"inputs": [RAW]}, 32, bounded)
    with pytest.raises(TooManyElementsError):
        read({"inputs": [RAW | {"shape": [3, 4], "parameters": {"binary_data_size": 48}}]}, 48, bounded)


@given(st.lists(st.binary(max_size=20), max_size=8), st.binary(max_size=6), st.integers(0, 60))
def test_texts_are_framed_to_the_byte(elements: list[bytes], more: bytes, cut: int) -> None:
    raw = encode_bytes(elements)
    check_framing("t", raw, len(elements))
    for broken, count in ((raw + more, len(elements)), (raw[:cut], len(elements)), (raw, len(elements) + 1)):
        if broken != raw or count != len(elements):
            with pytest.raises(UnfitError):
                check_framing("t", broken, count)


def test_a_raw_body_gets_the_shape_that_its_size_tells() -> None:
    one = Contract.of(
        ModelMetadata.parse(
            orjson.dumps(
                {"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}], "outputs": []}
            ),
            b'{"max_batch_size": 8}',
        )
    )
    head, body = raw_head(bytes(12), one)
    assert read(head, len(body), one)["inputs"][0]["shape"] == [1, 3]
    head, body = raw_head(bytes(13), one)
    with pytest.raises(UnfitError):
        read(head, len(body), one)
    with pytest.raises(UnfitError, match="does not fit"):
        raw_head(bytes(12), CONTRACT)


def message(**fields: Any) -> Any:
    return messages.ModelInferRequest(model_name="m", **fields)


def tensor(name: str = "x", datatype: str = "FP32", shape: tuple[int, ...] = (1, 4), **contents: Any) -> Any:
    filled = messages.InferTensorContents(**contents) if contents else None
    return messages.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape, contents=filled)


def test_over_grpc_the_same_fits() -> None:
    four = [1.0, 2.0, 3.0, 4.0]
    text = tensor("t", "BYTES", (1, 2))
    for fine in (
        message(inputs=[tensor(fp32_contents=four)]),
        message(inputs=[tensor()], raw_input_contents=[bytes(16)]),
        message(inputs=[tensor(), text], raw_input_contents=[bytes(16), encode_bytes([b"a", b"bc"])]),
        message(inputs=[tensor(fp32_contents=four), tensor("t", "BYTES", (1, 2), bytes_contents=[b"a", b"b"])]),
    ):
        check_message(fine, CONTRACT, shared_memory=False)


CLASSES = {"classification": messages.InferParameter(int64_param=1)}
REGION = {"shared_memory_region": messages.InferParameter(string_param="r")}


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (message(), "lacks the input x"),
        (message(inputs=[tensor("z")]), "no input 'z'"),
        (message(inputs=[tensor(shape=(2**40, 4))], raw_input_contents=[bytes(16)]), "batch-size must be <= 8"),
        (message(inputs=[tensor(shape=(-1, 4))], raw_input_contents=[bytes(16)]), "has the shape"),
        (message(inputs=[tensor()]), "and 0 of its type"),
        (message(inputs=[tensor(int_contents=[1, 2, 3, 4])]), "and 0 of its type"),
        (message(inputs=[tensor(fp32_contents=[1.0] * 3)]), "and 3 of its type"),
        (message(inputs=[tensor()], raw_input_contents=[bytes(15)]), "16 bytes by its shape, and 15"),
        (message(inputs=[tensor()], raw_input_contents=[bytes(16), b""]), "2 raw inputs, and 1"),
        (message(inputs=[tensor(), tensor("k", "INT64", (1, 1))], raw_input_contents=[bytes(16)]), "no raw data"),
        (message(inputs=[tensor(fp32_contents=[1.0] * 4)], raw_input_contents=[bytes(16)]), "its data twice"),
        (message(inputs=[tensor(), tensor("t", "BYTES", (1, 1))], raw_input_contents=[bytes(16), b"\xff\0\0\0a"]),
         "longer than the data"),
        (message(inputs=[tensor(fp32_contents=[1.0] * 4)], parameters=REGION), "keys with admin"),
        (message(inputs=[tensor(fp32_contents=[1.0] * 4)], outputs=[{"name": "label", "parameters": CLASSES}]),
         "no classes"),
        (message(inputs=[tensor(fp32_contents=[1.0] * 4)], outputs=[{"name": "z"}]), "no output 'z'"),
        (message(inputs=[tensor(fp32_contents=[1.0] * 4)], parameters={"a": messages.InferParameter()}), "no value"),
    ],
)  # fmt: skip
def test_over_grpc_the_same_is_refused(broken: Any, why: str) -> None:
    with pytest.raises(UnfitError) as caught:
        check_message(broken, CONTRACT, shared_memory=False)
    assert why in caught.value.why


LARGEST, ROUNDED_DOWN, ROUNDED_UP = 3.4028234663852886e38, 3.4028235677973362e38, 3.4028235677973366e38


@pytest.mark.parametrize("number", [LARGEST, ROUNDED_DOWN, 2**64 - 1, 1e-300, 0, ROUNDED_UP, 1e39, 10**40, 1.7e308])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("nested", [False, True])
def test_a_number_of_json_that_fp32_does_not_hold_is_refused(number: float, sign: int, nested: bool) -> None:
    sign = 1 if type(number) is int else sign
    row = [1, LARGEST * -sign, number * sign, -2.5]
    data = b"[%s]" % b",".join(str(each).encode() for each in row)
    item = orjson.dumps(GOOD | {"data": orjson.Fragment(b"[%s]" % data if nested else data)})
    body = b'{"inputs":[%s]}' % item
    with np.errstate(over="ignore"):
        holds = bool(np.isfinite(np.float32(number)))
    assert holds == (number < ROUNDED_UP)
    if holds:
        assert read(body)
        return
    with pytest.raises(UnfitError) as caught:
        read(body)
    assert caught.value.why == "a number is too large for FP32"


def ranked(shape: list[int], most: int, *, told: bool = True) -> Contract:
    """Of a model whose output "y" has this shape, and whose input "v" is of any length, as its config says."""
    tensors = {"inputs": [{"name": "v", "datatype": "FP32", "shape": [-1, -1]}],
               "outputs": [{"name": "y", "datatype": "FP32", "shape": shape}]}  # fmt: skip
    config = None if not told else orjson.dumps({"max_batch_size": most})
    return Contract.of(ModelMetadata.parse(orjson.dumps({"name": "m", **tensors}), config))


@pytest.mark.parametrize(
    ("contract", "length", "why"),
    [
        (ranked([-1, 3], 8), 2, None),
        (ranked([-1], 8), 2, None),
        (ranked([2, 3], 0), 2, None),
        (ranked([-1, -1], 8), 2, "may be empty"),
        (ranked([-1, 0], 8), 2, "may be empty"),
        (ranked([-1, 3, -1], 8), 2, "may be empty"),
        (ranked([-1, 3], 0), 2, "may be empty"),
        (ranked([-1, 3], 0, told=False), 2, "may be empty"),
        (ranked([-1, 3], 8), 0, "an input is empty"),
        (ranked([2, 3], 0), 0, "an input is empty"),
    ],
)
@pytest.mark.parametrize("how", ["JSON", "raw", "gRPC"])
def test_an_output_that_may_be_empty_is_not_asked_for_its_largest(
    contract: Contract, length: int, why: str | None, how: str
) -> None:
    item: dict[str, Any] = {"name": "v", "datatype": "FP32", "shape": [1, length]}
    outputs = [{"name": "y", "parameters": {"classification": 1}}]
    check: Callable[[], object]
    if how == "JSON":
        check = partial(read, {"inputs": [item | {"data": [1.0] * length}], "outputs": outputs}, None, contract)
    elif how == "raw":
        size = 4 * length
        check = partial(
            read, {"inputs": [item | {"parameters": {"binary_data_size": size}}], "outputs": outputs}, size, contract
        )
    else:
        asked = message(inputs=[item], raw_input_contents=[bytes(4 * length)],
                        outputs=[{"name": "y", "parameters": CLASSES}])  # fmt: skip
        check = partial(check_message, asked, contract, shared_memory=False)
    if why is None:
        check()
        return
    with pytest.raises(UnfitError) as caught:
        check()
    assert why in caught.value.why
    assert "no classes to rank" in caught.value.why


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300)
@given(st.data())
def test_any_json_is_read_or_refused(data: st.DataObject) -> None:
    item: dict[str, Any] = {**GOOD, "parameters": {}}
    for _ in range(data.draw(st.integers(0, 3))):
        item[data.draw(st.sampled_from([*item, "other"]))] = data.draw(PLAIN)
    request: dict[str, Any] = {"inputs": [item], "outputs": [{"name": "y"}], "parameters": {}}
    for _ in range(data.draw(st.integers(0, 2))):
        request[data.draw(st.sampled_from([*request, "id", "other"]))] = data.draw(PLAIN)
    try:
        found = read(request, data.draw(st.none() | st.integers(0, 64)))
    except (BadRequestError, TooManyElementsError):
        return
    (kept,) = found["inputs"]
    assert kept["shape"][1] == 4
    assert 1 <= kept["shape"][0] <= 8
    size = kept.get("parameters", {}).get("binary_data_size")
    assert size == 16 * kept["shape"][0] or len(orjson.dumps(kept["data"]).split(b",")) == 4 * kept["shape"][0]


@pytest.mark.parametrize(
    ("decoupled", "parameters", "heeds"),
    [
        (True, {}, False),
        (True, {"heeds_cancellation": "true"}, True),
        (True, {"heeds_cancellation": "no"}, False),
        (True, {"stages": "{}"}, True),
        (False, {"stages": "{}"}, False),
    ],
    ids=["says nothing", "says so", "says no", "hooks that yield", "hooks that answer once"],
)
def test_whether_a_model_ends_where_it_is_cancelled_is_told_by_its_configuration(
    decoupled: bool, parameters: dict[str, str], heeds: bool
) -> None:
    config = orjson.loads(CONFIG) | {
        "model_transaction_policy": {"decoupled": decoupled},
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
    }
    assert ModelMetadata.parse(METADATA, orjson.dumps(config)).heeds_cancellation is heeds
