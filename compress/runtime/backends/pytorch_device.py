"""Run a torch module where it is asked to, eagerly or compiled, with its tensors kept there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from compress.model import Arrays, TorchModel, call
from compress.runtime.device import new_stream, on_stream

__all__ = ["TorchDeviceBackend"]


class TorchDeviceBackend:
    """torch on a device, without gradients.

    Args:
        model: in eval mode; a copy of it goes to the device.
        device: "cpu" or a CUDA device.
        compiled: by torch.compile, for each shape anew.
        precision: "fp32", or "fp16" and "bf16" by autocast.
    """

    def __init__(
        self, model: TorchModel, device: torch.device, *, compiled: bool = False, precision: str = "fp32"
    ) -> None:
        self._signature = model.signature
        self._device = device
        self._stream = new_stream(device)
        self._compiled, self._precision = compiled, precision
        module = copy.deepcopy(model.module).to(device).eval()
        self._module: Any = torch.compile(module, dynamic=False) if compiled else module
        self._names = [spec.name for spec in model.signature.outputs]

    @property
    def runtime(self) -> str:
        kind = "torch.compile" if self._compiled else "torch eager"
        return kind if self._precision == "fp32" else f"{kind} {self._precision.upper()}"

    @property
    def emulated(self) -> bool:
        return False

    @property
    def stream(self) -> Any:
        """What its work is enqueued on; None on the CPU."""
        return self._stream

    def infer(self, inputs: Arrays) -> Arrays:
        with on_stream(self._stream):
            outputs = self._run(self._there(inputs))
            return {
                name: tensor.float().cpu().numpy() if tensor.dtype in (torch.float16, torch.bfloat16)
                else tensor.cpu().numpy() for name, tensor in zip(self._names, outputs.values(), strict=True)
            }  # fmt: skip

    def prepared(self, inputs: Arrays) -> Callable[[], Any]:
        """The inputs on the device; each call runs the model once, on `stream`, and copies nothing."""
        with on_stream(self._stream):
            there = self._there(inputs)

        def work() -> None:
            if self._stream is None:
                self._run(there)
            else:
                with torch.cuda.stream(self._stream):
                    self._run(there)

        return work

    def _there(self, inputs: Arrays) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(values).to(self._device) for name, values in inputs.items()}

    def _run(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.inference_mode():
            if self._precision == "fp32":
                return call(self._module, self._signature.inputs, inputs)
            kind = torch.float16 if self._precision == "fp16" else torch.bfloat16
            with torch.autocast(self._device.type, kind):
                return call(self._module, self._signature.inputs, inputs)
