"""A module is known to refuse sizes by shapes alone, however large these are; what asks for values is known of nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compress.model.without_memory import refuses_at
from compress.signature import TensorSpec

INPUTS = (TensorSpec.parse("x:float32[batch,3,h,w]"),)
USUAL = {"batch": 1, "h": 64, "w": 64}


class DownAndUp(nn.Module):
    """Takes pictures of multiples of 8 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) + F.interpolate(self.conv(F.max_pool2d(x, 8)), scale_factor=8.0)  # type: ignore[no-any-return]


class ByValue(DownAndUp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() > 0 else super().forward(2 * x)


class Written(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy().repeat(2, 2))


@pytest.mark.parametrize(
    ("module", "height", "refused"),
    [
        (DownAndUp(), 72, False),
        (DownAndUp(), 68, True),
        (DownAndUp(), 8 << 20, False),
        (DownAndUp(), (8 << 20) + 1, True),
        (ByValue(), 68, False),
        (Written(), 68, False),
    ],
)
def test_what_a_module_refuses_is_known_by_shapes_alone(module: nn.Module, height: int, refused: bool) -> None:
    assert refuses_at(module.eval(), INPUTS, USUAL)(USUAL | {"h": height}) is refused
    assert all(type(each) is nn.Parameter for each in module.parameters()), "the module is left as it was"


class Grows(nn.Module):
    """Keeps a table of positions, longer with each longer input."""

    def __init__(self) -> None:
        super().__init__()
        self.places = torch.zeros(64)
        self.kept: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[3] > len(self.places):
            self.places = torch.zeros(x.shape[3])
        self.kept[x.shape[3]] = self.places + 1
        return x + self.places[: x.shape[3]]


def test_what_a_forward_keeps_of_a_try_by_shapes_alone_is_not_kept_in_the_module() -> None:
    module = Grows()
    refuses = refuses_at(module, INPUTS, USUAL)
    assert not refuses({"batch": 1, "h": 64, "w": 1 << 20})
    assert (len(module.places), type(module.places), module.kept) == (64, torch.Tensor, {})
    assert module(torch.zeros(1, 3, 64, 64)).numpy().shape == (1, 3, 64, 64)
