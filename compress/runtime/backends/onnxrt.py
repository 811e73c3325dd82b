"""Run an ONNX file with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError

from compress.errors import StageError, first_line
from compress.formats.onnx.outline import outline, read_whole
from compress.model import Arrays, OnnxModel
from compress.model.inputs import in_calls, run_on
from compress.model.watched import Watched
from compress.runtime.backends.bfloat16 import emulated

__all__ = ["WRONG_IN_HALF", "OnnxBackend", "is_emulated", "is_half", "session"]

ort.set_default_logger_severity(3)  # its warnings speak of its own graph passes, not of the user's model

# ONNX Runtime 1.31 rounds biases to multiples of the product of two scales, and computes that product in FP16.
WRONG_IN_HALF = ("WeightBiasQuantization",)


def session(path: Path, threads: int) -> ort.InferenceSession:
    """An ONNX Runtime session on the CPU; BF16, for which it has no kernels, emulated.

    Raises:
        StageError: ONNX Runtime refuses the file.
    """
    options = ort.SessionOptions()
    if is_emulated(path):
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # others may drop the rounding
        return _opened(path, emulated(read_whole(path)).SerializeToString(), options, threads)
    half = is_half(path)
    if half:  # the layout optimizations of ONNX Runtime 1.31 crash on some of these, on the CPU
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    return _opened(path, str(path), options, threads, WRONG_IN_HALF if half else ())


def _opened(
    path: Path, file: str | bytes, options: ort.SessionOptions, threads: int, disabled: Sequence[str] = ()
) -> ort.InferenceSession:
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    try:
        return ort.InferenceSession(
            file, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(disabled)
        )
    except Exception as err:  # ONNX Runtime's own exception classes have no common base but this
        raise StageError(
            f"ONNX Runtime can't load {path.name}",
            why=first_line(err),
            mend="update onnxruntime; if that does not help, report it with the model",
        ) from err


def is_half(path: Path, *kinds: int) -> bool:
    """Whether a file has tensors in half precision; a file that can't be read is ONNX Runtime's to refuse.

    Args:
        path: of an ONNX file.
        kinds: element types to look for; without any, FP16 and BF16.
    """
    wanted = kinds or (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    try:
        graph = outline(path).graph
    except (OSError, DecodeError):
        return False
    casts = (attribute.i for node in graph.node if node.op_type == "Cast" for attribute in node.attribute)
    return any(kind in wanted for kind in (*casts, *(tensor.data_type for tensor in graph.initializer)))


def is_emulated(path: Path) -> bool:
    """Whether a file has tensors in BF16, for which the CPU has no kernels: its speed here means nothing."""
    return is_half(path, onnx.TensorProto.BFLOAT16)


class OnnxBackend:
    """ONNX Runtime on the CPU with a fixed number of intra-op threads; BF16, for which it has no kernels, emulated."""

    def __init__(self, model: OnnxModel, threads: int) -> None:
        self._emulated = is_emulated(model.path)
        self._session = session(model.path, threads)
        self._watched = Watched(model.path)
        self._names = [output.name for output in self._session.get_outputs()]
        self._signature = model.signature

    @property
    def runtime(self) -> str:
        return "ONNX Runtime, BF16 emulated" if self._emulated else "ONNX Runtime"

    @property
    def emulated(self) -> bool:
        return self._emulated

    def infer(self, inputs: Arrays) -> Arrays:
        return in_calls(self._signature, inputs, self._run)

    def _run(self, inputs: Arrays) -> Arrays:
        outputs = run_on(inputs, lambda: self._watched.run(self._session, self._names, inputs))
        return dict(zip(self._names, outputs, strict=True))
