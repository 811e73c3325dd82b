"""The layers of an exported program are found again: same answers, the same weights, a form that can be saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from compress.formats.exported.layers import NoLayersError, layered
from compress.formats.native.graph import from_data, to_data


class Branches(nn.Module):
    """What torch.fx can't trace: sizes as numbers, keywords, a loop over a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for _ in range(x.ndim):
            x = self.b(F.gelu(self.a(x))) if x.shape[-1] == 6 else x
        return {"answer": x, "mean": x.mean(1, keepdim=True)}


class Places(nn.Module):
    """In place, slices, a table tied to a head, a constant, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.table(x)
        y += torch.arange(x.shape[1], dtype=torch.float32)[:, None] * torch.tensor(0.5)
        y = torch.cat([y[:, 1:], y[:, :1]], 1)
        return self.head(y.masked_fill(x[..., None] == 0, 0.0))[..., -3:]  # type: ignore[no-any-return]


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=2, bias=False),
        nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout(0.3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
        nn.LayerNorm(4, eps=1e-3),
    )  # fmt: skip


IMAGE, ROWS, WORDS = torch.randn(2, 3, 9, 9), torch.randn(2, 6), torch.randint(0, 10, (2, 5))
NETWORKS: dict[str, tuple[Any, torch.Tensor, torch.Tensor, dict[type[nn.Module], int]]] = {
    "layers of all kinds": (_convolutions, IMAGE, torch.randn(3, 3, 9, 9), {nn.Conv2d: 2, nn.BatchNorm2d: 1, nn.Linear: 1}),
    "branches": (Branches, ROWS, torch.randn(5, 6), {nn.Linear: 2}),
    "in place and tied": (Places, WORDS, torch.randint(0, 10, (4, 7)), {nn.Linear: 1, nn.Embedding: 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_a_program_gets_its_layers_back(name: str) -> None:
    make, example, other, kinds = NETWORKS[name]
    network = make().eval()
    varying = range(1 if example.is_floating_point() else example.ndim)
    sizes = dict.fromkeys(varying, Dim.DYNAMIC)
    program = torch.export.export(network, (example,), dynamic_shapes=(sizes,), strict=False)
    found = layered(program)
    again = from_data(to_data(found, inputs=1))
    for module in (found, again):
        assert {kind: sum(type(layer) is kind for layer in module.modules()) for kind in kinds} == kinds
        with torch.no_grad():
            torch.testing.assert_close(module(other), network(other))
    held = {id(parameter) for parameter in network.parameters()}
    assert {parameter.data_ptr() for parameter in found.parameters()} <= {p.data_ptr() for p in network.parameters()}
    assert len(list(found.parameters())) == len(held)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.get_buffer("calls").add_(1)


def test_a_program_that_changes_its_buffers_has_no_layers() -> None:
    program = torch.export.export(Counts().eval(), (torch.ones(2),))
    with pytest.raises(NoLayersError, match="changes"):
        layered(program)
