"""Write and check an ONNX model without a second copy of its weights.

protobuf serializes a message into one buffer that grows by doubling: up to three times the model more, and the checker
of onnx does it, too. Here weights go to the file one by one, and are left out of the check. One message holds 2.1 GB:
of a larger model they go to a file beside it, as ONNX's external data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import Message
from onnx import GraphProto, ModelProto, TensorProto
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from compress.formats.onnx.outline import (
    GRAPH,
    INITIALIZER,
    LARGE,
    RAW,
    appended,
    bytes_of,
    header,
    put_outside,
    values_of,
)

__all__ = ["MOST", "checked", "declare", "save", "without"]

MOST = (1 << 31) - 1  # bytes of one protobuf message
BESIDE = ".data"  # behind the name of the file: what the exporter of torch writes, too


def save(model: ModelProto, path: Path) -> None:
    """Write a model, as `onnx.save` does; its weights come last in it, or in a file beside it where they are too many.

    Args:
        model: is left as it is. Weights that lie outside of it are taken from the folder of `path`.
        path: of the file. A file with weights beside it that it no longer needs is removed.

    Raises:
        OSError: it can't be written, or weights that lie outside can't be read.
    """
    graph = without(model.graph, "initializer").SerializeToString()
    starts: list[tuple[bytes, int]] = []  # of each weight: all before its values, and their bytes
    for tensor in model.graph.initializer:
        described, size = _inside(tensor).SerializeToString(), bytes_of(tensor)
        described += header(RAW, size) if size or tensor.HasField("raw_data") else b""
        starts.append((header(INITIALIZER, len(described) + size) + described, size))
    length = len(graph) + sum(len(start) + size for start, size in starts)
    beside = path.with_name(path.name + BESIDE)
    if length > MOST:
        _save_apart(model, path, beside)
        return
    with path.open("wb") as file:
        file.write(without(model, "graph").SerializeToString())
        file.write(header(GRAPH, length))
        file.write(graph)
        for (start, size), tensor in zip(starts, model.graph.initializer, strict=True):
            file.write(start)
            if size:
                with values_of(tensor, path.parent) as values:
                    file.write(values)
    beside.unlink(missing_ok=True)


def _save_apart(model: ModelProto, path: Path, beside: Path) -> None:
    """Write large weights to a file beside the model's, unless they are all there."""
    light = without(model, "graph")
    light.graph.CopyFrom(without(model.graph, "initializer"))
    large = [tensor for tensor in model.graph.initializer if bytes_of(tensor) > LARGE]
    there = all(uses_external_data(each) and ExternalDataInfo(each).location == beside.name for each in large)
    part = beside.with_name(beside.name + ".part")
    with part.open("wb") as file:
        for tensor in model.graph.initializer:
            kept = light.graph.initializer.add()
            if there and uses_external_data(tensor):
                kept.CopyFrom(tensor)
                continue
            size = bytes_of(tensor)
            kept.CopyFrom(_inside(tensor))
            with values_of(tensor, path.parent) as values:
                if size <= LARGE:
                    if size or tensor.HasField("raw_data"):
                        kept.raw_data = bytes(values)
                    continue
                put_outside(kept, beside.name, appended(file, values), size)
    if there:
        part.unlink()
    else:
        part.replace(beside)
    path.write_bytes(light.SerializeToString())


def _inside(tensor: TensorProto) -> TensorProto:
    """What describes a tensor whose values are to lie in its file, without them."""
    described: TensorProto = without(tensor, "raw_data")
    described.ClearField("external_data")
    described.ClearField("data_location")
    return described


def declare(value: onnx.ValueInfoProto, shape: Sequence[int | str]) -> None:
    """Say which sizes a tensor has, in place."""
    value.type.tensor_type.ClearField("shape")
    value.type.tensor_type.shape.SetInParent()  # of a scalar, too, which has no dimensions
    for size in shape:
        dim = value.type.tensor_type.shape.dim.add()
        if isinstance(size, str):
            dim.dim_param = size
        else:
            dim.dim_value = size


def checked(model: ModelProto) -> None:
    """`onnx.checker.check_model`, without the values of large weights.

    Raises:
        onnx.checker.ValidationError: it is no valid model.
    """
    light = without(model, "graph")
    light.graph.CopyFrom(without(model.graph, "initializer"))
    light.graph.initializer.extend(_light(model.graph))
    onnx.checker.check_model(light)


def _light(graph: GraphProto) -> Iterator[TensorProto]:
    for tensor in graph.initializer:
        if len(tensor.raw_data) > LARGE or uses_external_data(tensor):
            yield TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0])
        else:
            yield tensor


def without(message: Any, left_out: str) -> Any:
    """A copy of a message without one of its fields."""
    copy = type(message)()
    for field, value in message.ListFields():
        if field.name == left_out:
            continue
        if isinstance(value, Message):
            getattr(copy, field.name).CopyFrom(value)
        elif isinstance(value, bool | int | float | str | bytes):
            setattr(copy, field.name, value)
        else:
            getattr(copy, field.name).extend(value)
    return copy
