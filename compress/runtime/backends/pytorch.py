"""Run a torch module eagerly."""

from __future__ import annotations

import torch

from compress.model import Arrays, TorchModel, call
from compress.model.inputs import in_calls, run_on

__all__ = ["TorchBackend"]


class TorchBackend:
    """Eager torch on the CPU, without gradients.

    Args:
        model: in eval mode.
        threads: torch's thread count is the process's own; it is set before each run.
    """

    def __init__(self, model: TorchModel, threads: int) -> None:
        self._model = model
        self._threads = threads
        self._names = [spec.name for spec in model.signature.outputs]

    @property
    def runtime(self) -> str:
        return "torch eager"

    @property
    def emulated(self) -> bool:
        return False

    def infer(self, inputs: Arrays) -> Arrays:
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        return in_calls(self._model.signature, inputs, self._run)

    def _run(self, inputs: Arrays) -> Arrays:
        with torch.inference_mode():
            outputs = run_on(inputs, lambda: call(self._model.module, self._model.signature.inputs, inputs))
        return {name: tensor.numpy() for name, tensor in zip(self._names, outputs.values(), strict=True)}
