"""What Triton's OpenVINO backend refuses, and what it does without a word."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from serve.lint.finding import Findings, error, warning
from serve.lint.model import Model
from serve.pack.compared import COMPARED
from serve.pack.onnx_reader import OnnxFile

__all__ = ["openvino_file_rules", "openvino_place_rules", "openvino_rules"]

ANY = -1
NOT_TAKEN = ("TYPE_BF16", "TYPE_STRING")

HINTS = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")
COUNTS = ("INFERENCE_NUM_THREADS", "COMPILATION_NUM_THREADS")


def openvino_rules(model: Model) -> Findings:
    """Its parameters, and the kinds of instances."""
    if model.backend != "openvino":
        return
    told = {name: value.string_value for name, value in model.config.parameters.items()}
    wrong = {name: "a number" for name in COUNTS if name in told and not _is_number(told[name])}
    streams = told.get("NUM_STREAMS", "AUTO")
    if streams.upper() not in ("AUTO", "NUMA") and not _is_number(streams):
        wrong["NUM_STREAMS"] = "a number, AUTO or NUMA"
    if told.get("PERFORMANCE_HINT", HINTS[0]).upper() not in HINTS:
        wrong["PERFORMANCE_HINT"] = " or ".join(HINTS)
    if told.get("HINT_BF16", "YES").upper() != "YES":
        wrong["HINT_BF16"] = "YES, or leave it out"
    for name, wanted in wrong.items():
        yield error(model.name, f"the parameter {name} is {told[name]!r}", f"write {wanted}")
    if any(type(group).Kind.Name(group.kind) not in ("KIND_CPU", "KIND_AUTO") for group in model.config.instance_group):
        yield error(model.name, "an instance_group is of another kind than KIND_CPU", "write kind: KIND_CPU")
    most, compared = model.config.max_batch_size, told.get(COMPARED, "")
    if _is_number(compared) and most > int(compared):
        what = f"max_batch_size is {most}, and OpenVINO's answers were compared with ONNX Runtime's at up to {compared}"
        mend = f"write max_batch_size: {compared}, or pack it with --runtime onnxruntime"
        yield warning(model.name, what, mend)
    if model.config.model_transaction_policy.decoupled:
        what = "decoupled is set, and OpenVINO gives one answer to each request"
        yield error(model.name, what, "leave model_transaction_policy out")


def openvino_file_rules(model: Model, files: Mapping[Path, OnnxFile]) -> Findings:
    """What the embedded Triton's backend refuses of tensors and of batches that a file fixes.

    Args:
        model: any.
        files: what `read_onnx` found.
    """
    if model.backend != "openvino":
        return
    for kind, tensors in (("input", model.config.input), ("output", model.config.output)):
        for tensor in tensors:
            name = type(tensor).DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[tensor.data_type].name
            if name in NOT_TAKEN:
                what = f"{kind} {tensor.name!r} is {name}, which the embedded Triton's OpenVINO backend does not take"
                yield error(model.name, what, "let the network take and give float32, or serve it by ONNX Runtime")
    told = {name: value.string_value.upper() for name, value in model.config.parameters.items()}
    most = model.config.max_batch_size
    if most < 1 or told.get("RESHAPE_IO_LAYERS") == "YES":
        return
    for path, held in files.items():
        if model.folder not in path.parents:
            continue
        sizes = {tensor.shape[0] for tensor in held.inputs if tensor.shape and tensor.shape[0] != ANY}
        if sizes and (sizes != {most} or told.get("ENABLE_BATCH_PADDING") != "YES"):
            what = f"{path.parent.name}/{path.name} takes batches of {' and '.join(map(str, sorted(sizes)))} alone"
            mend = f"write max_batch_size: {min(sizes)}, and the parameter ENABLE_BATCH_PADDING: YES"
            yield error(model.name, what, mend)


def openvino_place_rules(model: Model, *, container: bool) -> Findings:
    """What only the embedded Triton can't do, and batches that Triton's own backend fills up, or refuses.

    Args:
        model: any.
        container: it is for a Triton elsewhere, which has that backend.
    """
    if model.backend != "openvino":
        return
    told = {name: value.string_value for name, value in model.config.parameters.items()}
    if not container:
        for name in ("TARGET_DEVICE", "CPU_EXTENSION_PATH"):
            if told.get(name, "").upper() not in ("", "CPU"):
                what = f"the parameter {name} is {told[name]!r}, and the embedded Triton runs on the CPU alone"
                yield error(model.name, what, "leave it out, or lint for a container with --container")
        if told.get("HINT_BF16", "").upper() == "YES" and not _multiplies_bfloat16():
            what = "HINT_BF16 is set, and this CPU does not multiply BF16 in hardware"
            yield error(model.name, what, "leave it out, or lint for a container with --container")
    if model.config.max_batch_size < 1:
        return
    most = model.config.max_batch_size
    if told.get("ENABLE_BATCH_PADDING", "").upper() != "YES":
        what = f"Triton's own OpenVINO backend answers batches of {most} alone"
        yield warning(model.name, what, "write the parameter ENABLE_BATCH_PADDING: YES")
    elif container and most > 1:
        what = f"Triton's own OpenVINO backend fills every batch up to max_batch_size, {most}"
        yield warning(model.name, what, "write the batch that usually forms, or pack it with --runtime onnxruntime")


def _multiplies_bfloat16() -> bool:
    path = Path("/proc/cpuinfo")
    flags = path.read_text(encoding="utf-8").split() if path.exists() else []
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags)


def _is_number(text: str) -> bool:
    return len(text) <= 10 and text.isascii() and text.isdecimal() and int(text) < 2**31
