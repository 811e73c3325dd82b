"""Write and check an ONNX model without a second copy of its weights.

protobuf serializes a message into one buffer that grows by doubling: up to three times the model more, and the checker
of onnx does it, too. Here weights go to the file one by one, and are left out of the check.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.descriptor import FieldDescriptor
from onnx import GraphProto, ModelProto, TensorProto

from compress.errors import StageError
from compress.formats.onnx.outline import GRAPH, INITIALIZER, LARGE, RAW, header

__all__ = ["checked", "save"]

MOST = (1 << 31) - 1  # bytes of one protobuf message


def save(model: ModelProto, path: Path) -> None:
    """Write a model, as `onnx.save` does; its weights come last in the file.

    Raises:
        StageError: it is larger than a protobuf message may be.
    """
    graph = _without(model.graph, "initializer").SerializeToString()
    starts: list[tuple[bytes, int]] = []  # of each weight: all before its values, and their bytes
    for tensor in model.graph.initializer:
        described, size = _without(tensor, "raw_data").SerializeToString(), len(tensor.raw_data)
        described += header(RAW, size) if tensor.HasField("raw_data") else b""
        starts.append((header(INITIALIZER, len(described) + size) + described, size))
    length = len(graph) + sum(len(start) + size for start, size in starts)
    if length > MOST:
        raise StageError(
            f"can't write {path.name}",
            why=f"it has {length / 1e9:.1f} GB of weights and nodes, and an ONNX file holds 2.1",
            mend="prune more, or export a part of the model",
        )
    with path.open("wb") as file:
        file.write(_without(model, "graph").SerializeToString())
        file.write(header(GRAPH, length))
        file.write(graph)
        for (start, size), tensor in zip(starts, model.graph.initializer, strict=True):
            file.write(start)
            if size:
                file.write(tensor.raw_data)


def checked(model: ModelProto) -> None:
    """`onnx.checker.check_model`, without the values of large weights.

    Raises:
        onnx.checker.ValidationError: it is no valid model.
    """
    light = _without(model, "graph")
    light.graph.CopyFrom(_without(model.graph, "initializer"))
    light.graph.initializer.extend(_light(model.graph))
    onnx.checker.check_model(light)


def _light(graph: GraphProto) -> Iterator[TensorProto]:
    for tensor in graph.initializer:
        if len(tensor.raw_data) > LARGE:
            yield TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0])
        else:
            yield tensor


def _without(message: Any, left_out: str) -> Any:
    """A copy of a message without one of its fields."""
    copy = type(message)()
    for field, value in message.ListFields():
        if field.name == left_out:
            continue
        if field.label == FieldDescriptor.LABEL_REPEATED:
            getattr(copy, field.name).extend(value)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(copy, field.name).CopyFrom(value)
        else:
            setattr(copy, field.name, value)
    return copy
