"""Plain values and files in, plain values out: the friendly form of a model's tensors.

A value is an item or a batch, told apart by its depth: for an input of shape [-1, 3, 224, 224], three levels of
lists are one item and four are a batch. All inputs of a request must be the same. The answer to one item has no
batch dimension. Where a model declares one element an item ([-1, 1]), it is given, and may be sent, bare; a list of
several such elements is a batch. Bytes that are not UTF-8 text go both ways as {"base64": "..."}. In answers, what
JSON has no number for is a text: "NaN", "Infinity", "-Infinity".
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from serve.gateway.errors import BadInputError, BadRequestError, UnsupportedMediaError
from serve.gateway.oip.metadata import ModelMetadata, TensorMetadata
from serve.gateway.oip.tensors import DATATYPES, NoNumbersError, Tensor, object_array, plain_numbers

__all__ = ["from_file", "from_values", "to_values"]

MOST_NAMED = 8  # unknown inputs, in a refusal


def from_file(metadata: ModelMetadata, content: bytes) -> tuple[Tensor, ...]:
    """The one input of a model that takes a file, as one item.

    Raises:
        UnsupportedMediaError: the model takes no single BYTES element.
    """
    spec = metadata.inputs[0] if metadata.inputs else None
    shape = [max(dim, 1) for dim in spec.shape] if spec else []
    if spec is None or len(metadata.inputs) != 1 or spec.datatype != "BYTES" or int(np.prod(shape)) != 1:
        takes = ", ".join(map(str, metadata.inputs)) or "no inputs"
        raise UnsupportedMediaError(
            f"the model {metadata.name!r} takes no file",
            why=f"a file fits a model with one BYTES input, this one takes {takes}",
            mend='send application/json: {"input name": value, ...}',
        )
    return (Tensor(spec.name, spec.datatype, object_array([content], spec.name, shape)),)


def from_values(metadata: ModelMetadata, values: Mapping[str, Any]) -> tuple[tuple[Tensor, ...], bool]:
    """The inputs from JSON values by name, and whether they are one item.

    Raises:
        BadInputError: an input is missing, unknown, or its value does not fit.
    """
    names = [spec.name for spec in metadata.inputs]
    wrong = [f"{name!r} is missing" for name in names if name not in values]
    unknown = (f"{name[:64]!r} is none of them" for name in values if name not in names)
    wrong += islice(unknown, MOST_NAMED)
    if wrong:
        raise BadInputError(
            "the inputs are not the model's",
            why=f"the model takes {', '.join(map(str, metadata.inputs))}; {', '.join(wrong)}",
            mend=f"give each input once, by its name: {_form(metadata.inputs)}"
            + (f"; tensors in a list go to /v2/models/{metadata.name}/infer" if "inputs" in values else ""),
        )
    tensors: list[Tensor] = []
    items: set[bool] = set()
    for spec in metadata.inputs:
        _check_depth(spec, values[spec.name])
        array = _array(spec, values[spec.name])
        if array.ndim == 0 and spec.shape == ((-1, 1) if metadata.batched else (1,)):
            array = array.reshape(1)
        if array.ndim == 1 and len(array) > 1 and spec.shape == (-1, 1) and metadata.batched:
            array = array[:, np.newaxis]  # a batch of bare elements
        item = metadata.batched and array.ndim == len(spec.shape) - 1
        array = array[np.newaxis] if item else array
        if array.ndim != len(spec.shape) or not all(
            want in (-1, have) for want, have in zip(spec.shape, array.shape, strict=True)
        ):
            form = list(spec.shape[1:]) if metadata.batched else list(spec.shape)
            batch = f" (or a batch of them, {list(spec.shape)})" if metadata.batched else ""
            shape = list(array.shape[1:] if item else array.shape)
            raise _misfit(spec, f"it takes the shape {form}{batch}, this has {shape}")
        items.add(item)
        tensors.append(Tensor(spec.name, spec.datatype, array))
    if len(items) > 1:
        raise BadInputError(
            "the inputs don't go together",
            why="some are one item, others are a batch",
            mend="give all inputs as one item, or all with the batch as first dimension",
        )
    if metadata.batched and len({tensor.shape[0] for tensor in tensors}) > 1:
        sizes = ", ".join(f"{tensor.name!r} has {tensor.shape[0]}" for tensor in tensors)
        raise BadInputError("the inputs don't go together", why=f"batch sizes differ: {sizes}", mend="make them equal")
    return tuple(tensors), items == {True}


def to_values(metadata: ModelMetadata, outputs: Sequence[Tensor], *, item: bool) -> dict[str, Any]:
    """Outputs as plain values by name; arrays of finite numbers stay numpy arrays, which orjson writes as nested lists.

    Args:
        item: drop the batch dimension, of size 1.
    """
    single = (-1, 1) if metadata.batched else (1,)
    bare = {spec.name for spec in metadata.outputs if spec.shape == single}
    values: dict[str, Any] = {}
    order = [spec.name for spec in metadata.outputs]
    for tensor in sorted(outputs, key=lambda tensor: order.index(tensor.name) if tensor.name in order else len(order)):
        data = tensor.data
        if tensor.name in bare and data.shape[-1:] == (1,):
            data = data[..., 0]
        if item and metadata.batched and np.shape(data)[:1] == (1,):
            data = data[0]
        if tensor.datatype == "BYTES":
            values[tensor.name] = _texts(data.tolist() if isinstance(data, np.ndarray) else data)
        else:
            values[tensor.name] = _numbers(data)
    return values


def _numbers(data: np.ndarray[Any, Any]) -> Any:
    """Numbers for JSON, which has no NaN and no infinity: these are written as texts, as ProtoJSON does."""
    if data.dtype.kind != "f" or np.isfinite(data).all():
        return np.ascontiguousarray(data) if np.ndim(data) else data.item()
    return _named(data.tolist())


def _named(value: Any) -> Any:
    if isinstance(value, list):
        return [_named(part) for part in value]
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _check_depth(spec: TensorMetadata, value: Any) -> None:
    """Raise BadRequestError for lists in lists beyond any shape of the input; by its first elements, as the others must
    be like them.
    """
    for _ in range(len(spec.shape) + 1):
        if not isinstance(value, list) or not value:
            return
        value = value[0]
    if isinstance(value, list):
        raise BadRequestError(
            f"the value of {spec.name!r} is nested too deep",
            why=f"the model takes {spec}, and lists of {len(spec.shape)} levels for it",
            mend=f"give it as {_form([spec])}",
        )


def _array(spec: TensorMetadata, value: Any) -> np.ndarray[Any, Any]:
    if spec.datatype == "BYTES":
        elements: list[bytes] = []
        shape = _collect_bytes(spec, value, elements)
        return object_array(elements, spec.name, shape)
    dtype = DATATYPES[spec.datatype]
    try:
        given = plain_numbers(value)
    except NoNumbersError as err:
        raise _misfit(spec, f"it takes {spec.datatype}, this holds {err.kind}") from err
    except ValueError as err:
        raise _misfit(spec, "its lists have different lengths") from err
    allowed = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}[dtype.kind]
    if given.size and given.dtype.kind not in allowed:
        raise _misfit(spec, f"it takes {spec.datatype}, this holds {_kind(given.dtype)}")
    if dtype.kind in "iu" and given.size:
        limits = np.iinfo(dtype)
        low, high = int(given.min()), int(given.max())
        if low < limits.min or high > limits.max:
            raise _misfit(spec, f"{spec.datatype} goes from {limits.min} to {limits.max}, this from {low} to {high}")
    with np.errstate(over="ignore"):
        array = given.astype(dtype)
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise _misfit(spec, f"a value is too large for {spec.datatype}")
    return array


def _collect_bytes(spec: TensorMetadata, value: Any, elements: list[bytes], depth: int = 0) -> tuple[int, ...]:
    """Append a value's elements, and give its shape."""
    if depth > len(spec.shape):
        raise BadRequestError(f"the value of {spec.name!r} is nested too deep", why=f"the model takes {spec}")
    if isinstance(value, str):
        elements.append(value.encode())
        return ()
    if isinstance(value, dict) and value.keys() == {"base64"}:
        try:
            elements.append(base64.b64decode(value["base64"], validate=True))
        except (binascii.Error, TypeError, ValueError) as err:
            raise _misfit(spec, f"its base64 can't be read: {err}") from err
        return ()
    if not isinstance(value, list):
        raise _misfit(spec, f'it takes strings or {{"base64": "..."}}, this holds {type(value).__name__}')
    shapes = {_collect_bytes(spec, part, elements, depth + 1) for part in value}
    if len(shapes) > 1:
        raise _misfit(spec, "its lists have different lengths")
    return (len(value), *(shapes.pop() if shapes else ()))


def _misfit(spec: TensorMetadata, why: str) -> BadInputError:
    return BadInputError(
        f"the value of {spec.name!r} does not fit",
        why=why,
        mend=f"the model takes {spec}, -1 being any size, here as {_form([spec])}",
    )


def _form(inputs: Sequence[TensorMetadata]) -> str:
    """JSON as /predict takes it; what stands in the model's example is written for another address."""
    values = [
        f'"{spec.name}": ' + ('{"base64": "..."} or "a text"' if spec.datatype == "BYTES" else "values")
        for spec in inputs
    ]
    return f"{{{', '.join(values)}}}"


def _kind(dtype: np.dtype[Any]) -> str:
    whole = "whole numbers"
    return {"b": "true and false", "i": whole, "u": whole, "f": "numbers with a fraction"}[dtype.kind]


def _texts(value: Any) -> Any:
    if isinstance(value, list):
        return [_texts(part) for part in value]
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}
