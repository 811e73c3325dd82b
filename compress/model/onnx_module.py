"""An ONNX file as a module of torch, for what looks at a model by running it: its outputs, the sizes that it takes."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort
import torch
from torch import nn

from compress.model.watched import Watched
from compress.signature import Signature

__all__ = ["OnnxModule"]


class OnnxModule(nn.Module):
    """Runs a file in ONNX Runtime; it has neither parameters nor gradients.

    Args:
        path: of a file that has been vetted. It is opened when it runs first.
        signature: its inputs, in the order in which the forward takes them.
    """

    def __init__(self, path: Path, signature: Signature) -> None:
        super().__init__()
        self.path = path
        self._inputs = [spec.name for spec in signature.inputs]
        self._session: ort.InferenceSession | None = None

    def forward(self, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Outputs by name.

        Raises:
            StageError, ResourceError: it has a loop, and does not come to an end.
            Exception: what ONNX Runtime refuses, by its own classes.
        """
        if self._session is None:
            options = ort.SessionOptions()
            options.log_severity_level = 4  # what it can't run is raised, too
            options.intra_op_num_threads = torch.get_num_threads()
            self._watched = Watched(self.path)
            self._session = ort.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])
        arrays = {name: tensor.numpy() for name, tensor in zip(self._inputs, tensors, strict=True)}
        names = [output.name for output in self._session.get_outputs()]
        found = self._watched.run(self._session, names, arrays)
        return {name: torch.as_tensor(values) for name, values in zip(names, found, strict=True)}
