"""Run an ONNX file with ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError

from compress.errors import StageError
from compress.model import Arrays, OnnxModel

__all__ = ["OnnxBackend", "is_half", "session"]

ort.set_default_logger_severity(3)  # its warnings speak of its own graph passes, not of the user's model


def session(path: Path, threads: int) -> ort.InferenceSession:
    """An ONNX Runtime session on the CPU.

    Raises:
        StageError: ONNX Runtime refuses the file.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    if is_half(path):  # the layout optimizations of ONNX Runtime 1.31 crash on some of these, on the CPU
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as err:  # ONNX Runtime's own exception classes have no common base but this
        raise StageError(
            f"ONNX Runtime can't load {path.name}",
            why=str(err).strip().splitlines()[0],
            mend="update onnxruntime; if that does not help, report it with the model",
        ) from err


def is_half(path: Path) -> bool:
    """Whether a file has weights in half precision; a file that can't be read is the session's to refuse."""
    try:
        graph = onnx.load(path, load_external_data=False).graph
    except (OSError, DecodeError):
        return False
    return any(t.data_type in (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16) for t in graph.initializer)


class OnnxBackend:
    """ONNX Runtime on the CPU with a fixed number of intra-op threads."""

    def __init__(self, model: OnnxModel, threads: int) -> None:
        self._session = session(model.path, threads)
        self._names = [output.name for output in self._session.get_outputs()]

    @property
    def runtime(self) -> str:
        return "ONNX Runtime"

    def infer(self, inputs: Arrays) -> Arrays:
        return dict(zip(self._names, self._session.run(self._names, inputs), strict=True))
