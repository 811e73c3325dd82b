"""Run a TensorRT engine."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from compress.errors import MissingExtraError, StageError
from compress.model import Arrays, EngineModel
from compress.runtime.device import accelerator, new_stream, on_stream, stream_handle
from compress.vetting.texts import read_json

__all__ = ["TrtBackend", "tensorrt_module"]

# By the names of TensorRT's DataType.
TYPES = {
    "FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "INT8": torch.int8, "INT32": torch.int32,
    "INT64": torch.int64, "BOOL": torch.bool, "UINT8": torch.uint8,
}  # fmt: skip


def tensorrt_module() -> Any:
    """TensorRT's Python package.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module("tensorrt")
    except ModuleNotFoundError as err:
        if err.name != "tensorrt":
            raise
        raise MissingExtraError("can't work with TensorRT engines here", module="tensorrt", extra="tensorrt") from err


def _version_compatible(model: EngineModel) -> bool:
    """Whether engine.json beside the engine says that it was built so."""
    try:
        told = read_json(model.path.with_name("engine.json"))
    except (OSError, ValueError):
        return False
    return isinstance(told, dict) and told.get("version_compatible") is True


class TrtBackend:
    """A TensorRT engine on the GPU; inputs and outputs are copied there and back.

    More samples than the largest profile takes are run in parts.

    Args:
        model: built by a TensorRT and on a GPU that fit these.

    Raises:
        StageError: there is no GPU, or the engine does not load.
    """

    def __init__(self, model: EngineModel) -> None:
        self._trt = tensorrt_module()
        self._device = accelerator()
        self._stream = new_stream(self._device)
        self._runtime = self._trt.Runtime(self._trt.Logger(self._trt.Logger.WARNING))  # must outlive the engine
        # A version-compatible engine brings a runtime of its own, code that runs on the host: no other may.
        self._runtime.engine_host_code_allowed = _version_compatible(model)
        self._engine = self._runtime.deserialize_cuda_engine(model.path.read_bytes())
        if self._engine is None:
            raise StageError(
                f"TensorRT {self._trt.__version__} can't load {model.path.name}",
                why="another release or another GPU built it; what TensorRT logged above says which",
                mend="build it again here, or with --version-compatible and --hardware-compatibility",
            )
        self._context = self._engine.create_execution_context()
        self._profile = 0
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        is_input = self._trt.TensorIOMode.INPUT
        self._inputs = [name for name in names if self._engine.get_tensor_mode(name) == is_input]
        self._outputs = [name for name in names if name not in self._inputs]
        self._held: dict[str, torch.Tensor] = {}  # what the addresses point at

    @property
    def runtime(self) -> str:
        return f"TensorRT {self._trt.__version__}"

    @property
    def emulated(self) -> bool:
        return False

    def infer(self, inputs: Arrays) -> Arrays:
        count, largest = len(next(iter(inputs.values()))), self._largest()
        if largest is None or count <= largest:
            return self._infer(inputs)
        parts = [
            self._infer({name: values[at : at + largest] for name, values in inputs.items()})
            for at in range(0, count, largest)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in self._outputs}

    def _largest(self) -> int | None:
        """The largest batch of any profile; None where an input has no batch that varies."""
        if any(self._engine.get_tensor_shape(name)[0] >= 0 for name in self._inputs):
            return None
        return max(
            int(self._engine.get_tensor_profile_shape(self._inputs[0], profile)[2][0])
            for profile in range(self._engine.num_optimization_profiles)
        )

    def _infer(self, inputs: Arrays) -> Arrays:
        with on_stream(self._stream):
            self._bind(inputs)
            self._run()
            return {name: self._held[name].float().cpu().numpy() if self._held[name].dtype == torch.bfloat16
                    else self._held[name].cpu().numpy() for name in self._outputs}  # fmt: skip

    @property
    def stream(self) -> Any:
        """What its work is enqueued on."""
        return self._stream

    def prepared(self, inputs: Arrays) -> Callable[[], None]:
        """The inputs on the GPU; each call runs the engine once, on `stream`, and copies nothing.

        What is prepared holds until the next call of this or of `infer`.
        """
        with on_stream(self._stream):
            self._bind(inputs)
        return self._run

    def _run(self) -> None:
        if not self._context.execute_async_v3(stream_handle(self._stream)):
            raise StageError(
                "the engine does not run",
                why="TensorRT refused the call; what it logged above says why",
                mend="give inputs inside the engine's profiles",
            )

    def _bind(self, inputs: Arrays) -> None:
        """Copy the inputs to the GPU, and make room for the outputs."""
        self._choose({name: inputs[name].shape for name in self._inputs})
        for name in self._inputs:
            tensor = torch.from_numpy(np.ascontiguousarray(inputs[name])).to(self._device)
            self._context.set_input_shape(name, tuple(tensor.shape))
            self._hold(name, tensor)
        for name in self._outputs:
            shape = tuple(int(size) for size in self._context.get_tensor_shape(name))
            if any(size < 0 for size in shape):
                raise StageError(
                    f"can't run the engine's output {name!r}",
                    why="its shape depends on the values that go in",
                    mend="leave such operators (NonZero, NonMaxSuppression) out of the engine",
                )
            kind = str(self._engine.get_tensor_dtype(name)).rpartition(".")[2]
            self._hold(name, torch.empty(shape, dtype=TYPES[kind], device=self._device))

    def _hold(self, name: str, tensor: torch.Tensor) -> None:
        self._held[name] = tensor
        self._context.set_tensor_address(name, tensor.data_ptr())

    def _choose(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Switch to the profile whose best shapes are nearest among those that the inputs fit."""
        best, nearest = None, float("inf")
        for profile in range(self._engine.num_optimization_profiles):
            bounds = {name: self._engine.get_tensor_profile_shape(name, profile) for name in shapes}
            fits = all(
                low <= size <= high
                for name, shape in shapes.items()
                for low, size, high in zip(bounds[name][0], shape, bounds[name][2], strict=True)
            )
            away = sum(
                abs(size - tuned)
                for name, shape in shapes.items()
                for size, tuned in zip(shape, bounds[name][1], strict=True)
            )
            if fits and away < nearest:
                best, nearest = profile, away
        if best is None:
            given = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            raise StageError(
                f"the engine takes no inputs of {given}",
                why="they are outside all of its profiles",
                mend="build it with a larger --max-batch-size, or other --dims",
            )
        if best != self._profile:
            self._context.set_optimization_profile_async(best, stream_handle(self._stream))
            self._profile = best
