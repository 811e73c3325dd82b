"""Rounding to 8 bits and back inside a float network, with gradients for what is rounded and for the scale.

Values: Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons, 2013 (straight through, and none
where a value is clipped). Scales: Esser et al., Learned Step Size Quantization, ICLR 2020, section 2.1, of the scale's
logarithm, as in Jain et al., Trained Quantization Thresholds, MLSys 2020, section 3: a step of the optimizer is then a
share of the scale, however small that is.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

__all__ = ["FakeActivation", "FakeBias", "FakeWeight"]


class _Rounded(torch.autograd.Function):
    """What ONNX's QuantizeLinear and DequantizeLinear give one after the other."""

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, low: int, high: int
    ) -> torch.Tensor:
        ratio = x / scale
        level = ratio.round() + zero
        inside = (level >= low) & (level <= high)
        level = level.clamp_(low, high).sub_(zero)
        error = torch.where(inside, level - ratio, level) if context.needs_input_grad[1] else None
        context.save_for_backward(inside, error)
        return level * scale

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inside, error = context.saved_tensors
        of_scale = None if error is None else (gradient * error).sum()
        return gradient * inside, of_scale, None, None, None


class FakeActivation(nn.Module):
    """An activation as 8 bits restore it: the zero-point stays, the scale is learned.

    Args:
        scale: to begin with.
        zero: the zero-point.
        low, high: the first and the last level.
        learned: whether the scale may move.
        most: what the highest value may become, where the quantizer takes the Clip away that the range stands for.
    """

    def __init__(
        self, scale: float, zero: int, low: int, high: int, *, learned: bool = True, most: float = math.inf
    ) -> None:
        super().__init__()
        self.low, self.high, self.zero = low, high, zero
        self.register_buffer("first", torch.tensor(scale, dtype=torch.float32))
        self.register_buffer("zero_point", torch.tensor(float(zero)))
        room = most / (scale * (high - zero)) if high > zero else math.inf
        self._growth_most = math.log(max(1.0, room))
        if learned:
            self.growth = nn.Parameter(torch.zeros(()))
        else:
            self.register_buffer("growth", torch.zeros(()))

    def scale(self) -> torch.Tensor:
        """[], float32."""
        first: torch.Tensor = self.get_buffer("first")
        return first * self.growth.clamp(max=self._growth_most).exp()

    def range(self) -> tuple[float, float]:
        """The lowest and the highest value, from which a quantizer finds this scale and this zero-point again."""
        scale = float(self.scale().detach())
        low = -self.high if self.zero == 0 and self.low < 0 else self.low
        return (low - self.zero) * scale, (self.high - self.zero) * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x float [...] → the same shape."""
        zero = self.get_buffer("zero_point")
        given: torch.Tensor = _Rounded.apply(x, self.scale(), zero, self.low, self.high)  # type: ignore[no-untyped-call]
        return given


class FakeWeight(nn.Module):
    """A constant as 8 bits restore it, its scale that of its largest value.

    Args:
        axis: of the channels that have a scale each; None where all share one.
        low, high: the first and the last level.
        symmetric: whether the zero-point is 0; else it follows from the lowest and the highest value.
    """

    def __init__(self, axis: int | None, low: int, high: int, *, symmetric: bool) -> None:
        super().__init__()
        self.axis, self.low, self.high, self.symmetric = axis, low, high, symmetric

    @torch.no_grad()
    def levels(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale and zero-point, float, of as many dimensions as the weight."""
        others = [dim for dim in range(weight.ndim) if dim != self.axis]
        low, high = weight.amin(others, keepdim=True).clamp(max=0), weight.amax(others, keepdim=True).clamp(min=0)
        width = torch.maximum(-low, high) if self.symmetric else high - low
        scale = width / (self.high if self.symmetric else self.high - self.low)
        scale = torch.where(scale < torch.finfo(torch.float32).tiny, torch.ones_like(scale), scale)
        return scale, torch.zeros_like(scale) if self.symmetric else (self.low - low / scale).round()

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """weight float [...] → the same shape."""
        given: torch.Tensor = _Rounded.apply(weight, *self.levels(weight), self.low, self.high)  # type: ignore[no-untyped-call]
        return given


class FakeBias(nn.Module):
    """A bias as 32 bits restore it, in steps of the product of the scales of a layer's input and weight.

    Args:
        given: rounds the input.
        weight: rounds the weight.
    """

    def __init__(self, given: FakeActivation, weight: FakeWeight) -> None:
        super().__init__()
        self._scales = given, weight  # in a tuple: they are modules of the network already

    def forward(self, bias: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """bias float [channels], and the layer's weight as it is in float → the bias."""
        given, fake = self._scales
        scale = given.scale().detach() * fake.levels(weight)[0].flatten()
        low, high = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
        rounded: torch.Tensor = _Rounded.apply(bias, scale, torch.zeros_like(scale), low, high)  # type: ignore[no-untyped-call]
        return rounded
