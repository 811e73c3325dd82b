"""Quantization-aware training: the model is trained under the rounding that INT8 will do to it.

Jacob et al., Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference, CVPR 2018,
section 3. Gradients pass the rounding as if it were not there, and stop where a value is clipped.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

from compress.errors import StageError
from compress.model import Model, TorchModel
from compress.stages import Given, Progress
from compress.stages.channels import PRUNABLE
from compress.stages.finetune import Finetune, details_of, told
from compress.stages.quantize_onnx import Target
from compress.training.machine_setup import distributed, shared

__all__ = ["TrainQuantized"]

MOMENTUM = 0.05
RANGE = "_seen_range"  # of what a layer is given: lowest and highest


@dataclass(frozen=True)
class TrainQuantized:
    """Train with 8-bit weights and activations; what goes on is the float weights, made for them.

    The static quantization that follows finds the same grid: weights are rounded for each output channel alone, so
    that folding a batch normalization, which scales whole channels, changes nothing.

    Attributes:
        training: data, teacher, epochs, rate; batch normalization keeps its statistics.
        target: "cpu" rounds activations to unsigned 8 bits with a zero-point, the others to signed ones.
    """

    training: Finetune
    target: Target = "cpu"

    name: ClassVar[str] = "train_quantized"
    resumes: ClassVar[bool] = True
    takes: ClassVar[type] = TorchModel
    gives: ClassVar[type] = TorchModel

    @property
    def finetune(self) -> Finetune:
        """What is asked of the training."""
        return self.training

    @property
    def options(self) -> Mapping[str, Any]:
        return {**self.training.options, "target": self.target}

    def check(self, model: Model) -> None:
        self.training.check(model)

    def run(self, model: TorchModel, folder: Path, progress: Progress) -> Given:
        if self.training.training.devices > 1 and not distributed():
            from compress.stages.in_processes import in_processes

            return in_processes(self, model, folder, progress)
        module = copy.deepcopy(model.module)
        inside = {
            child for layer in module.modules() if isinstance(layer, nn.MultiheadAttention) for child in layer.modules()
        }
        layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, PRUNABLE)}
        found = {name: layer for name, layer in layers.items() if layer not in inside}
        if not found:
            raise StageError(
                "nothing to train for INT8",
                why="the model has no convolution and no linear layer of its own",
                mend="ask for --int8 static or dynamic",
            )
        hooks = []
        plain = set(module.state_dict())
        for layer in found.values():
            axis = 1 if getattr(layer, "transposed", False) else 0
            parametrize.register_parametrization(layer, "weight", _Weight(axis))
            layer.register_buffer(RANGE, torch.zeros(2))
            hooks.append(layer.register_forward_pre_hook(_Activation(signed=self.target != "cpu")))
        # What is computed twice would be counted twice among the ranges.
        asked = dataclasses.replace(self.training.training, gradient_checkpointing=False, compile="off")
        training = dataclasses.replace(self.training, training=asked)
        trained = training.fit(
            module, model.signature, progress, folder=folder, freeze_statistics=True, exact=True
        )  # fmt: skip
        for layer, hook in zip(found.values(), hooks, strict=True):
            hook.remove()
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        state = {name: tensor for name, tensor in module.state_dict().items() if name in plain}
        return Given(
            TorchModel(_plain(state, model.module), model.signature),
            did=f"trained in fake INT8 {told(trained, asked)}",
            warnings=trained.warnings,
            details={
                **details_of(trained),
                "layers": len(found),
                "left_float": sorted(set(layers) - set(found)),
            },
        )


def _plain(state: Mapping[str, torch.Tensor], template: nn.Module) -> nn.Module:
    """The trained weights in a copy of the module as it was: parametrizing leaves traces in a layer's class."""
    module = copy.deepcopy(template)
    module.load_state_dict(state)
    return module.eval()


class _Weight(nn.Module):
    """Rounds a weight to signed 8 bits, symmetric, with a scale for each channel of an axis."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        others = [dim for dim in range(weight.ndim) if dim != self.axis]
        scale = (weight.detach().abs().amax(others) / 127).clamp(min=1e-12)
        zero = torch.zeros_like(scale, dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(weight, scale, zero, self.axis, -127, 127)


class _Activation:
    """Rounds what a layer is given to 8 bits, over the range that it has seen in training: a buffer of the layer."""

    def __init__(self, *, signed: bool) -> None:
        self.signed = signed

    def __call__(self, layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x = given[0]
        if not x.is_floating_point():
            return given
        seen = layer.get_buffer(RANGE)
        if layer.training:
            self._see(seen, x.detach())
        low, high = seen.unbind()
        if self.signed:
            scale = torch.maximum(-low, high).clamp(min=1e-9) / 127
            zero = torch.zeros_like(scale, dtype=torch.int32)
            return (torch.fake_quantize_per_tensor_affine(x, scale, zero, -127, 127), *given[1:])
        scale = (high - low).clamp(min=1e-9) / 255
        zero = (-low / scale).round().to(torch.int32)
        return (torch.fake_quantize_per_tensor_affine(x, scale, zero, 0, 255), *given[1:])

    @staticmethod
    @torch.no_grad()
    def _see(seen: torch.Tensor, x: torch.Tensor) -> None:
        low, high = torch.aminmax(x)
        now = torch.stack([low.clamp(max=0.0), high.clamp(min=0.0)]).to(seen.dtype)
        if shared():
            apart = now * now.new_tensor([-1.0, 1.0])
            dist.all_reduce(apart, dist.ReduceOp.MAX)
            now = apart * now.new_tensor([-1.0, 1.0])
        seen.copy_(torch.where((seen == 0).all(), now, seen.lerp(now, MOMENTUM)))


def shorter(recovery: Finetune, epochs: int, share: float, rate: float) -> Finetune:
    """The same training with a share of so many epochs (at least one), and of its learning rate."""
    training = recovery.training
    asked = dataclasses.replace(
        training, epochs=max(1, round(epochs * share)), learning_rate=training.learning_rate * rate
    )  # fmt: skip
    return dataclasses.replace(recovery, training=asked)
