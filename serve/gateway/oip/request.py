"""An infer request over HTTP: read once, held against the model's contract, and written anew.

What goes on to Triton is written from what was read here, so that two readers of one JSON (repeated names, numbers
beyond 64 bits, depth) can't differ on what was asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import orjson

from serve.gateway.errors import BadRequestError, GatewayError
from serve.gateway.oip.contract import (
    ITEM_BYTES,
    RANGES,
    Contract,
    UnfitError,
    check_floats,
    check_framing,
    check_id,
    check_parameters,
    check_range,
)
from serve.gateway.oip.sequence import SEQUENCE_ID, Named, named

__all__ = ["Request", "check_json_bytes", "loaded", "raw_head", "read_request"]

# What the parser makes of JSON, with what it holds meanwhile: for a comma a number and its place, for a list or an
# object itself, empty, for a text's quotes what it takes beside its letters, for a colon a name's place in an object.
COMMA_BYTES, LIST_BYTES, QUOTE_BYTES, COLON_BYTES = 56, 104, 24, 100
NO_MEMORY = "Not enough memory"  # begins what the parser says of it
WIDEST = 4  # bytes of a letter where one of its text is beyond 16 bits

# What a JSON element of a datatype may be.
_JSON: dict[object, set[type]] = {name: {int, float} if name.startswith("FP") else {int} for name in ITEM_BYTES}
_JSON |= {"BOOL": {bool}, "BYTES": {str}}
_NO_JSON = ("FP16", "BF16")
_KNOWN = frozenset(("id", "parameters", "inputs", "outputs"))
_OF_INPUT = frozenset(("name", "datatype", "shape", "parameters", "data"))
_OF_OUTPUT = frozenset(("name", "parameters"))


class Request:
    """A request that fits its model; it may be the same for several that say the same.

    Attributes:
        header: its JSON, of names, numbers, texts and lists alone; None where it is dear to read.
        binary: whether raw tensors follow the JSON, or would.
        sequence: that it belongs to; None for none.
        texts: raw BYTES inputs, as (name, elements, first byte, bytes), which are looked at once all of them is there.
    """

    __slots__ = ("binary", "header", "sequence", "texts")

    def __init__(self, header: dict[str, Any], *, binary: bool) -> None:
        self.header: dict[str, Any] | None = header
        self.binary = binary
        self.sequence: Named | None = None
        self.texts: list[tuple[str, int, int, int]] = []

    def check_texts(self, tail: bytes | memoryview, rest: Callable[[], object]) -> None:
        """Whether the raw BYTES inputs are what they should be; raises UnfitError; `rest` as of `check_framing`."""
        view = memoryview(tail)
        for name, count, start, size in self.texts:
            check_framing(name, view[start : start + size], count, rest)

    def json(self) -> bytes:
        """The JSON that goes on to Triton."""
        return orjson.dumps(self.header)

    def json_within(self, seconds: float) -> bytes | None:
        """The same with Triton's parameter `timeout`, which its queues honour where they allow an override.

        None where the JSON is dear: to write it again would take longer than most queues.
        """
        if self.header is None:
            return None
        parameters = self.header.get("parameters", {})
        asked = parameters.get("timeout")
        microseconds = max(1, int(seconds * 1e6))
        least = min(asked, microseconds) if type(asked) is int and asked > 0 else microseconds
        return orjson.dumps(self.header | {"parameters": parameters | {"timeout": least}})


def read_request(
    head: bytes, tail_bytes: int | None, contract: Contract, *, shared_memory: bool = False, digest: str = ""
) -> Request:
    """Read the JSON of an infer request, and hold it against what the model takes.

    Args:
        head: its JSON.
        tail_bytes: how many bytes of raw tensors follow; None where it is all JSON.
        contract: of the model.
        shared_memory: whether it may name regions of shared memory.
        digest: of its client's key, by which its sequence is named; "" where there are no keys.

    Raises:
        BadRequestError: it is not an infer request, or does not fit the model.
        TooManyElementsError: an input has more elements than are allowed.
    """
    header = loaded(head)
    _only(header, _KNOWN, "the request")
    inputs = header.setdefault("inputs", [])  # there are models that need none, and Triton fails without the list
    if type(inputs) is not list:
        raise UnfitError("it has no list of inputs")
    outputs = header.get("outputs", [])
    if type(outputs) is not list:  # null is no list, and Triton fails on it
        raise UnfitError("its outputs are no list")
    contract.check_counts(len(inputs), len(outputs))  # before any of them is looked at
    if "id" in header:
        check_id(header["id"])
    parameters = _parameters(header, shared_memory=shared_memory)
    contract.check_sequence(parameters.get(SEQUENCE_ID))
    request = Request(header, binary=tail_bytes is not None)
    if (sequence := named(parameters, digest)) is not None:
        request.sequence = sequence
        header["parameters"][SEQUENCE_ID] = sequence.sent
    taken = 0
    for item in inputs:
        taken += _input(request, item, taken, contract, shared_memory=shared_memory)
    contract.check_together([item["name"] for item in inputs], [item["shape"] for item in inputs])
    if taken != (tail_bytes or 0):
        raise UnfitError(f"its inputs are {taken} bytes, and {tail_bytes or 0} follow the JSON")
    if outputs:
        empty = any(0 in item["shape"] for item in inputs)
        _outputs(outputs, contract, empty=empty, shared_memory=shared_memory)
    return request


def loaded(text: bytes) -> Any:
    """What a JSON says; raises BadRequestError, and MemoryError, which the parser says in words of its own."""
    try:
        return orjson.loads(text)
    except SystemError:
        raise MemoryError from None
    except orjson.JSONDecodeError as err:
        if str(err).startswith(NO_MEMORY):
            raise MemoryError from None
        raise BadRequestError("the request's JSON can't be read", why=str(err), mend="see GET .../example") from err


def check_json_bytes(text: bytes, most: int) -> None:
    """Whether a JSON becomes no more than so many bytes of Python's objects, by its marks and letters.

    Raises:
        GatewayError: 413, it may.
    """
    lists, texts, names = text.count(b"[") + text.count(b"{"), text.count(b'"'), text.count(b":")
    letter = 1 if text.isascii() and b"\\u" not in text else WIDEST
    become = len(text) * (1 + letter) + COMMA_BYTES * text.count(b",")
    become += LIST_BYTES * lists + QUOTE_BYTES * texts + COLON_BYTES * names
    if become > most:
        raise GatewayError(
            "the request is too large to be read as JSON",
            why=f"its {len(text)} bytes would take {become} to read, {most} are allowed",
            mend="send its tensors raw (the protocol's binary form), or in several requests",
            status=413,
        )


def raw_head(body: bytes, contract: Contract) -> tuple[bytes, bytes]:
    """The JSON for a body that is one raw tensor (a header length of 0), and the tensor as it goes on.

    Raises:
        UnfitError: the model has several inputs, or more than one dimension that the body's size does not tell.
    """
    if len(contract.inputs) != 1:
        raise UnfitError(f"a raw body is for one input, and it has {', '.join(contract.inputs)}")
    ((name, known),) = contract.inputs.items()
    shape = list(known.shape)
    if contract.batched:
        shape[0] = 1
    size = ITEM_BYTES.get(known.datatype)
    if size is None:  # all of it is one element
        shape = [1 if dim < 0 else dim for dim in shape]
        body = len(body).to_bytes(4, "little") + body
    elif shape.count(-1) == 1:
        fixed = size * math.prod(dim for dim in shape if dim >= 0)
        shape[shape.index(-1)] = len(body) // fixed if fixed else 0
    item = {"name": name, "datatype": known.datatype, "shape": shape, "parameters": {"binary_data_size": len(body)}}
    return orjson.dumps({"inputs": [item], "parameters": {"binary_data_output": True}}), body


def _input(request: Request, item: Any, start: int, contract: Contract, *, shared_memory: bool) -> int:
    """Look at one input; how many raw bytes it has."""
    _only(item, _OF_INPUT, "an input")
    name, datatype, shape = item.get("name"), item.get("datatype"), item.get("shape")
    if type(shape) is not list:
        raise UnfitError("an input has no shape")
    count = contract.elements(name, datatype, shape)
    parameters = _parameters(item, shared_memory=shared_memory)
    if "shared_memory_region" in parameters:
        size = ITEM_BYTES.get(datatype)
        if size is not None and parameters.get("shared_memory_byte_size") != count * size:
            raise UnfitError(f"the input {name!r} is {count * size} bytes")
        if "data" in item or "binary_data_size" in parameters:
            raise UnfitError(f"the input {name!r} has data besides its shared memory")
        return 0
    if "binary_data_size" in parameters:
        return _raw(request, item, count, start, parameters["binary_data_size"])
    data = item.get("data")
    if type(data) is not list:
        told = "; base64, as examples have it, is for /predict, and here such bytes are raw" * (datatype == "BYTES")
        raise UnfitError(f"the input {name!r} has no data{told}")
    if datatype in _NO_JSON:
        raise UnfitError(f"{datatype} has no form in JSON: send it raw")
    if (have := _count(data, datatype, len(shape))) != count:
        raise UnfitError(f"the input {name!r} has {count} elements by its shape, and {have} in its data")
    return 0


def _raw(request: Request, item: Mapping[str, Any], count: int, start: int, size: object) -> int:
    name, datatype = item["name"], item["datatype"]
    if not request.binary or "data" in item:
        raise UnfitError(f"the input {name!r} says that it is raw, and it is in the JSON")
    if type(size) is not int or size < 0:
        raise UnfitError(f"binary_data_size of the input {name!r} is no number of bytes")
    item_bytes = ITEM_BYTES.get(datatype)
    if item_bytes is None:
        if size < 4 * count:
            raise UnfitError(f"the input {name!r} has {count} elements by its shape, and fewer in its data")
        request.texts.append((name, count, start, size))
    elif size != count * item_bytes:
        raise UnfitError(f"the input {name!r} is {count * item_bytes} bytes by its shape, and {size} by its data")
    return size


def _outputs(outputs: list[Any], contract: Contract, *, empty: bool, shared_memory: bool) -> None:
    names = []
    for item in outputs:
        _only(item, _OF_OUTPUT, "an output")
        parameters = _parameters(item, shared_memory=shared_memory)
        name = item.get("name")
        names.append(name if type(name) is str else "")
        if "classification" in parameters:
            contract.check_outputs(names[-1:])
            contract.check_classes(name, parameters["classification"], empty=empty)
    contract.check_outputs(names)


def _count(data: list[Any], datatype: object, depth: int) -> int:
    """Elements of a flat list, or of one that is nested as the shape is."""
    allowed = _JSON[datatype]
    kinds = set(map(type, data))
    if kinds <= allowed:
        _in_range(datatype, data)
        return len(data)
    if kinds == {list} and depth > 1:
        if depth == 2:  # the lists of most elements, without a call for each
            if not set(map(type, chain.from_iterable(data))) <= allowed:
                raise UnfitError("its data is nested deeper than its shape, or of mixed types")
            if datatype in RANGES or datatype == "FP32":
                _in_range(datatype, list(chain.from_iterable(data)))
            return sum(map(len, data))
        return sum(_count(part, datatype, depth - 1) for part in data)
    raise UnfitError("its data is not of its datatype, or nested deeper than its shape")


def _in_range(datatype: object, numbers: list[Any]) -> None:
    if datatype == "FP32":
        check_floats(numbers)
    else:
        check_range(datatype, numbers)


def _parameters(item: Mapping[str, Any], *, shared_memory: bool) -> Mapping[str, Any]:
    if "parameters" not in item:
        return {}
    parameters = item["parameters"]
    if type(parameters) is not dict:
        raise UnfitError("its parameters are no object")
    check_parameters(parameters, shared_memory=shared_memory)
    return parameters


def _only(item: Any, known: frozenset[str], what: str) -> None:
    """Drop the fields that the protocol does not have; Triton would read over them, and need not read them at all."""
    if type(item) is not dict:
        raise UnfitError(f"{what} is no JSON object")
    if not known.issuperset(item):
        for name in item.keys() - known:
            del item[name]
