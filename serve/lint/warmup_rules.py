"""Warm-up requests that the model would refuse: Triton runs them before it is ready, and gives up with them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from serve.config.names import leads_out
from serve.lint.finding import Findings, error, warning
from serve.lint.model import Model

__all__ = ["warmup_rules"]

ANY = -1
SIZES = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "FP32": 4, "FP64": 8, "BF16": 2,
}  # fmt: skip


def warmup_rules(model: Model) -> Findings:
    """model_warmup against the inputs."""
    config = model.config
    if model.is_ensemble:
        return
    needed = {tensor.name for tensor in config.input if not tensor.optional}
    known = {tensor.name: tensor for tensor in config.input}
    for warmup in config.model_warmup:
        what = f"warm-up {warmup.name!r}"
        if warmup.batch_size > max(config.max_batch_size, 1):
            yield error(
                model.name,
                f"{what} has batch_size {warmup.batch_size}",
                f"at most max_batch_size {config.max_batch_size}",
            )
        if warmup.batch_size == 0:
            yield warning(model.name, f"{what} has batch_size 0: Triton skips it", "write batch_size: 1")
            continue
        for missing in sorted(needed - set(warmup.inputs)):
            yield error(
                model.name, f"{what} leaves the input {missing!r} out", "give it zero_data, random_data or a file"
            )
        for name, given in warmup.inputs.items():
            if name not in known:
                yield error(model.name, f"{what} has an input {name!r}, the model has none", f"one of {sorted(known)}")
            else:
                yield from _input(model, f"{what}, input {name!r}", given, known[name])


def _input(model: Model, what: str, given: Any, tensor: Any) -> Findings:
    kind = given.WhichOneof("input_data_type")
    file = model.folder / "warmup" / given.input_data_file
    if kind is None:
        yield error(model.name, f"{what} has no data", "write zero_data: true")
    elif kind == "input_data_file" and leads_out(given.input_data_file):
        what = f"{what}: input_data_file {given.input_data_file!r} leads out of the folder warmup"
        yield error(model.name, what, "put the file there, or write zero_data: true")
    elif kind == "input_data_file" and not file.is_file():
        yield error(model.name, f"{what}: there is no file {file}", "put it there, or write zero_data: true")
    elif kind == "input_data_file" and (short := _short(given, file)):
        yield error(model.name, f"{what}: {short}", "write as many bytes as the shape has, or zero_data: true")
    if given.data_type != tensor.data_type:
        yield error(model.name, f"{what} has another data_type than the model", "write the model's")
    dims = list(given.dims)
    if ANY in dims:
        yield error(model.name, f"{what} has a dimension of any length", "write a length")
    elif len(dims) != len(tensor.dims) or any(
        dim not in (wanted, ANY) and wanted != ANY for dim, wanted in zip(dims, tensor.dims, strict=True)
    ):
        yield error(model.name, f"{what} has the shape {dims}, the model {list(tensor.dims)}", "write the model's")


def _short(given: Any, file: Path) -> str:
    """Why the file is too small for the shape; a longer one is cut by Triton, and strings say their own lengths."""
    name = type(given).DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[given.data_type].name
    size = SIZES.get(name.removeprefix("TYPE_"), 0) * math.prod(given.dims)
    have = file.stat().st_size
    return f"{file.name} has {have} bytes, its shape {size}" if have < size else ""
