"""Tensors of the Open Inference Protocol v2 as bytes: datatypes and numpy dtypes, BYTES elements, BF16.

The raw form is little endian and row-major. A BYTES element is a 4-byte little-endian length and its bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

__all__ = [
    "DATATYPES",
    "NoNumbersError",
    "ProtocolError",
    "Tensor",
    "decode_bytes",
    "encode_bytes",
    "from_raw",
    "object_array",
    "plain_numbers",
    "to_raw",
]

# BF16 has no numpy dtype: it is float32 here, rounded on its way out.
DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BF16": np.dtype("<f4"),
    "BYTES": np.dtype(np.object_),
}

_LENGTH = struct.Struct("<I")


class ProtocolError(ValueError):
    """A message that is not of the Open Inference Protocol, or can't be put into it."""


class NoNumbersError(ValueError):
    """Neither numbers alone, nor true and false alone; `kind` is what there is, for people."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"it holds {kind}")
        self.kind = kind


@dataclass(frozen=True, eq=False)
class Tensor:
    """A named tensor; `data` has the dtype that `DATATYPES` gives for `datatype`, BYTES elements are `bytes`."""

    name: str
    datatype: str
    data: np.ndarray[Any, Any]

    def __post_init__(self) -> None:
        if DATATYPES.get(self.datatype) != self.data.dtype:
            raise ProtocolError(f"tensor {self.name!r}: {self.datatype} can't hold {self.data.dtype}")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)


def encode_bytes(elements: Iterable[bytes]) -> bytes:
    """BYTES elements in their raw form."""
    parts: list[bytes] = []
    for element in elements:
        parts += (_LENGTH.pack(len(element)), element)
    return b"".join(parts)


def decode_bytes(raw: bytes | memoryview) -> list[bytes]:
    """The elements of a raw BYTES tensor.

    Raises:
        ProtocolError: a length runs past the end.
    """
    view = memoryview(raw)
    elements: list[bytes] = []
    at = 0
    while at < len(view):
        start = at + _LENGTH.size
        if start > len(view):
            raise ProtocolError("a BYTES tensor ends within the length of an element")
        (size,) = _LENGTH.unpack_from(view, at)
        at = start + size
        if at > len(view):
            raise ProtocolError(f"a BYTES element of {size} bytes runs past the end of its tensor")
        elements.append(bytes(view[start:at]))
    return elements


def to_raw(tensor: Tensor) -> bytes:
    """A tensor's raw form."""
    if tensor.datatype == "BYTES":
        return encode_bytes(tensor.data.ravel().tolist())
    if tensor.datatype == "BF16":
        return _bfloat16(tensor.data).tobytes()
    return tensor.data.tobytes()


def from_raw(name: str, datatype: str, shape: Sequence[int], raw: bytes | memoryview) -> Tensor:
    """A tensor from its raw form; numbers are a read-only view of `raw`, except BF16.

    Raises:
        ProtocolError: an unknown datatype, or `raw` is not as long as datatype and shape ask.
    """
    dtype = DATATYPES.get(datatype)
    if dtype is None:
        raise ProtocolError(f"tensor {name!r} has the unknown datatype {datatype!r}")
    if datatype == "BYTES":
        return Tensor(name, datatype, object_array(decode_bytes(raw), name, shape))
    stored = np.dtype("<u2") if datatype == "BF16" else dtype
    if len(raw) != math.prod(shape) * stored.itemsize:
        raise ProtocolError(f"tensor {name!r}: {len(raw)} bytes are not {datatype}{list(shape)}")
    data = np.frombuffer(raw, dtype=stored)
    if datatype == "BF16":
        data = (data.astype("<u4") << 16).view("<f4")
    return Tensor(name, datatype, data.reshape(shape))


def object_array(elements: Sequence[bytes], name: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """BYTES elements as an array of objects; np.array would take equal lengths for a dtype.

    Raises:
        ProtocolError: their number is not the shape's.
    """
    if len(elements) != math.prod(shape):
        raise ProtocolError(f"tensor {name!r}: {len(elements)} elements are not BYTES{list(shape)}")
    data = np.empty(len(elements), dtype=np.object_)
    data[:] = elements
    return data.reshape(tuple(shape))


def plain_numbers(value: Any) -> np.ndarray[Any, Any]:
    """What JSON says as an array: numbers, or true and false, in lists of like lengths.

    np.array finds out by itself what there is: of numbers beside one text it makes texts, all of them as long as the
    longest, and 60 KB become gigabytes. So what there is is looked at first, and the dtype is never numpy's choice.
    Whole numbers past INT64 stay exact, where numpy makes them floats.

    Raises:
        NoNumbersError: it holds something else.
        ValueError: the lists have different lengths, or there are too many levels of them.
    """
    level, shape = [value], list[int]()
    while list in (kinds := set(map(type, level))):
        lengths = set(map(len, level)) if len(kinds) == 1 else set()
        if len(lengths) != 1:
            raise ValueError("lists have different lengths")
        shape += lengths
        level = list(chain.from_iterable(level))
    if not (kinds <= {int, float} or kinds == {bool}):
        raise NoNumbersError("text" if kinds == {str} else "a mixture")
    return np.array(level, _dtype_of(kinds, level)).reshape(shape)


def _dtype_of(kinds: set[type], numbers: list[Any]) -> type[np.generic]:
    if kinds == {bool}:
        return np.bool_
    if kinds != {int}:
        return np.float64
    low, high = min(numbers), max(numbers)
    if low >= -(1 << 63) and high < 1 << 63:
        return np.int64
    if low < -(1 << 63) or high >= 1 << 64:
        raise NoNumbersError("numbers of more than 64 bits")
    return np.uint64 if low >= 0 else np.float64


def _bfloat16(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The upper half of each float32, rounded to nearest even; a NaN stays one."""
    bits = data.astype("<f4").view("<u4").astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(data), np.uint64(0x7FC0), rounded).astype("<u2")
