"""Look through an ONNX file of someone else's before a library reads it: its bytes, not what a parser makes of them.

Standard library and numpy alone, so that `serve`, which has neither onnx nor torch, keeps to the same rules: fields
that the format has, each once where it has one; tensors whose bytes are there, inside the file's own folder; subgraphs
and functions that end; no more parts than a parser's memory can hold; no operators that a library would have to bring.

Source: onnx.proto (IR version 14); Protocol Buffers, "Encoding".
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from compress.vetting.files import HollowError, open_file
from compress.vetting.onnx_calls import SIZE, Calling
from compress.vetting.onnx_declared import Declared, Ends
from compress.vetting.onnx_errors import ForeignOperatorError, OnnxFileError
from compress.vetting.onnx_fields import BITS, BYTES, DIMENSIONS, MESSAGES, NAMES, STRING
from compress.vetting.wire import FIXED, VARINT, runs

__all__ = [
    "BITS",
    "ForeignOperatorError",
    "OnnxFileError",
    "check_size",
    "vet_onnx",
    "vet_onnx_bytes",
]

MAX_BYTES = (1 << 31) - 1
"""Of a file without its weights outside: Protobuf's own bound."""
MAX_PARTS = 2_000_000
MAX_DEPTH = 64
MAX_SUBGRAPHS = 16
MAX_DIMENSIONS = 64
MAX_DENSE = 1 << 26
# Messages whose fields are looked at where they stand: all in some, and some in all.
_LOOKED_INTO = ({"Tensor", "Sparse", "Value", "Type", "TensorType", "Shape"}, {"Attribute", "Opset"})

# Those that steer a terminal, and those that turn the direction of what is read.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_NUMBERS = {"int": 0, "f8": 1, "f4": 5}
Fields = dict[int, list[Any]]


class Calls(frozenset[tuple[str, str]]):
    """Domain and name of each operator that a file calls.

    Attributes:
        ir: the version of ONNX's format that the file tells.
        outside: where tensors lie that are not in the file: paths in its folder, as the file writes them. All tensors
            count, wherever they are: in bodies, functions, attributes and sparse tensors.
        inputs, outputs: as the file declares them; inputs without those that are weights of it, too.
    """

    ir: int = 0
    outside: frozenset[str] = frozenset()
    inputs: tuple[Declared, ...] = ()
    outputs: tuple[Declared, ...] = ()


def vet_onnx(path: Path, *, runs: bool = True) -> Calls:
    """Look through a file.

    Args:
        path: of the file; weights outside of it are looked for in its folder.
        runs: refuse operators that no library here has; what only reads the graph can take them.

    Returns:
        Domain and name of each operator that it calls.

    Raises:
        OnnxFileError: it is no ONNX file, is damaged, or reaches beyond itself.
    """
    try:
        if path.is_file():
            check_size(path.stat().st_size)
        with open_file(path) as file:
            check_size(os.fstat(file.fileno()).st_size)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held, memoryview(held) as data:
                return vet_onnx_bytes(data, path.parent, runs=runs)
    except OSError as err:
        raise OnnxFileError(f"it can't be read: {err.strerror or err}") from err


def check_size(size: int) -> None:
    """Of a file, before any of it is read: one with holes has as many bytes as it likes.

    Raises:
        OnnxFileError: it holds nothing, or more than Protobuf can.
    """
    if not size:
        raise OnnxFileError("it is empty")
    if size > MAX_BYTES:
        raise OnnxFileError(f"it has {size:,} bytes: more than the 2 GiB that Protobuf can hold")


def vet_onnx_bytes(data: bytes | memoryview, folder: Path, *, runs: bool = True) -> Calls:
    """Look through the bytes of a file that stands in a folder; gives the operators that it calls.

    Raises:
        OnnxFileError: as for a file.
    """
    if bytes(data[4:8]) == b"ORTM":  # ONNX Runtime would read another format, of which nothing was looked at
        raise OnnxFileError("it is written in ONNX Runtime's own format")
    scan = _Scan(memoryview(data), folder)
    try:
        found = scan.message("Model", 0, len(scan.data), 0, 0)
        if 7 not in found:
            raise OnnxFileError("it holds no graph")
        size = len(scan.data) + sum(scan.outside.values())
        called = Calls(scan.calling.check(scan.calling.domains(found, 8), size, runs=runs))
        called.ir = next(iter(found.get(1, ())), 0)
        called.outside = frozenset(scan.outside)
        called.inputs = tuple(each for each in scan.ends.taken if each.name not in scan.ends.held)
        called.outputs = tuple(scan.ends.given)
        return called
    finally:
        scan.data.release()


@dataclass
class _Scan:
    data: memoryview
    folder: Path
    parts: int = 0
    dense: int = 0  # elements of all sparse tensors, unpacked
    beside: int = 0  # bytes of all tensors that lie outside, and of sparse ones, unpacked
    outside: dict[str, int] = field(default_factory=dict)  # places of tensors, and their bytes

    def __post_init__(self) -> None:
        self.ends = Ends(self._text)
        self.calling = Calling(self._text, self._names)
        self.checks: dict[str, Callable[[Fields], None]] = {
            "Node": self.calling.node, "Dim": self._dim, "Tensor": self._tensor, "TensorType": self._type,
            "Sparse": self._sparse,
        }  # fmt: skip

    def message(self, kind: str, start: int, end: int, depth: int, graphs: int) -> Fields:
        """Check a message and all in it; gives its fields: numbers, and where the others lie."""
        graphs += kind == "Graph"
        if depth > MAX_DEPTH or graphs > MAX_SUBGRAPHS:
            raise OnnxFileError("it is nested too deeply")
        if kind == "Function":
            self.calling.begin()
        known = MESSAGES[kind]
        found: Fields = {}
        at, begin, beside = start, start, self.beside
        while at < end:
            start = at
            key, at = self._varint(at, end)
            number, wire = key >> 3, key & 7
            name = known.get(number)
            if name is None:
                raise OnnxFileError(
                    f"its Protobuf is damaged, or another's: a field ({kind} {number}) that the format does not have"
                )
            several = name.endswith("*")
            name = name.removesuffix("*")
            values = found.setdefault(number, [])
            if values and not several:
                raise OnnxFileError(f"its Protobuf is damaged, or another's: a field ({kind} {number}) twice")
            if wire == 2:
                length, at = self._varint(at, end)
                if length > end - at:
                    raise OnnxFileError("its Protobuf is damaged: it is truncated, or a length in it is false")
                self._part()
                if name in MESSAGES:
                    inner = self.message(name, at, at + length, depth + 1, graphs)
                    if kind == "Graph" and depth == 1 and name in ("Tensor", "Sparse", "Value"):
                        self.ends.add(number, inner)
                    values.append(inner if kind in _LOOKED_INTO[0] or name in _LOOKED_INTO[1] else None)
                elif name == "text":
                    if (kind, number) not in BYTES:
                        text = self._decoded(at, at + length)
                        if (kind, number) in NAMES and _CONTROLS.search(text):
                            raise OnnxFileError(f"it holds the name {text[:80]!r}, with control characters")
                    values.append((at, at + length))
                elif several:
                    keep = (kind, number) in DIMENSIONS
                    _add(values, self._packed(name, at, at + length, keep=keep), keep=keep)
                else:
                    raise OnnxFileError(
                        f"its Protobuf is damaged, or another's: a field ({kind} {number}) of the wrong type"
                    )
                at += length
            elif _NUMBERS.get(name) != wire:
                raise OnnxFileError(
                    f"its Protobuf is damaged, or another's: a field ({kind} {number}) of the wrong type"
                )
            elif several and (kind, number) not in DIMENSIONS:
                self._part()
                count, at = self._run(bytes(self.data[start:at]), wire, start, end)
                _add(values, count, keep=False)
            elif wire == 0:
                value, at = self._varint(at, end)
                if several:
                    _add(values, [_signed(value)], keep=True)
                else:
                    values.append(_signed(value))
            else:
                _add(values, _Many(1), keep=False)
                at += FIXED[wire]
                if at > end:
                    raise OnnxFileError("its Protobuf is damaged: it is truncated")
        if kind in self.checks:
            self.checks[kind](found)
        if kind in ("Attribute", "Function"):
            found[SIZE] = [end - begin + self.beside - beside]
        if kind == "Function":
            self.calling.end(found)
        return found

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end and shift < 70:
            byte = self.data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & 0xFFFFFFFFFFFFFFFF, at
            shift += 7
        raise OnnxFileError("its Protobuf is damaged: it is truncated, or no ONNX file")

    def _part(self) -> None:
        self.parts += 1
        if self.parts > MAX_PARTS:
            raise OnnxFileError(f"it holds more than {MAX_PARTS:,} parts")

    def _run(self, key: bytes, wire: int, at: int, end: int) -> tuple[_Many, int]:
        """How many numbers of one field stand behind each other, each with its key, and where they end.

        They are counted many at a time: forests of trees have millions, and so may whoever wants this to take minutes.
        """
        count = 0
        for begin, stop in runs(self.data, key, wire, at, end):
            # Of a varint, the key and the number end in such a byte each.
            count += _ends(self.data[begin:stop]) // 2 if wire == VARINT else (stop - begin) // (len(key) + FIXED[wire])
            at = stop
        if not count:
            raise OnnxFileError("its Protobuf is damaged: it is truncated, or no ONNX file")
        return _Many(count), at

    def _packed(self, name: str, start: int, end: int, *, keep: bool) -> Sequence[int] | _Many:
        """Numbers in a row: themselves, where they are dimensions; else how many."""
        if name != "int":
            width = FIXED[_NUMBERS[name]]
            if (end - start) % width:
                raise OnnxFileError("its Protobuf is damaged: it is truncated, or a length in it is false")
            return _Many((end - start) // width)
        if end > start and self.data[end - 1] >= 0x80:
            raise OnnxFileError("its Protobuf is damaged: it is truncated, or no ONNX file")
        if not keep or end - start > 1024:
            return _Many(_ends(self.data[start:end]))
        found, at = [], start
        while at < end:
            value, at = self._varint(at, end)
            found.append(_signed(value))
        return found

    def _text(self, found: Fields, number: int) -> str:
        start, end = found.get(number, [(0, 0)])[0]
        if end - start > 1 << 16:
            raise OnnxFileError("it holds a name of more than 64 KiB")
        return self._decoded(start, end)

    def _decoded(self, start: int, end: int) -> str:
        try:
            return str(self.data[start:end], "utf-8")
        except UnicodeDecodeError as err:
            raise OnnxFileError("its Protobuf is damaged: it holds a name that is no text") from err

    def _names(self, found: Fields, number: int) -> list[str]:
        return [self._decoded(start, end) for start, end in found.get(number, ())]

    def _type(self, found: Fields) -> None:
        kind = found.get(1, [0])[0]
        if kind and kind != STRING and kind not in BITS:
            raise OnnxFileError(f"it declares a tensor of the type {kind}, which the format does not have")

    def _sparse(self, found: Fields) -> None:
        dims = found.get(3, [])
        negative = any(dim < 0 for dim in dims)
        self.dense += 0 if negative else math.prod(dims)
        if negative or self.dense > MAX_DENSE:
            raise OnnxFileError(
                f"it holds a sparse tensor of the shape {list(dims)}, which is unpacked when it is read"
            )
        kind = next((number for values in found.get(1, ()) for number in values.get(2, ())), 0)
        self.beside += math.prod(dims) * max(1, BITS.get(kind, 0) // 8)

    def _dim(self, found: Fields) -> None:
        if found.get(1, [0])[0] < -1:  # by which Paddle's exporter says that it varies
            raise OnnxFileError(f"it declares a dimension of {found[1][0]}")

    def _tensor(self, found: Fields) -> None:
        dims = found.get(1, [])
        kind = found.get(2, [0])[0]
        if any(dim < 0 for dim in dims):
            raise OnnxFileError(f"it holds a tensor of the shape {list(dims)}")
        if kind != STRING and kind not in BITS:
            raise OnnxFileError(f"it holds a tensor of the type {kind}, which the format does not have")
        count = math.prod(dims)
        if found.get(14, [0])[0] not in (0, 1):
            raise OnnxFileError("it holds a tensor that lies neither inside nor outside of the file")
        told = f"a tensor declares {list(dims)}"
        if 13 in found or found.get(14, [0])[0] == 1:
            if kind == STRING or {4, 5, 6, 7, 9, 10, 11} & found.keys():
                raise OnnxFileError("it holds a tensor that lies both inside and outside of the file")
            told_of = [(self._text(pair, 1), self._text(pair, 2)) for pair in found.get(13, [])]
            if len(dict(told_of)) < len(told_of):  # of which each reader takes one
                raise OnnxFileError("it holds a tensor that says twice where its bytes are")
            there = self._outside(dict(told_of))
            if -(-count * BITS[kind] // 8) > there:
                raise OnnxFileError(f"{told}, where the other file holds {there:,} bytes")
            self.beside += there
            return
        if kind == STRING:
            held = len(found.get(6, [])) if 9 not in found else -1
        elif 9 in found:
            start, end = found[9][0]
            held = count if (end - start) == -(-count * BITS[kind] // 8) else -1
        else:
            numbers = {4: 1.0, 5: 1.0, 7: 1.0, 10: 1.0, 11: 1.0}
            if kind in (14, 15):  # complex: the real part, and the other
                numbers = {4: 0.5, 10: 0.5}
            elif BITS[kind] < 8:
                numbers = {5: 8 / BITS[kind]}
            held = int(sum(sum(found.get(number, [])) * each for number, each in numbers.items()))
        if held < count:
            raise OnnxFileError(f"{told}, where the file does not hold as many elements")

    def _outside(self, given: Mapping[str, str]) -> int:
        """How many bytes a tensor has in another file."""
        if not given.keys() <= {"location", "offset", "length", "checksum"} or "location" not in given:
            raise OnnxFileError("it holds a tensor that does not say where its bytes are")
        location = given["location"]
        place = PurePosixPath(location)
        # ONNX Runtime takes "*/_ORT_MEM_ADDR_/*" and its like for places in its own memory, at the offset.
        plain = location and location.isprintable() and not {"\\", ":", "*"} & set(location)
        if not plain or place.is_absolute() or ".." in place.parts:
            raise OnnxFileError(f"its weights are to lie in {location!r}, outside of the file's folder")
        path = self.folder / place
        try:
            real = path.resolve(strict=True)
            inside = real.is_relative_to(self.folder.resolve())
            size = real.stat().st_size if real.is_file() else None
            if inside and size is not None:
                open_file(real).close()
        except HollowError as err:
            raise OnnxFileError(f"its weights are to lie in {location!r}: {err}") from None
        except (OSError, RuntimeError):
            raise OnnxFileError(f"its weights are to lie in {location!r}, which is missing beside it") from None
        if not inside:
            raise OnnxFileError(f"its weights are to lie in {location!r}, which is a link out of the file's folder")
        if size is None:
            raise OnnxFileError(f"its weights are to lie in {location!r}, which is no file")
        numbers = [given.get("offset", "0"), given.get("length", "")]
        if not all(number.isascii() and (number.isdigit() or not number) and len(number) < 20 for number in numbers):
            raise OnnxFileError("it holds a tensor whose place in another file is no number")
        offset = int(numbers[0] or 0)
        length = int(numbers[1]) if numbers[1] else size - offset
        if length < 0 or offset + length > size:
            raise OnnxFileError(f"it holds a tensor that reaches over the {size:,} bytes of {location!r}")
        self.outside[location] = size
        return length


class _Many(int):
    """How many numbers stand in a row, where what they are does not matter."""


def _add(values: list[Any], more: Sequence[int] | _Many, *, keep: bool) -> None:
    """Append numbers to a field's; where they are not kept, it holds how many there are."""
    if keep:
        if isinstance(more, _Many) or len(values) + len(more) > MAX_DIMENSIONS:
            raise OnnxFileError("it holds a tensor with more dimensions than one can have")
        values.extend(more)
        return
    count = int(more) if isinstance(more, _Many) else len(more)
    values[:] = [_Many(sum(values) + count)]


def _ends(data: memoryview) -> int:
    """How many varints end in some bytes."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) < 0x80))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
