"""Batch normalization over the whole batch where several processes share it.

PyTorch's own SyncBatchNorm is for GPUs; on CPUs the statistics are put together here. What several processes compute is
then what one would compute: each gives its mean and its sum of squared deviations from it, never of squares, which
would cancel where a mean is far above the deviation (Chan, Golub & LeVeque, Algorithms for Computing the Sample
Variance: Analysis and Recommendations, The American Statistician 37, 1983: the corrected two-pass algorithm within a
process, the pairwise formula between them).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["combined", "own_statistics", "synced"]


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
        about, apart, mine = own_statistics(x)
        before, after = dist.get_rank(), dist.get_world_size() - dist.get_rank() - 1
        rows = torch.cat([mine.new_zeros(before, *mine.shape), mine[None], mine.new_zeros(after, *mine.shape)])
        number, mean, squares = combined(_Sum.apply(rows))  # type: ignore[no-untyped-call]
        variance = squares / number
        self._remember(mean.detach(), variance.detach(), number.detach())
        shape = [1, -1] + [1] * (x.ndim - 2)
        factor = (variance + self.eps).rsqrt().float()
        result = (apart - (mean - about).float().view(shape)) * factor.view(shape)
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
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def own_statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of one process's part of a batch.

    Args:
        x: [n, channels, …].

    Returns:
        A value near the mean, float64 [channels], that gradients take for a constant; x less that value, float32; and
        count, mean and sum of squared deviations, float64 [3, channels].
    """
    axes = [axis for axis in range(x.ndim) if axis != 1]
    shape = [1, -1] + [1] * (x.ndim - 2)
    wide = x.float()
    about = wide.detach().mean(axes)
    apart = wide - about.view(shape)
    count = wide.numel() // wide.shape[1]
    rest = apart.mean(axes)  # the mean has rounded, too
    squares = (apart - rest.view(shape)).square().sum(axes)
    mean = about.double() + rest.double()
    return about.double(), apart, torch.stack([torch.full_like(mean, count), mean, squares.double()])


def combined(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count, mean and sum of squared deviations [channels] of all, from those of each [processes, 3, channels]."""
    counts, means, squares = rows.unbind(1)
    number = counts.sum(0)
    mean = (counts * means).sum(0) / number
    return number, mean, squares.sum(0) + (counts * (means - mean).square()).sum(0)
