"""Tiny real networks, one for each thing that a tool may stumble over."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

IMAGE = "image:float32[batch,3,16,16]"


def conv(i: int, o: int, *, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(i, o, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(o), nn.ReLU()
    )


class Residual(nn.Module):
    """Its additions tie the channels of several layers together."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 32)
        self.a, self.b = conv(32, 32), conv(32, 32)
        self.down, self.c = conv(32, 64, stride=2), conv(64, 64)
        self.head = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.b(self.a(x))
        x = self.down(x)
        x = F.relu(x + self.c(x))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Depthwise(nn.Module):
    """Depthwise separable blocks, as in MobileNet."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(3, 32), conv(32, 32, groups=32), conv(32, 64, kernel=1), conv(64, 64, groups=64))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


class Concat(nn.Module):
    """Dense concatenation, and a flatten whose columns belong to channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 32), conv(32, 32), conv(64, 32, stride=2)
        self.head = nn.Linear(32 * 8 * 8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x = self.c(torch.cat([x, self.b(x)], 1))
        return self.head(torch.flatten(x, 1))  # type: ignore[no-any-return]


class Hourglass(nn.Module):
    """Down and up again with ConvTranspose and a skip; its output is an image."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.down = conv(3, 32), conv(32, 64, stride=2)
        self.up = nn.ConvTranspose2d(64, 32, 2, 2)
        self.head = nn.Conv2d(64, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return self.head(torch.cat([x, F.relu(self.up(self.down(x)))], 1))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Tokens in, with an embedding and nn.MultiheadAttention inside; several named outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        states = self.layer(self.embed(tokens))
        return {"logits": self.head(states.mean(1)), "states": states}


class TwoInputs(nn.Module):
    """Two inputs of different dtypes, one optional argument that stays at its default, a tuple of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 16), nn.Embedding(10, 16)
        self.head = nn.Linear(16, 5)

    def forward(
        self, x: torch.Tensor, kind: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = F.relu(self.left(x) + self.right(kind))
        if mask is not None:
            hidden = hidden * mask
        return self.head(hidden), hidden


class Recurrent(nn.Module):
    """A GRU over a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.gru(x)
        return self.head(states[:, -1])  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    """A state_dict of four tensors; the factory that tests name."""
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


ZOO: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "residual": (Residual, (IMAGE,)),
    "depthwise": (Depthwise, (IMAGE,)),
    "concat": (Concat, (IMAGE,)),
    "hourglass": (Hourglass, (IMAGE,)),
    "encoder": (Encoder, ("tokens:int64[batch,6]",)),
    "two_inputs": (TwoInputs, ("x:float32[batch,8]", "kind:int64[batch]")),
    "recurrent": (Recurrent, ("x:float32[batch,7,8]",)),
    "mlp": (mlp, ("x:float32[batch,4]",)),
}


def build(name: str) -> tuple[nn.Module, tuple[str, ...]]:
    """A network of the zoo with fixed weights, in eval mode, and its inputs."""
    make, inputs = ZOO[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().eval(), inputs
