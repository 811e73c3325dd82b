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
from torch import nn
from torch.nn.utils import parametrize

from compress.errors import StageError
from compress.model import Model, TorchModel
from compress.stages import Given, Progress
from compress.stages.channels import PRUNABLE
from compress.stages.finetune import Finetune
from compress.stages.quantize_onnx import Target

__all__ = ["TrainQuantized"]

MOMENTUM = 0.05


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
    takes: ClassVar[type] = TorchModel
    gives: ClassVar[type] = TorchModel

    @property
    def options(self) -> Mapping[str, Any]:
        return {**self.training.options, "target": self.target}

    def check(self, model: Model) -> None:
        self.training.check(model)

    def run(self, model: TorchModel, folder: Path, progress: Progress) -> Given:  # noqa: ARG002
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
        for layer in found.values():
            axis = 1 if getattr(layer, "transposed", False) else 0
            parametrize.register_parametrization(layer, "weight", _Weight(axis))
            hooks.append(layer.register_forward_pre_hook(_Activation(signed=self.target != "cpu")))
        first, last, steps = self.training.fit(module, model.signature, progress, freeze_statistics=True, exact=True)
        for layer, hook in zip(found.values(), hooks, strict=True):
            hook.remove()
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        return Given(
            TorchModel(_plain(module, model.module), model.signature),
            did=f"trained {self.training.epochs} epochs in fake INT8 on {len(self.training.data)} samples, "
            f"loss {first:.4f} to {last:.4f}",
            details={
                "loss_first_epoch": first,
                "loss_last_epoch": last,
                "steps": steps,
                "layers": len(found),
                "left_float": sorted(set(layers) - set(found)),
            },
        )


def _plain(trained: nn.Module, template: nn.Module) -> nn.Module:
    """The trained weights in a copy of the module as it was: parametrizing leaves traces in a layer's class."""
    module = copy.deepcopy(template)
    module.load_state_dict(trained.state_dict())
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
    """Rounds what a layer is given to 8 bits, over the range that it has seen in training."""

    def __init__(self, *, signed: bool) -> None:
        self.signed = signed
        self.low = self.high = 0.0

    def __call__(self, layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x = given[0]
        if not x.is_floating_point():
            return given
        if layer.training:
            low, high = (float(value) for value in torch.aminmax(x.detach()))
            fresh = self.low == self.high
            self.low = min(low, 0.0) if fresh else self.low + MOMENTUM * (min(low, 0.0) - self.low)
            self.high = max(high, 0.0) if fresh else self.high + MOMENTUM * (max(high, 0.0) - self.high)
        if self.signed:
            scale = max(-self.low, self.high, 1e-9) / 127
            return (torch.fake_quantize_per_tensor_affine(x, scale, 0, -127, 127), *given[1:])
        scale = max(self.high - self.low, 1e-9) / 255
        return (torch.fake_quantize_per_tensor_affine(x, scale, round(-self.low / scale), 0, 255), *given[1:])


def shorter(training: Finetune, share: float, rate: float) -> Finetune:
    """The same training with a share of its epochs (at least one) and of its learning rate."""
    epochs = max(1, round(training.epochs * share))
    return dataclasses.replace(training, epochs=epochs, learning_rate=training.learning_rate * rate)
