"""Messages of the Open Inference Protocol v2: JSON, and JSON followed by raw tensors (binary tensor extension).

In the binary form the body starts with JSON of `Inference-Header-Content-Length` bytes; each tensor there says in
its parameter `binary_data_size` how many of the bytes that follow are its own.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from serve.gateway.oip.tensors import DATATYPES, ProtocolError, Tensor, from_raw, object_array, plain_numbers, to_raw

__all__ = ["BINARY_HEADER", "SEQUENCE", "InferResponse", "Message", "build_request", "parse_request", "parse_response"]

BINARY_HEADER = b"inference-header-content-length"
SEQUENCE = b'"sequence_id"'  # a request that changes what Triton remembers: no other may do it again
_NO_JSON = ("FP16", "BF16")  # the protocol has no JSON form for these two


@dataclass(frozen=True)
class Message:
    """A body and the length of the JSON that it starts with; None where it is all JSON."""

    body: bytes
    header_length: int | None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The HTTP headers that go with the body."""
        if self.header_length is None:
            return [(b"content-type", b"application/json")]
        return [(b"content-type", b"application/octet-stream"), (BINARY_HEADER, b"%d" % self.header_length)]


@dataclass(frozen=True)
class InferResponse:
    """A model's answer."""

    model_name: str
    model_version: str
    outputs: tuple[Tensor, ...]


def build_request(inputs: Sequence[Tensor], *, binary: bool = True) -> Message:
    """An infer request for all of a model's outputs.

    Args:
        inputs: in any order.
        binary: tensors raw, in both directions; else all of it JSON.

    Raises:
        ProtocolError: a tensor has no JSON form (FP16, BF16, BYTES that are not UTF-8).
    """
    if not binary:
        described = [
            {"name": t.name, "datatype": t.datatype, "shape": list(t.shape), "data": _json_data(t)} for t in inputs
        ]
        return Message(orjson.dumps({"inputs": described}), None)
    raw = [to_raw(tensor) for tensor in inputs]
    header = {
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "parameters": {"binary_data_size": len(part)},
            }
            for tensor, part in zip(inputs, raw, strict=True)
        ],
        "parameters": {"binary_data_output": True},
    }
    text = orjson.dumps(header)
    return Message(b"".join((text, *raw)), len(text))


def parse_request(body: bytes, header_length: int | None = None) -> tuple[Tensor, ...]:
    """The inputs of an infer request.

    Raises:
        ProtocolError: not an infer request.
    """
    header, tail = _split(body, header_length)
    return _tensors(header, "inputs", tail)


def parse_response(body: bytes, header_length: int | None = None) -> InferResponse:
    """A model's answer, from either form, and from what Triton writes that is no JSON: NaN, Infinity, raw bytes.

    Raises:
        ProtocolError: not an infer response.
    """
    try:
        header, tail = _split(body, header_length)
    except ProtocolError:
        header, tail = _split(body, header_length, _as_triton_writes)
    outputs = _tensors(header, "outputs", tail)
    return InferResponse(str(header.get("model_name", "")), str(header.get("model_version", "")), outputs)


def _as_triton_writes(text: memoryview) -> Any:
    """JSON, but for NaN and infinities, and bytes of texts that are no UTF-8: these come as lone surrogates."""
    try:
        return json.loads(str(text, "utf-8", "surrogateescape"))
    except RecursionError as err:
        raise ValueError("it is nested too deep") from err


def _split(
    body: bytes, header_length: int | None, loads: Callable[[memoryview], Any] = orjson.loads
) -> tuple[dict[str, Any], memoryview]:
    size = len(body) if header_length is None else header_length
    if not 0 <= size <= len(body):
        raise ProtocolError(f"the header is said to be {size} bytes long, the body has {len(body)}")
    try:
        header = loads(memoryview(body)[:size])
    except ValueError as err:  # orjson's, and json's
        raise ProtocolError(f"the header is not JSON: {err}") from err
    if not isinstance(header, dict):
        raise ProtocolError("the header is not a JSON object")
    return header, memoryview(body)[size:]


def _tensors(header: Mapping[str, Any], key: str, tail: memoryview) -> tuple[Tensor, ...]:
    items = header.get(key)
    if not isinstance(items, list):
        raise ProtocolError(f"there is no list of {key!r}")
    tensors: list[Tensor] = []
    at = 0
    for item in items:
        name, datatype, shape = _described(item)
        parameters = item.get("parameters")
        size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
        if size is None:
            tensors.append(_from_json(name, datatype, shape, item))
            continue
        if type(size) is not int or not 0 <= size <= len(tail) - at:
            raise ProtocolError(f"tensor {name!r}: {size!r} raw bytes are not there")
        tensors.append(from_raw(name, datatype, shape, tail[at : at + size]))
        at += size
    if at != len(tail):
        raise ProtocolError(f"{len(tail) - at} bytes belong to no tensor")
    return tuple(tensors)


def _described(item: Any) -> tuple[str, str, list[int]]:
    if not isinstance(item, dict):
        raise ProtocolError("a tensor is not a JSON object")
    name, datatype, shape = item.get("name"), item.get("datatype"), item.get("shape")
    if not isinstance(name, str) or datatype not in DATATYPES:
        raise ProtocolError(f"tensor {name!r} has the unknown datatype {datatype!r}")
    if not isinstance(shape, list) or not all(type(dim) is int and dim >= 0 for dim in shape):
        raise ProtocolError(f"tensor {name!r} has the shape {shape!r}")
    return name, datatype, shape


def _from_json(name: str, datatype: str, shape: list[int], item: Mapping[str, Any]) -> Tensor:
    if "base64" in item:  # our own addition, for examples: the raw bytes of the one BYTES element
        try:
            return Tensor(name, datatype, object_array([base64.b64decode(item["base64"], validate=True)], name, shape))
        except (binascii.Error, TypeError, ValueError) as err:
            raise ProtocolError(f"tensor {name!r} is not base64 of one BYTES element: {err}") from err
    if "data" not in item:
        raise ProtocolError(f"tensor {name!r} has neither data nor binary_data_size")
    if datatype == "BYTES":
        return Tensor(name, datatype, object_array(_texts(name, item["data"]), name, shape))
    dtype = DATATYPES[datatype]
    try:
        given = plain_numbers(item["data"])
        with np.errstate(over="ignore", invalid="ignore"):
            data = given.astype(dtype)
        exact = dtype.kind == "f" or np.array_equal(data, given)  # numpy would wrap 300 into a UINT8, and cut 1.5
        if not exact:
            raise ValueError("a value does not fit")
        return Tensor(name, datatype, data.reshape(shape))
    except (ValueError, TypeError, OverflowError) as err:
        raise ProtocolError(f"tensor {name!r}: its data is not {datatype}{shape}: {err}") from err


def _texts(name: str, data: Any) -> list[bytes]:
    if isinstance(data, str):
        return [data.encode(errors="surrogateescape")]
    if not isinstance(data, list):
        raise ProtocolError(f"tensor {name!r}: BYTES are given as strings in JSON")
    return [element for part in data for element in _texts(name, part)]


def _json_data(tensor: Tensor) -> list[Any]:
    if tensor.datatype in _NO_JSON:
        raise ProtocolError(f"tensor {tensor.name!r}: {tensor.datatype} has no JSON form, use the binary form")
    flat: list[Any] = tensor.data.ravel().tolist()
    if tensor.datatype != "BYTES":
        return flat
    try:
        return [element.decode() for element in flat]
    except UnicodeDecodeError as err:
        raise ProtocolError(f"tensor {tensor.name!r} is not UTF-8 text, use the binary form") from err
