"""A model on its way: a torch module, later an ONNX file, at last an engine; each with its signature."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from compress.artifact import Runtime
from compress.model.infer import infer_outputs, infer_signature
from compress.model.inputs import Arrays, call, example_inputs, sample_inputs, symbols_of
from compress.model.onnx_module import OnnxModule
from compress.processor import Processor
from compress.signature import Signature

__all__ = [
    "Arrays",
    "EngineModel",
    "Lost",
    "Model",
    "OnnxModel",
    "Ranges",
    "TorchModel",
    "call",
    "example_inputs",
    "in_float32",
    "infer_outputs",
    "infer_signature",
    "sample_inputs",
    "symbols_of",
    "weight_bytes",
]

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
        assumed: of the file that it was loaded from: which weights were taken, what was taken off their names or left
            out, in words; "" for nothing.
        lost: what it was before it lost channels or blocks; None where the stage before did not prune it.
        macs_gone: share of the multiply-accumulates that went with whole blocks before it: a pruning by a fraction of
            them counts it.
        processor: what makes its inputs, of a Hugging Face folder.
        factory: 'package.module:name', what made the module, where a user named it.
    """

    module: nn.Module
    signature: Signature
    layered: bool = True
    ranges: Ranges = field(default_factory=dict, compare=False)
    assumed: str = field(default="", compare=False)
    lost: Lost | None = field(default=None, compare=False)
    macs_gone: float = field(default=0.0, compare=False)
    processor: Processor | None = field(default=None, compare=False)
    factory: str = field(default="", compare=False)


@dataclass(frozen=True)
class Lost:
    """Channels or blocks that a model has just lost.

    Attributes:
        before: the model with all of them.
        channels: numbers of those that went, by the layer's name there, its side ("in", "out", or "parameter" of one
            outside torch's layers) and the axis of such a parameter.
        blocks: of branches that went whole, the number of the sum that each ended in, in the trace of the model before
            (`plain_trace`), and the number of what that sum is now.
    """

    before: TorchModel
    channels: Mapping[tuple[str, str, int], frozenset[int]]
    blocks: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OnnxModel:
    """An ONNX file; what stages give is all in one file, a user's may have weights beside it.

    Attributes:
        path: of it.
        signature: inputs and outputs.
        ranges: see `TorchModel`; what quantizes takes them in place of calibrating.
        runtime: what runs it on the CPU.
        processor: of an artifact that has one, as of a `TorchModel`.
    """

    path: Path
    signature: Signature
    ranges: Ranges = field(default_factory=dict, compare=False)
    runtime: Runtime = "onnxruntime"
    processor: Processor | None = field(default=None, compare=False)

    @property
    def module(self) -> nn.Module:
        """What runs it as torch would run a module; one of its own each time, since it holds the file's weights."""
        return OnnxModule(self.path, self.signature)


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


def weight_bytes(module: nn.Module) -> int:
    """Of parameters and buffers; what is shared counts once."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


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
        dataclasses.replace(spec, dtype="float32" if spec.dtype == "float16" else spec.dtype)
        for spec in model.signature.inputs
    )
    module = copy.deepcopy(model.module).float()
    names = tuple(spec.name for spec in model.signature.outputs)
    outputs = infer_signature(module, specs, names, model.signature.sizes).outputs
    signature = dataclasses.replace(model.signature, inputs=specs, outputs=outputs)
    return dataclasses.replace(model, module=module, signature=signature)
