"""Small networks drawn by hypothesis from what channels meet in real ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

__all__ = ["networks"]


class Block(nn.Module):
    """Layers by name, and a forward that is given."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.how = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self, x)


class Free(nn.Module):
    """A parameter that stands alone."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.ones(shape))


def conv(i: int, o: int, kernel: int = 3, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, kernel, padding=kernel // 2, **options), nn.BatchNorm2d(o), nn.ReLU())


def shuffled(x: torch.Tensor, parts: int) -> torch.Tensor:
    n, c, h, w = x.shape
    return x.view(n, parts, c // parts, h, w).transpose(1, 2).reshape(n, c, h, w)


def halves(s: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, 1)
    return torch.cat([s.a(a), b], 1)


def einsum(s: Any, x: torch.Tensor) -> torch.Tensor:
    return x + s.b(torch.einsum("nchw,nc->nchw", s.a(x), s.a(x).mean((2, 3))))  # type: ignore[no-any-return]


def tied_convolutions(c: int) -> Block:
    block = Block(
        lambda s, x: F.relu(s.b(F.relu(s.a(x)))), a=nn.Conv2d(c, c, 3, padding=1), b=nn.Conv2d(c, c, 3, padding=1)
    )
    block.b.weight = block.a.weight  # type: ignore[union-attr]
    return block


IMAGES: dict[str, Callable[[int], nn.Module]] = {
    "plain": lambda c: conv(c, c),
    "residual": lambda c: Block(lambda s, x: x + s.b(s.a(x)), a=conv(c, 2 * c), b=conv(2 * c, c)),
    "concat": lambda c: Block(lambda s, x: s.b(torch.cat([x, s.a(x)], 1)), a=conv(c, c), b=conv(2 * c, c)),
    "twice": lambda c: Block(lambda s, x: s.b(torch.cat([x, x], 1)), b=conv(2 * c, c)),
    "dense": lambda c: Block(
        lambda s, x: s.c(torch.cat([x, s.a(x), s.b(torch.cat([x, s.a(x)], 1))], 1)),
        a=conv(c, c // 2), b=conv(c + c // 2, c // 2), c=conv(2 * c, c),
    ),
    "halves": lambda c: Block(halves, a=conv(c // 2, c // 2)),
    "gated": lambda c: Block(lambda s, x: F.glu(s.a(x), 1), a=nn.Conv2d(c, 2 * c, 3, padding=1)),
    "split": lambda c: Block(
        lambda s, x: (lambda a, b: s.b(a * torch.sigmoid(b)))(*s.a(x).split([c, c], 1)), a=conv(c, 2 * c), b=conv(c, c)
    ),
    "grouped": lambda c: Block(lambda s, x: x + s.a(x), a=conv(c, c, groups=2)),
    "grouped twice": lambda c: nn.Sequential(conv(c, c, groups=2), conv(c, c, groups=4)),
    "shuffle": lambda c: Block(lambda s, x: s.b(shuffled(s.a(x), 2)), a=conv(c, c, groups=2), b=conv(c, c, groups=2)),
    "shuffle residual": lambda c: Block(lambda s, x: x + shuffled(s.a(x), 2), a=conv(c, c)),
    "depthwise": lambda c: nn.Sequential(conv(c, c, groups=c), conv(c, c, kernel=1)),
    "multiplied": lambda c: nn.Sequential(conv(c, 2 * c, groups=c), conv(2 * c, c, kernel=1)),
    "excited": lambda c: Block(
        lambda s, x: x * torch.sigmoid(s.b(F.relu(s.a(x.mean((2, 3), keepdim=True))))),
        a=nn.Conv2d(c, c // 2, 1), b=nn.Conv2d(c // 2, c, 1),
    ),
    "group norm": lambda c: Block(lambda s, x: x + s.n(s.a(x)), a=nn.Conv2d(c, c, 3, padding=1), n=nn.GroupNorm(2, c)),
    "instance norm": lambda c: nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.InstanceNorm2d(c, affine=True)),
    "layer norm": lambda c: Block(
        lambda s, x: x + s.b(F.gelu(s.a(s.n(x.permute(0, 2, 3, 1))))).permute(0, 3, 1, 2),
        n=nn.LayerNorm(c), a=nn.Linear(c, 2 * c), b=nn.Linear(2 * c, c),
    ),
    "channel mean": lambda c: Block(lambda s, x: s.a(x) - s.a(x).mean(1, keepdim=True), a=conv(c, c)),
    "channel softmax": lambda c: Block(lambda s, x: x * s.a(x).softmax(1), a=conv(c, c)),
    "flip": lambda c: Block(lambda s, x: s.a(x).flip(1) + x, a=conv(c, c)),
    "roll": lambda c: Block(lambda s, x: s.a(x).roll(1, 1) + x, a=conv(c, c)),
    "every second": lambda c: Block(lambda s, x: s.b(torch.cat([s.a(x)[:, ::2], x[:, 1::2]], 1)), a=conv(c, c), b=conv(c, c)),
    "pixel shuffle": lambda c: Block(
        lambda s, x: F.avg_pool2d(F.pixel_shuffle(s.a(x), 2), 2), a=nn.Conv2d(c, 4 * c, 3, padding=1)
    ),
    "transposed": lambda c: nn.Sequential(nn.ConvTranspose2d(c, c, 2, 2, groups=2), nn.MaxPool2d(2)),
    "called twice": lambda c: Block(lambda s, x: s.a(s.a(x)) + x, a=conv(c, c)),
    "tied": tied_convolutions,
    "prelu": lambda c: nn.Sequential(nn.Conv2d(c, c, 1), nn.PReLU(c)),
    "scaled": lambda c: Block(lambda s, x: x + s.g.values * s.a(x), a=conv(c, c), g=Free(c, 1, 1)),
    "einsum": lambda c: Block(einsum, a=conv(c, c), b=conv(c, c)),
    "maxout": lambda c: Block(lambda s, x: s.a(x).unflatten(1, (2, c)).amax(1), a=nn.Conv2d(c, 2 * c, 1)),
    "normalized": lambda c: Block(lambda s, x: s.b(F.normalize(s.a(x), dim=1)), a=conv(c, c), b=conv(c, c)),
}  # fmt: skip


class Attention(nn.Module):
    """Of one of many layouts of q, k and v."""

    def __init__(self, width: int, heads: int, layout: str) -> None:
        super().__init__()
        self.heads, self.layout, self.norm = heads, layout, nn.LayerNorm(width)
        if layout in ("fused", "interleaved"):
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        n, t, _ = y.shape
        h = self.heads
        if self.layout == "fused":
            q, k, v = (part.view(n, t, h, -1).transpose(1, 2) for part in self.qkv(y).chunk(3, -1))
        elif self.layout == "interleaved":
            q, k, v = self.qkv(y).view(n, t, h, 3, -1).permute(3, 0, 2, 1, 4)
        elif self.layout == "single":
            q, k, v = self.q(y)[:, None], self.k(y)[:, None], self.v(y)[:, None]
        elif self.layout == "last":
            q, k, v = (layer(y).view(n, t, -1, h).permute(0, 3, 1, 2) for layer in (self.q, self.k, self.v))
        else:
            q, k, v = (layer(y).unflatten(-1, (h, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = (q @ k.transpose(-1, -2) / 3).softmax(-1) @ v
        y = y.permute(0, 2, 3, 1) if self.layout == "last" else y.transpose(1, 2)
        return x + self.out(y.flatten(2))  # type: ignore[no-any-return]


TOKENS: dict[str, Callable[[int], nn.Module]] = {
    "mlp": lambda d: Block(lambda s, x: x + s.b(F.gelu(s.a(s.n(x)))), n=nn.LayerNorm(d), a=nn.Linear(d, 2 * d), b=nn.Linear(2 * d, d)),
    "gated mlp": lambda d: Block(
        lambda s, x: x + s.b(F.silu(s.a(s.n(x))) * s.g(s.n(x))),
        n=nn.RMSNorm(d), a=nn.Linear(d, 2 * d), g=nn.Linear(d, 2 * d), b=nn.Linear(2 * d, d),
    ),
    "chunked mlp": lambda d: Block(
        lambda s, x: x + s.b((lambda a, g: a * torch.sigmoid(g))(*s.a(x).chunk(2, -1))), a=nn.Linear(d, 4 * d), b=nn.Linear(2 * d, d)
    ),
    "mixer": lambda d: Block(lambda s, x: x + s.a(x.transpose(1, 2)).transpose(1, 2), a=nn.Conv1d(d, d, 3, padding=1, groups=d)),
    "position": lambda d: Block(lambda s, x: x + s.p.values, p=Free(1, 6, d)),
    "tied": lambda d: _tied_linears(d),
    "own norm": lambda d: Block(lambda s, x: s.a(x) * torch.rsqrt(s.a(x).square().mean(-1, keepdim=True) + 1e-6), a=nn.Linear(d, d)),
    **{
        f"attention {layout} {heads}": partial(Attention, heads=heads, layout=layout)
        for layout in ("separate", "fused", "interleaved", "single", "last")
        for heads in (2, 4)
    },
}  # fmt: skip


def _tied_linears(width: int) -> Block:
    block = Block(lambda s, x: s.b(F.relu(s.a(x))), a=nn.Linear(width, width), b=nn.Linear(width, width))
    block.b.weight = block.a.weight  # type: ignore[union-attr]
    return block


class OfImages(nn.Module):
    def __init__(self, width: int, blocks: list[str], flat: bool) -> None:
        super().__init__()
        self.stem, self.blocks = conv(3, width), nn.Sequential(*(IMAGES[name](width) for name in blocks))
        self.flat, self.head = flat, nn.Linear(width * (36 if flat else 1), 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.stem(x))
        return self.head(x.flatten(1) if self.flat else x.mean((2, 3)))  # type: ignore[no-any-return]


class OfTokens(nn.Module):
    def __init__(self, width: int, blocks: list[str], tied: bool) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(40, width), nn.Sequential(*(TOKENS[name](width) for name in blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 40, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(x))))  # type: ignore[no-any-return]


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, str]:
    """A network of some blocks, and its input; its repr names what it is made of."""
    width = draw(st.sampled_from((8, 12, 16)))
    if draw(st.booleans()):
        blocks = draw(st.lists(st.sampled_from(sorted(IMAGES)), min_size=1, max_size=4))
        return OfImages(width, blocks, draw(st.booleans())), "x:float32[batch,3,6,6]"
    blocks = draw(st.lists(st.sampled_from(sorted(TOKENS)), min_size=1, max_size=4))
    return OfTokens(width, blocks, draw(st.booleans())), "ids:int64[batch,6]"
