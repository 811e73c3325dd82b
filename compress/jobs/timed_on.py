"""What times candidates: one runtime alone, as dozens are timed where the finished file is timed once."""

from __future__ import annotations

from compress.artifact import Runtime
from compress.options import CompressOptions
from compress.runtime.backends.openvino_cpu import installed
from compress.runtime.machine import fast_bfloat16

__all__ = ["timed_on"]


def timed_on(options: CompressOptions) -> Runtime:
    """The one that is asked for; of two that may serve, ONNX Runtime, but in BF16, which it only emulates.

    OpenVINO is chosen in the end only where it is faster: a limit in time that is kept here is kept there.
    """
    if options.runtime == "openvino":
        return "openvino"
    half = getattr(options, "precision", "fp32") == "bf16"
    return "openvino" if options.runtime == "auto" and half and installed() and fast_bfloat16() else "onnxruntime"
