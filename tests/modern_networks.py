"""Small members of the families that torch_pruning's graph has trouble with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.models import conv

__all__ = ["MODERN"]


class ShuffleUnit(nn.Module):
    """Half of the channels pass, the other half is filtered, and both are interleaved."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        half = o // 2
        self.passing = nn.Sequential(conv(i, i, stride=2, groups=i), conv(i, half, kernel=1)) if stride > 1 else None
        width = i if stride > 1 else half
        self.filtered = nn.Sequential(
            conv(width, half, kernel=1), conv(half, half, stride=stride, groups=half), conv(half, half, kernel=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, 1) if self.passing is None else (self.passing(x), x)
        y = torch.cat([a, self.filtered(b)], 1)
        n, c, h, w = y.shape
        return y.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


class ShuffleNetV2(nn.Module):
    """Ma et al., 2018."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 24, stride=2)
        self.units = nn.Sequential(ShuffleUnit(24, 32, 2), ShuffleUnit(32, 32, 1), ShuffleUnit(32, 48, 2))
        self.last, self.head = conv(48, 64, kernel=1), nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.units(self.stem(x))).mean((2, 3)))  # type: ignore[no-any-return]


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al., RoFormer, 2021)."""
    length, size = x.shape[-2:]
    at = torch.arange(length, dtype=x.dtype)[:, None] * 100.0 ** (-torch.arange(0, size, 2, dtype=x.dtype) / size)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * at.cos() - b * at.sin(), a * at.sin() + b * at.cos()], -1).flatten(-2)


class DecoderBlock(nn.Module):
    """Grouped-query attention with rotary positions, and a gated perceptron, as in Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        n, t, _ = y.shape
        q, k, v = (layer(y).view(n, t, -1, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (part[:, :, None].expand(n, 2, 2, t, 8).reshape(n, 4, t, 8) for part in (rotated(k), v))
        y = F.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(n, t, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(50, 32), nn.Sequential(DecoderBlock(32), DecoderBlock(32))
        self.norm, self.head = nn.RMSNorm(32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(ids))))  # type: ignore[no-any-return]


class Csp(nn.Module):
    """Two ways, one of them with residuals, joined again."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(i, o // 2, kernel=1), conv(i, o // 2, kernel=1), conv(o, o, kernel=1)
        self.inner = nn.ModuleList(
            nn.Sequential(conv(o // 2, o // 2, kernel=1), conv(o // 2, o // 2)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        for layer in self.inner:
            y = y + layer(y)
        return self.c(torch.cat([y, self.b(x)], 1))  # type: ignore[no-any-return]


class MultiScale(nn.Module):
    """A pyramid down, up and down again, and a head on three scales, as in YOLO."""

    def __init__(self, w: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, w, stride=2), conv(w, 2 * w, stride=2), Csp(2 * w, 2 * w))
        self.c3 = nn.Sequential(conv(2 * w, 4 * w, stride=2), Csp(4 * w, 4 * w))
        self.c4 = nn.Sequential(conv(4 * w, 8 * w, stride=2), Csp(8 * w, 8 * w))
        self.l1, self.u1, self.l2, self.u2 = (
            conv(8 * w, 4 * w, kernel=1),
            Csp(8 * w, 4 * w),
            conv(4 * w, 2 * w, kernel=1),
            Csp(4 * w, 2 * w),
        )
        self.d1, self.p1, self.d2, self.p2 = (
            conv(2 * w, 2 * w, stride=2),
            Csp(4 * w, 4 * w),
            conv(4 * w, 4 * w, stride=2),
            Csp(8 * w, 8 * w),
        )
        self.heads = nn.ModuleList(
            nn.Sequential(conv(c, 2 * w), nn.Conv2d(2 * w, 3 * 9, 1)) for c in (2 * w, 4 * w, 8 * w)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c2 = self.stem(x)
        c3 = self.c3(c2)
        a = self.l1(self.c4(c3))
        b = self.l2(self.u1(torch.cat([F.interpolate(a, scale_factor=2), c3], 1)))
        small = self.u2(torch.cat([F.interpolate(b, scale_factor=2), c2], 1))
        middle = self.p1(torch.cat([self.d1(small), b], 1))
        large = self.p2(torch.cat([self.d2(middle), a], 1))
        found = []
        for head, scale in zip(self.heads, (small, middle, large), strict=True):
            y = head(scale)
            n, _, h, w = y.shape
            found.append(y.view(n, 3, 9, h, w).permute(0, 1, 3, 4, 2).sigmoid().reshape(n, -1, 9))
        return torch.cat(found, 1)


class StateSpace(nn.Module):
    """A selective state space between two projections, as in Mamba (Gu and Dao, 2023)."""

    def __init__(self, width: int = 16, inner: int = 32, states: int = 4) -> None:
        super().__init__()
        self.states, self.before, self.into = states, nn.Linear(6, width), nn.Linear(width, 2 * inner)
        self.filter = nn.Conv1d(inner, inner, 3, groups=inner, padding=2)
        self.select, self.out, self.head = (
            nn.Linear(inner, 2 * states + inner),
            nn.Linear(inner, width),
            nn.Linear(width, 4),
        )
        self.decay = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        first = self.before(given)
        x, gate = self.into(first).chunk(2, -1)
        x = F.silu(self.filter(x.transpose(1, 2))[..., : given.shape[1]]).transpose(1, 2)
        b, c, step = self.select(x).split([self.states, self.states, x.shape[-1]], -1)
        step, state, seen = F.softplus(step), torch.zeros(1, dtype=x.dtype), []
        for t in range(x.shape[1]):
            new = step[:, t, :, None] * b[:, t, None, :] * x[:, t, :, None]
            state = torch.exp(-step[:, t, :, None] * self.decay.exp()) * state + new
            seen.append((state * c[:, t, None, :]).sum(-1))
        return self.head(first + self.out(torch.stack(seen, 1) * F.silu(gate)))  # type: ignore[no-any-return]


class SharedHead(nn.Module):
    """One head on several scales."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 24), conv(24, 24, stride=2)
        self.tower, self.out = nn.Sequential(conv(24, 24), conv(24, 24)), nn.Conv2d(24, 6, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        a = self.a(x)
        return {f"scale{i}": self.out(self.tower(y)) for i, y in enumerate((a, self.b(a)))}


class Translator(nn.Module):
    """nn.Transformer with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 32), nn.Linear(32, 5)
        self.both = nn.Transformer(32, 4, 1, 1, 64, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.head(self.both(self.embed(x), self.embed(y)))  # type: ignore[no-any-return]


IMAGE = "x:float32[batch,3,32,32]"
Made = tuple[Callable[[], nn.Module], tuple[str, ...], dict[str, Any]]
# With what has to be left alone, by the beginning of its name.
MODERN: dict[str, Made] = {
    "shufflenet_v2": (ShuffleNetV2, (IMAGE,), {"left": ("units.0.passing.1.0", "head")}),
    "decoder": (Decoder, ("ids:int64[batch,6]",), {"left": ("head",)}),
    "multi_scale": (MultiScale, (IMAGE,), {"left": ("heads.0.1",)}),
    "state_space": (StateSpace, ("x:float32[batch,5,6]",), {"left": ("into", "head")}),
    "shared_head": (SharedHead, (IMAGE,), {"left": ("out",)}),
    "transformer": (Translator, ("x:float32[batch,5,8]", "y:float32[batch,6,8]"), {"left": ("both.encoder.layers.0.self_attn",)}),
}  # fmt: skip
