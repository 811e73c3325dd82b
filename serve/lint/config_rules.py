"""What Triton's core refuses in one model's configuration, whatever runs it (ValidateModelConfig, ValidateIOShape)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from serve.config.shell_words import MEND, unsafe_words
from serve.lint.finding import Findings, error, warning
from serve.lint.model import AOTI, FILES, PLATFORMS, Model

__all__ = ["backend_rules", "batch_tensor_rules", "instance_rules", "metric_rules", "newer_rules", "tensor_rules"]

ANY = -1
INT32, FP32 = 8, 11  # of Triton's DataType
BY_BACKEND = {backend: platform for platform, backend in PLATFORMS.items()}


def backend_rules(model: Model) -> Findings:
    """Name, backend and platform, batch size."""
    config, name = model.config, model.name
    if config.name not in ("", name):
        yield error(
            name, f"config.pbtxt names the model {config.name!r}", f'write name: "{name}", as the folder has it'
        )
    for what, word in unsafe_words(name, config):
        yield error(name, f"{what} is {word!r}, and Triton writes it into a line for a shell", MEND)
    if model.backend == "ensemble" and config.default_model_filename in FILES.values():
        yield error(name, "an ensemble has a default_model_filename", "leave it out")
    if model.backend == "ensemble" and config.backend:
        yield error(name, f"an ensemble has the backend {config.backend!r}", "leave backend out")
    elif not model.backend:
        known = ", ".join(sorted(BY_BACKEND))
        what = f"platform {config.platform!r} is unknown" if config.platform else "nothing says what runs the model"
        yield error(name, what, f'write backend: "onnxruntime" or another of {known}')
    elif (config.backend, config.platform) == ("pytorch", AOTI):
        pass
    elif config.backend and config.platform and config.platform != BY_BACKEND.get(config.backend, config.platform):
        yield error(
            name, f"backend {config.backend!r} and platform {config.platform!r} don't go together", "leave platform out"
        )
    if model.backend == "onnxruntime" and config.model_transaction_policy.decoupled:
        what = "decoupled is set, and ONNX Runtime gives one answer to each request"
        yield error(name, what, "leave model_transaction_policy out")
    if config.max_batch_size < 0:
        yield error(name, f"max_batch_size is {config.max_batch_size}", "write 0 for no batching, or the largest batch")


def tensor_rules(model: Model) -> Findings:
    """Inputs and outputs: names, types, dims, reshapes."""
    for kind, tensors in (("input", model.config.input), ("output", model.config.output)):
        counts = Counter(tensor.name for tensor in tensors)
        for tensor_name, count in counts.items():
            if count > 1:
                what = f"{kind} {tensor_name!r} is declared {count} times"
                if kind == "input":
                    yield error(model.name, f"{what}: no request is answered", "declare it once")
                else:
                    yield warning(model.name, what, "declare it once")
        for tensor in tensors:
            yield from _tensor(model, kind, tensor)


def _tensor(model: Model, kind: str, tensor: Any) -> Findings:
    name, what = model.name, f"{kind} {tensor.name!r}"
    if not tensor.name:
        yield error(name, f"an {kind} has no name", "write the name that the model's file has for it")
    if tensor.data_type == 0:
        yield error(name, f"{what} has no data_type", "write data_type: TYPE_FP32, or what the model takes")
    if not tensor.dims:
        yield error(name, f"{what} has no dims", "write its shape without the batch; for a scalar dims: 1, reshape { }")
    shape = tensor.reshape.shape
    for dim in (*tensor.dims, *shape):
        if dim < 1 and dim != ANY:
            yield error(name, f"{what} has the dimension {dim}", "write 1 or more, or -1 for any length")
    if tensor.HasField("reshape"):
        if not shape and model.config.max_batch_size == 0:
            yield error(
                name, f"{what} is reshaped to a scalar, in a model without a batch", "give it the shape 1 instead"
            )
        elif _sizes(tensor.dims) != _sizes(shape):
            yield error(
                name, f"{what} is reshaped from {list(tensor.dims)} to {list(shape)}", "give both the same size"
            )
    if kind == "input" and tensor.format != 0 and len(tensor.dims) != 3:
        yield error(
            name, f"{what} has an image format and {len(tensor.dims)} dims", "write 3 dims, or leave format out"
        )
    if model.backend != "tensorrt":
        for field in ("is_shape_tensor", "is_non_linear_format_io"):
            if getattr(tensor, field, False):
                yield error(name, f"{what} has {field}, which only TensorRT knows", "leave it out")


def _sizes(dims: Sequence[int]) -> list[int]:
    """Products of the dimensions between those of any length."""
    if ANY not in dims:
        return [math.prod(dims)]
    parts: list[int] = []
    for any_length, group in groupby((*dims, None), key=lambda dim: dim == ANY):
        values = [dim for dim in group if dim is not None]
        if any_length:
            parts += [1] * (len(values) - 1)
        else:
            parts.append(math.prod(values))
    return parts if dims[0] != ANY else [1, *parts]


def batch_tensor_rules(model: Model) -> Findings:
    """batch_input and batch_output name tensors that are there."""
    config, name = model.config, model.name
    inputs, outputs = {tensor.name for tensor in config.input}, {tensor.name for tensor in config.output}
    for field, entries in (("batch_input", config.batch_input), ("batch_output", config.batch_output)):
        for entry in entries:
            if len(entry.source_input) != 1:
                yield error(name, f"{field} has {len(entry.source_input)} source_input", "write one")
            for source in sorted(set(entry.source_input) - inputs):
                yield error(
                    name, f"{field} has the source_input {source!r}, the model has none", f"one of {sorted(inputs)}"
                )
    for entry in config.batch_input:
        if entry.data_type not in (INT32, FP32):
            yield error(name, "batch_input is neither TYPE_INT32 nor TYPE_FP32", "write one of these")
    for entry in config.batch_output:
        for target in sorted(set(entry.target_name) - outputs):
            yield error(
                name, f"batch_output has the target {target!r}, the model has none", f"one of {sorted(outputs)}"
            )
        if len(set(entry.target_name)) < len(entry.target_name):
            yield error(name, "batch_output names a target twice", "name it once")


def instance_rules(model: Model, gpus: int | None) -> Findings:
    """Where the instances run.

    Args:
        model: any.
        gpus: of this machine; None when the repository is for another.
    """
    groups = () if model.is_ensemble else model.config.instance_group
    if groups and all(group.passive for group in groups):
        yield error(model.name, "each instance_group is passive: Triton dies of its first request", "leave passive out")
    for group in groups:
        kind = type(group).Kind.Name(group.kind)
        if kind in ("KIND_CPU", "KIND_MODEL") and group.gpus:
            yield error(model.name, f"instance_group has {kind} and names GPUs", "leave gpus out, or write KIND_GPU")
        if kind == "KIND_GPU" and gpus is not None and (not gpus or any(gpu >= gpus for gpu in group.gpus)):
            yield error(model.name, f"instance_group asks for a GPU, this machine has {gpus}", "write KIND_CPU")
        if group.profile and model.backend != "tensorrt":
            yield error(model.name, "instance_group has a profile, which only TensorRT knows", "leave profile out")
        for profile in group.profile if model.backend == "tensorrt" else ():
            if not profile.isdecimal():
                yield error(model.name, f"profile {profile!r} is no number", "write the index of a profile, as in 0")


def metric_rules(model: Model) -> Findings:
    """Histograms of model_metrics."""
    for control in getattr(getattr(model.config, "model_metrics", None), "metric_control", ()):
        if not control.metric_identifier.family or not control.histogram_options.buckets:
            yield error(model.name, "a metric_control lacks its family or its buckets", "write both")


def newer_rules(model: Model) -> Findings:
    """Fields that the embedded Triton, release 24.10, can't read: it then refuses the whole file."""
    message = "{}, which came with a later Triton than the one that `serve up` brings"
    mend = "leave it out, or serve it with a newer Triton, and lint it with --container"
    if model.config.platform == AOTI:
        yield error(model.name, message.format(f"its platform is {AOTI}"), mend)
    if model.config.HasField("model_metrics"):
        yield error(model.name, message.format("it has model_metrics"), mend)
    if model.config.ensemble_scheduling.max_inflight_requests:
        yield error(model.name, message.format("ensemble_scheduling has max_inflight_requests"), mend)
