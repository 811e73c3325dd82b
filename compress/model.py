"""A model on its way: a torch module, later an ONNX file, at last an engine; each with its signature."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from compress.artifact import Signature, TensorSpec
from compress.errors import CheckpointError, SignatureError, first_line

__all__ = [
    "Arrays",
    "EngineModel",
    "Model",
    "OnnxModel",
    "Ranges",
    "TorchModel",
    "call",
    "example_inputs",
    "in_float32",
    "infer_outputs",
    "sample_inputs",
    "symbols_of",
]

Arrays = dict[str, np.ndarray[Any, Any]]
Ranges = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class TorchModel:
    """A module in eval mode.

    Attributes:
        module: its forward takes the signature's inputs by position.
        signature: inputs and outputs, the batch symbolic.
        layered: whether it still has its torch.nn layers (TorchScript and exported programs don't), so that it can be
            pruned and trained.
        ranges: of activations, (lowest, highest) by the name of the tensor in the graph that will be exported, where a
            training under 8 bits has found them.
    """

    module: nn.Module
    signature: Signature
    layered: bool = True
    ranges: Ranges = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class OnnxModel:
    """An ONNX file, all of it in one file.

    Attributes:
        path: of it.
        signature: inputs and outputs.
        ranges: see `TorchModel`; what quantizes takes them in place of calibrating.
    """

    path: Path
    signature: Signature
    ranges: Ranges = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class EngineModel:
    """A TensorRT engine; the ONNX file that it was built from is beside it."""

    path: Path
    signature: Signature

    @property
    def onnx(self) -> OnnxModel:
        """What it was built from."""
        return OnnxModel(self.path.with_name("model.onnx"), self.signature)


Model = TorchModel | OnnxModel | EngineModel


def example_inputs(specs: tuple[TensorSpec, ...], sizes: Mapping[str, int] | int, seed: int = 0) -> Arrays:
    """Random inputs: floats of a standard normal, integers 0 or 1 (so that they are valid indices), by input name.

    Args:
        specs: the inputs.
        sizes: a size for each symbolic dimension, or one for all.
        seed: the same seed gives the same arrays.
    """
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for spec in specs:
        if isinstance(sizes, int):
            shape = spec.fixed(sizes)
        else:
            shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)
        dtype = np.dtype(spec.dtype)
        values = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
        arrays[spec.name] = values.astype(dtype)
    return arrays


def sample_inputs(signature: Signature, batch: int, seed: int = 0) -> Arrays:
    """Random inputs (see `example_inputs`) at the signature's representative sizes, by input name."""
    return example_inputs(signature.inputs, signature.at(batch), seed)


def symbols_of(specs: tuple[TensorSpec, ...]) -> list[str]:
    """The names of the symbolic dimensions, sorted."""
    return sorted({dim for spec in specs for dim in spec.shape if isinstance(dim, str)})


def call(module: nn.Module, specs: tuple[TensorSpec, ...], arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Run a module on arrays or tensors by input name; outputs by name (`output`, `output_0`…, or a dict's keys)."""
    tensors = [torch.as_tensor(arrays[spec.name]) for spec in specs]
    return dict(_named(module(*tensors)))


def _named(result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(result, torch.Tensor):
        yield "output", result
    elif isinstance(result, Mapping):
        yield from ((str(name), value) for name, value in result.items() if isinstance(value, torch.Tensor))
    elif isinstance(result, list | tuple) and all(isinstance(value, torch.Tensor) for value in result):
        yield from ((f"output_{index}", value) for index, value in enumerate(result))
    else:
        raise CheckpointError(
            "can't use the model's output",
            why=f"its forward gives a {type(result).__name__}; a tensor, a tuple of tensors or a dict of tensors works",
            mend="wrap the model in a module whose forward gives one of these",
        )


def infer_outputs(
    module: nn.Module, inputs: tuple[TensorSpec, ...], names: tuple[str, ...] | None = None
) -> tuple[TensorSpec, ...]:
    """Find the outputs by running the module twice with different sizes: what changes is symbolic.

    Args:
        module: in eval mode.
        inputs: their symbolic dimensions are tried with two sizes each.
        names: names for the outputs, in order, instead of those that `call` gives.

    Raises:
        SignatureError: the forward does not take these inputs, or the names don't fit.
    """
    symbols = symbols_of(inputs)
    first = {symbol: 2 + index for index, symbol in enumerate(symbols)}
    trials = [first] + [first | {symbol: 2 * len(symbols) + 3} for symbol in symbols]
    runs: list[dict[str, torch.Tensor]] = []
    try:
        with torch.no_grad():
            runs = [call(module, inputs, example_inputs(inputs, sizes)) for sizes in trials]
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as err:
        raise SignatureError(
            "the model does not run on inputs of its signature",
            why=f"{', '.join(map(str, inputs))}: {first_line(err)}",
            mend="give each input of its forward with --input 'name:dtype[batch,…]' (`inputs=` in compress.save)",
        ) from err
    outputs = []
    for name, tensor in runs[0].items():
        shape: list[int | str] = list(tensor.shape)
        for symbol, run in zip(symbols, runs[1:], strict=True):
            for axis, size in enumerate(run[name].shape):
                if size != tensor.shape[axis]:
                    shape[axis] = symbol
        outputs.append(TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(shape)))
    if names is None:
        return tuple(outputs)
    if len(names) != len(outputs):
        raise SignatureError(
            f"can't name the outputs {', '.join(names)}",
            why=f"the model has {len(outputs)}, not {len(names)}",
            mend="give a name for each output, in order",
        )
    return tuple(TensorSpec(name, spec.dtype, spec.shape) for name, spec in zip(names, outputs, strict=True))


def in_float32(model: TorchModel) -> TorchModel:
    """A model of float32 weights, for one in half precision; any other as it is.

    The stages measure, train and quantize in float32. Inputs and outputs become float32, too; `--precision fp16` or
    `bf16` gives a half-precision file again.
    """
    half = (torch.float16, torch.bfloat16)
    tensors = (*model.module.parameters(), *model.module.buffers())
    if not any(tensor.dtype in half for tensor in tensors):
        return model
    specs = tuple(
        TensorSpec(spec.name, "float32" if spec.dtype == "float16" else spec.dtype, spec.shape)
        for spec in model.signature.inputs
    )
    module = copy.deepcopy(model.module).float()
    names = tuple(spec.name for spec in model.signature.outputs)
    return TorchModel(module, Signature(specs, infer_outputs(module, specs, names)), model.layered)
