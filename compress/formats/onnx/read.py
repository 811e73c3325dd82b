"""Open an ONNX file of someone else's: its bytes are looked through before onnx or ONNX Runtime reads them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from compress.artifact import Signature, TensorSpec
from compress.console.wording import counted
from compress.errors import StageError
from compress.vetting.onnx_errors import ForeignOperatorError, FunctionsError, OnnxFileError
from compress.vetting.onnx_wire import check_size, vet_onnx, vet_onnx_bytes

__all__ = ["read_onnx", "signature_of_onnx", "vetted_onnx"]

_AS_TENSORS = (
    "export it with plain tensors; skl2onnx does so for a classifier of scikit-learn by "
    "to_onnx(model, X, options={id(model): {'zipmap': False}})"
)
MAX_ELEMENTS = 1 << 28
"""Of all inputs together, with 1 for each symbolic dimension."""


def vetted_onnx(path: Path) -> Path:
    """The path of a file that ONNX Runtime may open.

    Raises:
        StageError: it is no ONNX file, is damaged, or reaches beyond itself: weights outside of its folder, operators
            that a library would have to bring.
    """
    try:
        vet_onnx(path)
    except OnnxFileError as err:
        raise _refused(path, err) from err
    return path


def read_onnx(path: Path, *, runs: bool = False) -> onnx.ModelProto:
    """The graph of a file, without weights that lie outside of it.

    Args:
        path: of the file.
        runs: refuse what would not run for want of a library, too.

    Raises:
        StageError: as for `vetted_onnx`.
    """
    try:
        check_size(path.stat().st_size)
        data = path.read_bytes()
        vet_onnx_bytes(data, path.parent, runs=runs)
        return onnx.load_model_from_string(data)
    except (OSError, OnnxFileError, DecodeError) as err:
        raise _refused(path, err) from err


def signature_of_onnx(path: Path) -> Signature:
    """The inputs and outputs of an ONNX file, its symbolic dimensions by their names.

    One without a name is called by its tensor and its place, x_1; one that leads, batch.

    Raises:
        StageError: it is no ONNX file, or has an input that is no tensor.
    """
    graph = read_onnx(path, runs=True).graph
    weights = {tensor.name for tensor in graph.initializer}
    weights |= {tensor.values.name for tensor in graph.sparse_initializer}
    inputs = tuple(_spec(path, value) for value in graph.input if value.name not in weights)
    outputs = tuple(_spec(path, value) for value in graph.output)
    if not inputs or not outputs:
        raise StageError(f"can't use {path}", why="it has no inputs, or no outputs", mend="export it with both")
    for value in graph.input:
        if value.name not in weights and not value.type.tensor_type.HasField("shape"):
            raise StageError(
                f"can't use {path}",
                why=f"{value.name!r} declares no shape",
                mend="export it with the shapes of its inputs",
            )
    sizes = (math.prod(size for size in spec.shape if isinstance(size, int)) for spec in inputs)
    if (total := sum(sizes)) > MAX_ELEMENTS:
        raise StageError(
            f"can't use {path}",
            why=f"its inputs declare {counted(total, 'elements')}",
            mend="export it with sizes that fit",
        )
    return Signature(inputs, outputs)


def _spec(path: Path, value: onnx.ValueInfoProto) -> TensorSpec:
    kind = value.type.tensor_type
    if kind.elem_type == onnx.TensorProto.STRING:
        raise StageError(
            f"can't use {path}",
            why=f"{value.name!r} holds text",
            mend="export the part behind its tokenizer or lookup, which takes numbers",
        )
    try:
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
    except (KeyError, TypeError, ValueError) as err:
        raise StageError(
            f"can't use {path}",
            why=f"{value.name!r} is {_kind(value)}, no tensor of numbers",
            mend=_AS_TENSORS if _is_of_maps(value) else "export it with plain tensors",
        ) from err
    shape = tuple(
        max(0, dim.dim_value) or _symbol(dim.dim_param) or (_symbol(f"{value.name}_{at}") if at else "batch")
        for at, dim in enumerate(kind.shape.dim)
    )
    return TensorSpec(value.name, dtype, shape)


def _is_of_maps(value: onnx.ValueInfoProto) -> bool:
    """As ZipMap gives them: of each sample a probability by the class's name."""
    return bool(value.type.HasField("sequence_type") and value.type.sequence_type.elem_type.HasField("map_type"))


def _kind(value: onnx.ValueInfoProto) -> str:
    """What is no tensor of numbers, in words."""
    kind = value.type.WhichOneof("value") or "of no type"
    words = {"sequence_type": "a sequence", "optional_type": "optional", "map_type": "a map", "opaque_type": "opaque"}
    words |= {"sparse_tensor_type": "a sparse tensor"}
    if kind == "tensor_type":
        known = onnx.TensorProto.DataType.items()
        return next((name for name, number in known if number == value.type.tensor_type.elem_type), "of no type")
    return words.get(kind, kind)


def _symbol(name: str) -> str:
    """A dimension's name as an identifier; empty where nothing is left of it, as of '?'."""
    plain = re.sub(r"\W", "_", name)
    return "" if not plain.strip("_") else plain if plain.isidentifier() else f"_{plain}"


def _refused(path: Path, err: Exception) -> StageError:
    beyond = isinstance(err, OnnxFileError)
    mend = "name an .onnx file as its exporter wrote it, with its weights inside or beside it"
    if isinstance(err, ForeignOperatorError):
        mend = "export it without that operator: by operators of ONNX, or as a function that the file itself holds"
    if isinstance(err, FunctionsError):
        mend = "export it without functions, what they hold in place of their calls"
    return StageError(
        f"can't read {path}",
        why=str(err) if beyond else f"it is no ONNX file: {err}",
        mend=mend,
    )
