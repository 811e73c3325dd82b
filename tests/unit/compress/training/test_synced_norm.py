"""Batch normalization shared by processes is that of the whole batch, also where a mean is far above the deviation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from compress.training.machine.synced_norm import combined, own_statistics, synced

FAR = [(0.0, 1.0), (1e4, 1e-1), (-3e5, 1.0), (1e-6, 1e-7)]


def batch(mean: float, deviation: float, count: int = 96) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return mean + deviation * torch.randn(count, 3, 4, 4, generator=generator)


@pytest.mark.parametrize("parts", [(96,), (48, 48), (90, 5, 1)])
@pytest.mark.parametrize(("mean", "deviation"), FAR)
def test_parts_of_any_size_have_the_statistics_of_the_whole(
    parts: tuple[int, ...], mean: float, deviation: float
) -> None:
    x = batch(mean, deviation)
    number, got, squares = combined(torch.stack([own_statistics(part)[2] for part in torch.split(x, list(parts))]))
    wide = x.double()
    assert number.tolist() == [96 * 16] * 3
    torch.testing.assert_close(got, wide.mean((0, 2, 3)), rtol=1e-9, atol=1e-7 * deviation)
    torch.testing.assert_close(squares / number, wide.var((0, 2, 3), unbiased=False), rtol=1e-4, atol=0)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/met", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("mean", "deviation"), FAR[:3])
def test_outputs_gradients_and_running_statistics_are_those_of_float64(mean: float, deviation: float) -> None:
    x = batch(mean, deviation)
    plain = nn.Sequential(nn.BatchNorm2d(3)).double()
    ours = nn.Sequential(nn.BatchNorm2d(3))
    aim = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    found = []
    with synced(ours):
        for module, given in ((plain, x.double()), (ours, x)):
            given = given.clone().requires_grad_()
            out = module(given)
            (out * aim.to(out.dtype)).sum().backward()
            assert given.grad is not None
            found.append((out.detach().double(), given.grad.double() * deviation))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
    for name, buffer in plain[0].named_buffers():
        torch.testing.assert_close(ours[0].get_buffer(name).double(), buffer.double(), rtol=1e-4, atol=1e-6)
