"""Networks of residual steps, each of which can be told to add nothing: what dropping a block has to come to."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["IMAGE_STEPS", "TOKEN_STEPS", "Residuals", "branches_of"]


def normed(i: int, o: int, kernel: int = 3, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, kernel, padding=kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(o))


class Step(nn.Module):
    """One or two branches; the numbers in `gone` add nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gone: frozenset[int] = frozenset()


class Basic(Step):
    """As in ResNet: the activation behind the sum."""

    branches = 1

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = normed(width, width), normed(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x if self.gone else x + self.b(F.relu(self.a(x))))


class InPlace(Basic):
    """As torchvision writes it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gone:
            return F.relu(x)
        out = self.b(F.relu(self.a(x)))
        out += x
        return F.relu_(out)


class Before(Step):
    """Normalized and activated first; the shortcut is untouched."""

    branches = 1

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.a = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.gone else torch.add(self.a(F.relu(self.norm(x))), x)


class Inverted(Step):
    """As in MobileNetV2: wide inside, one filter to a channel."""

    branches = 1

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 2 * width
        self.inside = nn.Sequential(
            normed(width, wide, 1), nn.ReLU6(), normed(wide, wide, 3, wide), nn.ReLU6(), normed(wide, width, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.gone else x.add(self.inside(x))


class Scaled(Step):
    """As in ConvNeXt: with a scale that is a parameter of its own."""

    branches = 1

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.scale = nn.Conv2d(width, width, 1), nn.Parameter(torch.rand(width, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.gone else x + self.scale * self.a(x)


class Parallel(Step):
    """Two branches of one value."""

    branches = 2

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x if 0 in self.gone else x + F.relu(self.a(x))
        return out if 1 in self.gone else out + F.relu(self.b(x))


class Nested(Step):
    """A block in a block: first the inner sum, then the outer."""

    branches = 2

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if 1 in self.gone:
            return x
        y = torch.tanh(self.a(x))
        return x + (y if 0 in self.gone else y + self.b(y))


class TwoSided(Step):
    """A shortcut with a layer of its own, as where the width changes: nothing can go."""

    branches = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = normed(width, width), normed(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.a(x) + self.b(x))


class ReadElsewhere(Step):
    """What the branch computes is a gate, too: nothing can go."""

    branches = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return (x + y) * torch.sigmoid(y)  # type: ignore[no-any-return]


class OneForAll(Step):
    """What is added has one value for each channel: another shape."""

    branches = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.a(x.mean((2, 3), keepdim=True))  # type: ignore[no-any-return]


class Spoils(Step):
    """Its activation changes the shortcut in place, as a careless block with the activation first: nothing can go."""

    branches = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.a(F.relu_(x))  # type: ignore[no-any-return]


class Attention(Step):
    """Attention and feed-forward; their normalization first, or behind the sum."""

    branches = 2

    def __init__(self, width: int, *, first: bool) -> None:
        super().__init__()
        self.first = first
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.softmax(q @ k.transpose(1, 2) * 0.3, -1) @ v)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = x if 0 in self.gone else x + self.attend(self.one(x))
            return x if 1 in self.gone else x + self.narrow(F.gelu(self.wide(self.two(x))))
        x = self.one(x if 0 in self.gone else x + self.attend(x))
        return self.two(x if 1 in self.gone else self.narrow(F.gelu(self.wide(x))) + x)  # type: ignore[no-any-return]


class PreNorm(Attention):
    def __init__(self, width: int) -> None:
        super().__init__(width, first=True)


class PostNorm(Attention):
    def __init__(self, width: int) -> None:
        super().__init__(width, first=False)


IMAGE_STEPS: Sequence[Any] = (
    Basic, InPlace, Before, Inverted, Scaled, Parallel, Nested, TwoSided, ReadElsewhere, OneForAll, Spoils,
)  # fmt: skip
TOKEN_STEPS: Sequence[Any] = (PreNorm, PostNorm)


class Residuals(nn.Module):
    """Steps between a stem and a head; images [batch, 3, 6, 6] or tokens [batch, 5, 3]."""

    def __init__(self, steps: Sequence[Any], *, seed: int = 0, width: int = 8) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.images = all(step in IMAGE_STEPS for step in steps)
            self.stem: nn.Module = normed(3, width) if self.images else nn.Linear(3, width)
            self.steps = nn.ModuleList(step(width) for step in steps)
            self.head = nn.Linear(width, 4)
            for layer in self.modules():
                if isinstance(layer, nn.BatchNorm2d):
                    nn.init.uniform_(layer.running_mean, -0.2, 0.2)  # type: ignore[arg-type]
                    nn.init.uniform_(layer.running_var, 0.5, 1.5)  # type: ignore[arg-type]
        self.eval()

    @property
    def inputs(self) -> str:
        return "x:float32[batch,3,6,6]" if self.images else "x:float32[batch,5,3]"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for step in self.steps:
            x = step(x)
        return self.head(x.mean((2, 3)) if self.images else x.mean(1))  # type: ignore[no-any-return]

    def without(self, gone: Collection[tuple[int, int]]) -> Residuals:
        """The same, in which some branches, each by its step and its number there, add nothing."""
        own = copy.deepcopy(self)
        for at, step in enumerate(own.steps):
            step.gone = frozenset(branch for place, branch in gone if place == at)  # type: ignore[assignment]
        return own


def branches_of(steps: Sequence[Any]) -> list[tuple[int, int]]:
    """All branches that can go, in the order of their sums."""
    return [(at, branch) for at, step in enumerate(steps) for branch in range(step.branches)]
