"""An ONNX file without its large weights: what it computes, in types and shapes, is read in milliseconds."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx.external_data_helper import (
    ExternalDataInfo,
    set_external_data,
    uses_external_data,
)

from compress.vetting.files import open_file
from compress.vetting.onnx_wire import BITS, OnnxFileError, check_size
from compress.vetting.wire import BYTES, WireError, fields

__all__ = [
    "GRAPH", "INITIALIZER", "LARGE", "RAW", "appended", "bytes_of", "header", "outline", "put_outside", "read_whole",
    "set_apart", "take_in", "values_of",
]  # fmt: skip

# A tensor that is written in more bytes than this has more than 1,024 elements: nobody looks at its values.
LARGE = 64 * 1024
# Numbers of fields in onnx.proto3, which are fixed for good.
GRAPH, INITIALIZER = 7, 5  # of ModelProto, of GraphProto
VALUES = {4, 5, 6, 7, 9, 10, 11}  # of TensorProto: float_data, …, raw_data, …, uint64_data
RAW = 9
ALIGNED = 64  # bytes: as ONNX Runtime's own allocator has it


def outline(path: Path) -> onnx.ModelProto:
    """A model whose large initializers have a name, a type and dimensions, and no values.

    Neither external data nor the values are read, so that time and memory follow from the number of nodes.

    Raises:
        OSError: there is no such file, or it is mostly holes.
        DecodeError: it is no ONNX file, or has more bytes than one can have.
    """
    with open_file(path) as file:
        try:
            check_size(os.fstat(file.fileno()).st_size)
        except OnnxFileError as err:
            raise DecodeError(str(err)) from err
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return onnx.ModelProto.FromString(b"".join(_model(data)))


def set_apart(path: Path, weights: Path) -> onnx.ModelProto:
    """A model whose large initializers lie in a file beside it, as external data; never more than one is in memory.

    Args:
        path: of an ONNX file, its weights inside or in its folder.
        weights: is written. The model is to be saved in the same folder.

    Raises:
        OSError: there is no such file, or the other can't be written.
        DecodeError: it is no ONNX file.
    """
    model = outline(path)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        weights.open("wb") as beside,
    ):
        for tensor, (begin, end) in zip(model.graph.initializer, _initializers(data), strict=True):
            if uses_external_data(tensor):
                size = bytes_of(tensor)
                with values_of(tensor, path.parent) as values:
                    offset = appended(beside, values)
                put_outside(tensor, weights.name, offset, size)
                continue
            if end - begin <= LARGE:
                continue
            written = [(number, at, to) for number, _, at, to in _fields(data, begin, end) if number in VALUES]
            (number, at, to), *more = written or [(0, None, 0)]
            if number != RAW or at is None or more:
                tensor.ParseFromString(data[begin:end])
                continue
            with memoryview(data) as view, view[at:to] as values:
                offset = appended(beside, values)
            put_outside(tensor, weights.name, offset, to - at)
    return model


def take_in(model: onnx.ModelProto, folder: Path) -> None:
    """Read, in place, the values of all tensors that lie in files of the model's folder.

    Raises:
        OSError, ValueError: they can't be read.
    """
    for tensor in _tensors(model):
        if uses_external_data(tensor):
            with values_of(tensor, folder) as values:  # onnx's own takes no links, which ONNX Runtime does
                tensor.raw_data = bytes(values)
            tensor.ClearField("data_location")
            tensor.ClearField("external_data")


def read_whole(path: Path) -> onnx.ModelProto:
    """A model that has been looked through, with its weights inside.

    Raises:
        OSError, ValueError: they can't be read.
        DecodeError: it is no ONNX file.
    """
    model = onnx.load(path, load_external_data=False)
    take_in(model, path.parent)
    return model


def _tensors(message: Message) -> Iterator[onnx.TensorProto]:
    """All in a message, wherever: onnx's own helper leaves out sparse ones, and what functions take by default."""
    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for each in (value,) if isinstance(value, Message) else value:
                yield from _tensors(each)


def put_outside(tensor: onnx.TensorProto, name: str, offset: int, size: int) -> None:
    """Say that the values of a tensor lie in a file of the model's folder, in place."""
    tensor.raw_data = b""  # the helper wants this field
    set_external_data(tensor, name, offset, size)
    tensor.ClearField("raw_data")


def appended(file: BinaryIO, values: bytes | memoryview) -> int:
    """Write values behind what is there, where they may be mapped from; their offset."""
    offset = file.tell() + -file.tell() % ALIGNED
    file.seek(offset)
    file.write(values)
    return offset


def bytes_of(tensor: onnx.TensorProto) -> int:
    """Bytes of its values, where they are raw."""
    if not uses_external_data(tensor):
        return len(tensor.raw_data)
    length: int | None = ExternalDataInfo(tensor).length
    return -(-math.prod(tensor.dims) * BITS[tensor.data_type] // 8) if length is None else length


@contextmanager
def values_of(tensor: onnx.TensorProto, folder: Path) -> Iterator[bytes | memoryview]:
    """The raw bytes of a tensor, which may lie in a file of a folder: that is mapped, and not read as a whole."""
    if not uses_external_data(tensor):
        yield tensor.raw_data
        return
    told = ExternalDataInfo(tensor)
    begin = told.offset or 0
    if not bytes_of(tensor):  # of an empty file there is no map
        yield b""
        return
    with (
        (folder / told.location).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        memoryview(data) as view,
        view[begin : begin + bytes_of(tensor)] as values,
    ):
        yield values


def _initializers(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Where the bytes of each initializer of the graph begin and end."""
    for number, _, inside, end in _fields(data, 0, len(data)):
        if number == GRAPH and inside is not None:
            for field, _, begin, stop in _fields(data, inside, end):
                if field == INITIALIZER and begin is not None:
                    yield begin, stop


def _model(data: mmap.mmap) -> Iterator[bytes]:
    for number, start, inside, end in _fields(data, 0, len(data)):
        if number == GRAPH and inside is not None:
            yield from _message(GRAPH, b"".join(_graph(data, inside, end)))
        else:
            yield data[start:end]


def _graph(data: mmap.mmap, begin: int, end: int) -> Iterator[bytes]:
    for number, start, inside, stop in _fields(data, begin, end):
        if number == INITIALIZER and inside is not None and stop - inside > LARGE:
            kept = (data[at:to] for field, at, _, to in _fields(data, inside, stop) if field not in VALUES)
            yield from _message(INITIALIZER, b"".join(kept))
        else:
            yield data[start:stop]


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int | None, int]]:
    """As `fields`, with the error that a parser of the same file would have."""
    try:
        yield from fields(data, at, end)
    except WireError as err:
        raise DecodeError(str(err)) from err


def _message(number: int, content: bytes) -> Iterator[bytes]:
    yield header(number, len(content))
    yield content


def header(number: int, length: int) -> bytes:
    """What stands before the bytes of a field that is a message, a text or bytes."""
    return _encoded(number << 3 | BYTES) + _encoded(length)


def _encoded(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes((*found, value))
