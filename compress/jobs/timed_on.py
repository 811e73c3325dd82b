"""What times files on the way to a result: one runtime alone, as dozens are timed where the last one is timed once."""

from __future__ import annotations

from compress.artifact import Runtime
from compress.options import CompressOptions, ExportOptions
from compress.runtime.backends.openvino_cpu import installed
from compress.runtime.machine import fast_bfloat16

__all__ = ["multiplies_bf16", "timed_on"]


def timed_on(options: ExportOptions) -> Runtime:
    """The one that is asked for; of two that may serve, ONNX Runtime, but in BF16, which it only emulates.

    OpenVINO is chosen in the end only where it is faster: a limit in time that is kept here is kept there.
    """
    half = options.precision == "bf16" and multiplies_bf16(options)
    return "openvino" if options.runtime == "openvino" or half else "onnxruntime"


def multiplies_bf16(options: CompressOptions) -> bool:
    """Whether a runtime that may serve the result multiplies BF16 on this CPU, rather than emulate it."""
    return options.target == "cpu" and options.runtime != "onnxruntime" and installed() and fast_bfloat16()
