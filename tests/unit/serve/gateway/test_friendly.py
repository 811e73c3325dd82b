"""Plain values in and out: what fits a model, and how it is told when it does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from serve.gateway.edge.predict_values import answer_of
from serve.gateway.errors import BadInputError, UnsupportedMediaError
from serve.gateway.oip.friendly import from_file, from_values, to_values
from serve.gateway.oip.metadata import (
    MOST_MADE_UP,
    ModelMetadata,
    TensorMetadata,
    example_elements,
    example_json,
    example_request,
)
from serve.gateway.oip.protocol import build_request
from serve.gateway.oip.tensors import DATATYPES, ProtocolError, Tensor, object_array
from serve.gateway.site.openapi import example_values, with_models

CONFIG = b'{"max_batch_size": 8}'


def model(*inputs: TensorMetadata, batched: bool = True) -> ModelMetadata:
    return ModelMetadata("m", ("1",), inputs, (), batched)


X = TensorMetadata("x", "FP32", (-1, 2))
N = TensorMetadata("n", "INT8", (-1, 1))
TEXT = TensorMetadata("text", "BYTES", (-1, 1))


@pytest.mark.parametrize(
    ("spec", "value", "item", "want"),
    [
        (X, [1, 2.5], True, [[1, 2.5]]),
        (X, [[1, 2], [3, 4]], False, [[1, 2], [3, 4]]),
        (N, [-128], True, [[-128]]),
        (TEXT, ["é"], True, [["é".encode()]]),
        (TEXT, "é", True, [["é".encode()]]),
        (N, 7, True, [[7]]),
        (N, [7, 8], False, [[7], [8]]),
        (TEXT, ["a", "b"], False, [[b"a"], [b"b"]]),
        (TEXT, [["a"], [{"base64": "/w=="}]], False, [[b"a"], [b"\xff"]]),
        (TensorMetadata("b", "BOOL", (-1, 2)), [True, False], True, [[True, False]]),
        (TensorMetadata("v", "INT64", (-1, -1)), [1, 2, 3], True, [[1, 2, 3]]),
        (TensorMetadata("u", "UINT64", (-1, 2)), [0, 2**63 + 1], True, [[0, 2**63 + 1]]),
        (TensorMetadata("h", "FP16", (-1, 1)), [0.5], True, [[0.5]]),
    ],
)
def test_one_item_or_a_batch(spec: TensorMetadata, value: Any, item: bool, want: list[Any]) -> None:
    (tensor,), is_item = from_values(model(spec), {spec.name: value})
    assert (tensor.datatype, tensor.data.dtype, is_item) == (spec.datatype, DATATYPES[spec.datatype], item)
    assert tensor.data.tolist() == want


def test_the_form_that_the_manual_and_the_errors_show_for_an_image_is_read() -> None:
    """The example is a list of tensors, as /infer takes it: whoever posts it here is told the form that works."""
    image = TensorMetadata("image", "BYTES", (-1, 1))
    (shown,) = re.findall(r'`(\{"image": \{"base64": "[^.]*?"\}\})`', Path("docs/gateway.md").read_text())
    (tensor,), _ = from_values(model(image), json.loads(shown))
    assert tensor.data.tolist() == [[b"\x89PNG\r\n\x1a\n"]]
    example = {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1, 1], "base64": "iVBORw0KGgo="}]}
    for wrong in (example, {"image": 7}):
        with pytest.raises(BadInputError) as caught:
            from_values(model(image), wrong)
        assert '{"image": {"base64": "..."}' in caught.value.mend
        assert "a request that works" not in caught.value.mend
        assert ("/v2/models/m/infer" in caught.value.mend) == (wrong is example)


def test_a_model_without_a_batch_takes_its_whole_shape() -> None:
    spec = TensorMetadata("x", "FP32", (2, 2))
    (tensor,), item = from_values(model(spec, batched=False), {"x": [[1, 2], [3, 4]]})
    assert (tensor.shape, item) == ((2, 2), False)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "'x' is missing, 'n' is missing"),
        ({"x": [1, 2], "n": [1], "z": 1}, "'z' is none of them"),
        ({"x": [1, 2, 3], "n": [1]}, r"takes the shape \[2\] \(or a batch of them, \[-1, 2\]\), this has \[3\]"),
        ({"x": 1, "n": [1]}, r"this has \[\]"),
        ({"x": [[1], [1, 2]], "n": [1]}, "different lengths"),
        ({"x": ["1", "2"], "n": [1]}, "takes FP32, this holds text"),
        ({"x": [None, 1], "n": [1]}, "takes FP32, this holds a mixture"),
        ({"x": [True, False], "n": [1]}, "takes FP32, this holds true and false"),
        ({"x": [1e300, 1], "n": [1]}, "too large for FP32"),
        ({"x": [1, 2], "n": [1.5]}, "takes INT8, this holds numbers with a fraction"),
        ({"x": [1, 2], "n": [128]}, "INT8 goes from -128 to 127, this from 128 to 128"),
        ({"x": [1, 2], "n": [[1]]}, "some are one item, others are a batch"),
        ({"x": [[1, 2]], "n": [[1], [2]]}, "batch sizes differ: 'x' has 1, 'n' has 2"),
    ],
)
def test_what_does_not_fit_is_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInputError) as caught:
        from_values(model(X, N), values)
    assert caught.value.status == 422
    assert caught.value.mend
    with pytest.raises(ValueError, match=says):
        raise ValueError(caught.value.why)


@pytest.mark.parametrize("value", [[1], [{"base64": "!"}], [{"b64": "aa"}], [["a"], "b"], 1, [None]])
def test_bytes_that_are_none(value: Any) -> None:
    with pytest.raises(BadInputError):
        from_values(model(TEXT), {"text": value})


def test_a_file_is_the_one_bytes_element() -> None:
    (tensor,) = from_file(model(TensorMetadata("image", "BYTES", (-1, 1))), b"\xff\xd8")
    assert (tensor.shape, tensor.data[0, 0]) == ((1, 1), b"\xff\xd8")
    for inputs in ((), (X,), (TEXT, TEXT), (TensorMetadata("pair", "BYTES", (-1, 2)),)):
        with pytest.raises(UnsupportedMediaError, match="takes no file"):
            from_file(model(*inputs), b"")


def test_outputs_lose_the_batch_of_one_item_and_what_is_declared_single_is_bare() -> None:
    outputs = [
        Tensor("y", "FP32", np.array([[0.5, 1]], np.float32)),
        Tensor("n", "INT64", np.array([3])),
        Tensor("text", "BYTES", object_array(["é".encode(), b"\xff"], "text", [1, 2])),
        Tensor("one", "BYTES", object_array([b"a"], "one", [1])),
        Tensor("single", "FP32", np.array([[0.5]], np.float32)),
        Tensor("varies", "FP32", np.array([[0.5]], np.float32)),
    ]
    declared = {"y": (-1, 2), "n": (-1,), "text": (-1, 2), "one": (-1,), "single": (-1, 1), "varies": (-1, -1)}
    specs = tuple(TensorMetadata(name, "FP32", shape) for name, shape in declared.items())
    served = ModelMetadata("m", ("1",), (), specs, batched=True)
    item = to_values(served, outputs, item=True)
    assert item["y"].tolist() == [0.5, 1]
    assert (item["n"], item["text"], item["one"]) == (3, ["é", {"base64": "/w=="}], "a")
    assert (item["single"], item["varies"].tolist()) == (0.5, [0.5])
    batch = to_values(served, outputs, item=False)
    assert (batch["y"].shape, batch["n"].tolist(), batch["text"]) == ((1, 2), [3], [["é", {"base64": "/w=="}]])
    assert (batch["single"].tolist(), batch["varies"].tolist()) == ([0.5], [[0.5]])


def answer(tensors: list[Tensor]) -> tuple[bytes, bytes]:
    """A binary answer of Triton's, and the length of its JSON."""
    asked = build_request(tensors)
    length = asked.header_length or 0
    head = asked.body[:length].replace(b'"inputs"', b'"outputs"')
    return head + asked.body[length:], b"%d" % len(head)


@pytest.mark.parametrize("kind", ["FP16", "FP32", "FP64"])
def test_what_json_has_no_number_for_is_told_by_its_name_in_an_answer(kind: str) -> None:
    dtype = DATATYPES[kind]
    specs = (
        TensorMetadata("y", kind, (-1, 2)),
        TensorMetadata("one", kind, (-1, 1)),
        TensorMetadata("ok", kind, (-1, 1)),
    )
    served = ModelMetadata("m", ("1",), (), specs, batched=True)
    rows = np.array([[1, np.nan], [np.inf, -np.inf]], dtype)
    batch = [Tensor("y", kind, rows), Tensor("one", kind, rows[:, 1:]), Tensor("ok", kind, np.ones((2, 1), dtype))]
    found = json.loads(answer_of(*answer(batch), served, item=False))["outputs"]
    assert found == {"y": [[1.0, "NaN"], ["Infinity", "-Infinity"]], "one": ["NaN", "-Infinity"], "ok": [1.0, 1.0]}
    first = [Tensor(each.name, kind, each.data[:1]) for each in batch]
    found = json.loads(answer_of(*answer(first), served, item=True))["outputs"]
    assert found == {"y": [1.0, "NaN"], "one": "NaN", "ok": 1.0}


METADATA = b"""{"name": "m", "versions": ["1"], "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
"outputs": [{"name": "y", "datatype": "BYTES", "shape": [-1]}]}"""


def test_metadata_and_a_made_up_example() -> None:
    metadata = ModelMetadata.parse(METADATA, CONFIG)
    assert metadata.batched
    assert ModelMetadata.parse(METADATA, None).batched
    assert not ModelMetadata.parse(METADATA, b'{"max_batch_size": 0}').batched
    assert example_request(metadata) == {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [0.0, 0.0]}]
    }
    drawn = [example_request(metadata, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_models_own_example_comes_first() -> None:
    config = b'{"parameters": {"example_inputs": {"string_value": "{\\"inputs\\": [1]}"}}}'
    assert example_request(ModelMetadata.parse(METADATA, config)) == {"inputs": [1]}


@pytest.mark.parametrize(
    "config",
    [
        b"{",
        b"[]",
        b'{"parameters": {"example_inputs": {"string_value": "{"}}}',
        b'{"parameters": {"example_inputs": {"string_value": "{}"}}}',
    ],
)
def test_metadata_that_can_not_be_read(config: bytes) -> None:
    with pytest.raises(ProtocolError):
        ModelMetadata.parse(METADATA, config)
    with pytest.raises(ProtocolError):
        ModelMetadata.parse(b'{"name": "m"}', None)


@pytest.mark.parametrize("datatype", sorted(DATATYPES))
def test_every_datatype_has_an_example(datatype: str) -> None:
    metadata = model(TensorMetadata("x", datatype, (-1, 3)))
    for generator in (None, np.random.default_rng(0)):
        (made,) = example_request(metadata, generator)["inputs"]
        assert (made["shape"], len(made["data"])) == ([1, 3], 3)
    assert orjson.loads(example_json(metadata)) == orjson.loads(orjson.dumps(example_request(metadata)))
    assert example_elements(metadata) == 3


def test_no_example_is_made_that_is_long_or_thrown_away() -> None:
    """A model of images stopped everybody for as long as its zeros took, at each look at the page or the schema."""
    most = model(TensorMetadata("x", "UINT8", (-1, MOST_MADE_UP)))
    assert len(example_json(most)) > 2 * MOST_MADE_UP
    huge = model(TensorMetadata("x", "FP32", (-1, 2**40, 2**40)), TensorMetadata("z", "BYTES", (-1, 2**40)))
    for metadata in (huge, model(TensorMetadata("x", "UINT8", (-1, MOST_MADE_UP + 1)))):
        with pytest.raises(ProtocolError, match="elements"):
            example_json(metadata)
        assert example_values(metadata) is None
        schema = with_models({"paths": {}}, [metadata], keys=True)
        for path in ("/predict/m", "/v2/models/m/infer"):
            content = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
            assert "example" not in content
