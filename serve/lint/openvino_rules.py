"""What Triton's OpenVINO backend refuses, and what it does without a word."""

from __future__ import annotations

from serve.lint.finding import Findings, error, warning
from serve.lint.model import Model

__all__ = ["openvino_rules", "padding_rules"]

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
    if model.config.model_transaction_policy.decoupled:
        what = "decoupled is set, and OpenVINO gives one answer to each request"
        yield error(model.name, what, "leave model_transaction_policy out")


def padding_rules(model: Model, *, container: bool) -> Findings:
    """Batches that Triton's own backend fills up, or refuses.

    Args:
        model: any.
        container: it is for a Triton elsewhere, which has that backend.
    """
    if model.backend != "openvino" or model.config.max_batch_size < 1:
        return
    most = model.config.max_batch_size
    name = "ENABLE_BATCH_PADDING"
    if name not in model.config.parameters or model.config.parameters[name].string_value.upper() != "YES":
        what = f"Triton's own OpenVINO backend answers batches of {most} alone"
        yield warning(model.name, what, f"write the parameter {name}: YES")
    elif container and most > 1:
        what = f"Triton's own OpenVINO backend fills every batch up to max_batch_size, {most}"
        yield warning(model.name, what, "write the batch that usually forms, or pack it with --runtime onnxruntime")


def _is_number(text: str) -> bool:
    return len(text) <= 10 and text.isascii() and text.isdecimal() and int(text) < 2**31
