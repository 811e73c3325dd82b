"""Versions and the files in them: what is missing, damaged, or not what config.pbtxt says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.artifact import RUNTIME_NAMES, Runtime
from serve.lint.finding import Findings, error, warning
from serve.lint.model import FILES, Model, str_of_number
from serve.pack.onnx_reader import OnnxFile, OnnxTensor

__all__ = ["file_rules", "onnx_files", "onnx_rules", "runtime_of", "session_rules", "version_rules"]

ANY = -1
# Parameters of the ONNX Runtime backend, and the values of those that are no count.
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "intra_op_thread_count": (), "inter_op_thread_count": (), "execution_mode": ("0", "1"),
    "enable_mem_arena": ("0", "1"), "enable_mem_pattern": ("0", "1"),
}  # fmt: skip
TYPES = {
    "TYPE_BOOL": "bool", "TYPE_UINT8": "uint8", "TYPE_UINT16": "uint16", "TYPE_UINT32": "uint32",
    "TYPE_UINT64": "uint64", "TYPE_INT8": "int8", "TYPE_INT16": "int16", "TYPE_INT32": "int32", "TYPE_INT64": "int64",
    "TYPE_FP16": "float16", "TYPE_FP32": "float", "TYPE_FP64": "double", "TYPE_BF16": "bfloat16",
    "TYPE_STRING": "string",
}  # fmt: skip


def version_rules(model: Model) -> Findings:
    """Folders that are versions, and whether the policy takes any."""
    for folder in sorted(path for path in model.folder.iterdir() if path.is_dir()):
        number = str_of_number(folder.name)
        if number is not None and number != folder.name:
            yield warning(model.name, f"Triton does not see the version {folder.name}", f"call it {number}")
    if not model.present:
        yield error(model.name, "there is no version", "put the model into a folder 1")
    elif not model.served:
        versions = ", ".join(map(str, model.present))
        yield error(
            model.name, f"version_policy takes none of the versions {versions}", "name one of them, or leave it out"
        )
    if model.present == (0,):
        yield error(model.name, "its only version is 0, which the gateway can't ask for", "number versions from 1")
    elif 0 in model.present:
        yield warning(model.name, "there is a version 0, which the gateway can't ask for", "number versions from 1")


def file_rules(model: Model, backends: Sequence[str] | None) -> Findings:
    """Backends and the model's file in each version that is served.

    Args:
        model: any.
        backends: those of this Triton; None when the repository is for another.
    """
    if model.is_ensemble or not model.backend:
        return
    if backends is not None and model.backend not in backends:
        known = ", ".join(backends)
        if model.backend == "openvino":
            mend = "pip install the extra [openvino], pack it with --runtime onnxruntime, or lint with --container"
            yield error(model.name, "this Triton has no backend 'openvino': its Python has no OpenVINO", mend)
            return
        yield error(
            model.name,
            f"this Triton has no backend {model.backend!r}",
            f"use one of {known}, or lint for a container with --container",
        )
        return
    if model.backend not in FILES and not model.config.default_model_filename:
        return  # of another's making: its files are not known
    for version in model.served:
        path = model.file(version)
        if not path.exists():
            yield error(model.name, f"there is no {version}/{path.name}", "put it there, or set default_model_filename")
        elif path.is_dir() and (backends is not None or model.backend == "python"):
            yield error(model.name, f"{version}/{path.name} is a folder", "put the model's file there")
        elif path.is_file() and path.stat().st_size == 0:
            yield error(model.name, f"{version}/{path.name} is empty", "put the model there")


def session_rules(model: Model) -> Findings:
    """The settings that the ONNX Runtime backend reads."""
    if model.backend != "onnxruntime":
        return
    for name, numbers in SETTINGS.items():
        if name not in model.config.parameters:
            continue
        value = model.config.parameters[name].string_value
        number = len(value) <= 10 and value.isascii() and value.isdecimal() and int(value) < 2**31
        if not number or (numbers and value not in numbers):
            yield error(
                model.name, f"the parameter {name} is {value!r}", f"write {' or '.join(numbers or ('a number',))}"
            )
    level = model.config.optimization.graph.level
    if not -1 <= level <= 2:
        yield error(model.name, f"optimization.graph.level is {level}", "write -1 (basic), 0 (all), 1 or 2 (none)")


def onnx_files(model: Model) -> list[Path]:
    """The ONNX files that a runtime will open."""
    on_cpu = model.backend in ("onnxruntime", "openvino")
    paths = [model.file(version) for version in model.served] if on_cpu else []
    if model.backend == "openvino":
        paths = [path for path in paths if path.suffix == ".onnx"]
    return [path for path in paths if path.is_file() and path.stat().st_size]


def runtime_of(model: Model) -> Runtime:
    """What opens the ONNX files of a model."""
    return "openvino" if model.backend == "openvino" else "onnxruntime"


def onnx_rules(model: Model, files: Mapping[Path, OnnxFile]) -> Findings:
    """The ONNX files of a model against its configuration.

    Args:
        model: any.
        files: what `read_onnx` found.
    """
    for path in onnx_files(model):
        if path not in files:
            continue  # its runtime is not here
        held, where = files[path], f"{path.parent.name}/{path.name}"
        if held.error:
            yield error(
                model.name, f"{RUNTIME_NAMES[runtime_of(model)]} refuses {where}: {held.error}", "export it again"
            )
            continue
        if not model.config.output:
            yield error(model.name, "config.pbtxt declares no output", f"declare those of {where}")
        given = {tensor.name for tensor in held.inputs}
        for tensor in model.config.input:
            if tensor.optional and tensor.name in given:
                what = f"input {tensor.name!r} is optional, and {where} has no value of its own for it"
                yield error(model.name, what, "leave optional out")
        for kind, declared, there in (
            ("input", model.config.input, held.inputs),
            ("output", model.config.output, held.outputs),
        ):
            by_name = {tensor.name: tensor for tensor in there}
            for tensor in declared:
                if tensor.name and tensor.name not in by_name:
                    yield error(model.name, f"{where} has no {kind} {tensor.name!r}", f"one of {sorted(by_name)}")
            missing = sorted(by_name.keys() - {tensor.name for tensor in declared}) if kind == "input" else []
            for name in missing:
                yield error(model.name, f"config.pbtxt leaves out the input {name!r} of {where}", "declare it")
            for tensor in declared:
                if tensor.name in by_name:
                    yield from _tensor(model, where, kind, tensor, by_name[tensor.name])


def _tensor(model: Model, where: str, kind: str, declared: Any, there: OnnxTensor) -> Findings:
    types = type(declared).DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    data_type = types[declared.data_type].name
    dims = list(declared.reshape.shape if declared.HasField("reshape") else declared.dims)
    full = [ANY, *dims] if model.config.max_batch_size > 0 else dims
    shape = list(there.shape)
    if there.type != f"tensor({TYPES.get(data_type)})":
        yield error(
            model.name, f"{kind} {there.name!r} is {data_type}, in {where} {there.type}", "write the file's type"
        )
    fits = len(full) == len(shape) and all(ANY in pair or pair[0] == pair[1] for pair in zip(full, shape, strict=True))
    if not fits:
        batch = "with the batch " if model.config.max_batch_size > 0 else ""
        yield error(
            model.name,
            f"{kind} {there.name!r} is {batch}{full}, in {where} {shape}",
            "write the file's shape, without its first dimension when max_batch_size is positive",
        )
    elif model.config.max_batch_size > 0 and shape[:1] not in ([ANY], [model.config.max_batch_size]):
        yield warning(
            model.name,
            f"{kind} {there.name!r} of {where} takes {shape[0]} samples at a time",
            "write max_batch_size: 0",
        )
