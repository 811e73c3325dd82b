"""Batch normalization over the whole batch where several processes share it.

PyTorch's own SyncBatchNorm is for GPUs; on CPUs the sums are added up here. What several processes compute is then
what one would compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["synced"]


@contextmanager
def synced(module: nn.Module) -> Iterator[None]:
    """The module's batch normalizations see the batches of all processes; after it they are plain again."""
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, _BatchNorm):
                swapped.append((parent, name, layer))
                on_gpu = any(tensor.is_cuda for tensor in layer.state_dict().values())
                setattr(parent, name, _on_gpu(layer) if on_gpu else _Synced(layer))
    try:
        yield
    finally:
        for parent, name, layer in swapped:
            layer.train(getattr(parent, name).training)
            setattr(parent, name, layer)


def _on_gpu(layer: nn.Module) -> nn.Module:
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(layer)  # type: ignore[no-untyped-call]
    return converted


class _Sum(torch.autograd.Function):
    """The sum over all processes; its gradient is the sum of theirs."""

    @staticmethod
    def forward(_context: Any, mine: torch.Tensor) -> torch.Tensor:
        total = mine.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class _Synced(_BatchNorm):
    """Shares the parameters and buffers of a batch normalization."""

    def __init__(self, plain: _BatchNorm) -> None:
        super().__init__(plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats)
        self.weight, self.bias = plain.weight, plain.bias
        self.running_mean, self.running_var = plain.running_mean, plain.running_var
        self.num_batches_tracked = plain.num_batches_tracked
        self.training = plain.training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, channels, …] → the same shape."""
        if not self.training:  # without statistics, too: a process may judge fewer batches than the others
            own = self.running_mean is None
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, own, 0.0, self.eps
            )
        axes = [axis for axis in range(x.ndim) if axis != 1]
        wide = x.float()
        count = wide.new_full((wide.shape[1],), wide.numel() // wide.shape[1])
        sums = torch.stack([wide.sum(axes), wide.square().sum(axes), count])
        total, squares, number = _Sum.apply(sums).unbind(0)  # type: ignore[no-untyped-call]
        mean = total / number
        variance = (squares / number - mean.square()).clamp(min=0)
        self._remember(mean.detach(), variance.detach(), number.detach())
        shape = [1, -1] + [1] * (x.ndim - 2)
        result = (wide - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        given: torch.Tensor = result.to(x.dtype)
        return given

    @torch.no_grad()
    def _remember(self, mean: torch.Tensor, variance: torch.Tensor, number: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None  # noqa: S101  it goes with the other two
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * number / (number - 1).clamp(min=1)
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(unbiased, share)
