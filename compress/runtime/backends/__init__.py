"""Open a model and run it: one small protocol for torch, ONNX Runtime, OpenVINO and TensorRT."""

from __future__ import annotations

from typing import Protocol

from compress.model import Arrays, EngineModel, Model, TorchModel
from compress.runtime.backends.onnxrt import OnnxBackend
from compress.runtime.backends.pytorch import TorchBackend

__all__ = ["Backend", "OnnxBackend", "TorchBackend", "open_model"]


class Backend(Protocol):
    """A model that is ready to run."""

    @property
    def runtime(self) -> str:
        """What runs it, for the report."""

    @property
    def emulated(self) -> bool:
        """Whether its answers are right and its speed means nothing."""

    def infer(self, inputs: Arrays) -> Arrays:
        """Outputs by name for inputs by name, both with the batch first."""


def open_model(model: Model, *, threads: int) -> Backend:
    """A backend for a model, with that many threads for its operators on the CPU."""
    if isinstance(model, EngineModel):
        from compress.runtime.backends.trt import TrtBackend

        return TrtBackend(model)
    if isinstance(model, TorchModel):
        return TorchBackend(model, threads)
    if model.runtime == "openvino":
        from compress.runtime.backends.openvino_cpu import OpenVinoBackend, OpenVinoOptions

        return OpenVinoBackend(model, OpenVinoOptions(threads=threads))
    return OnnxBackend(model, threads)
