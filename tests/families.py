"""Small members of the families that real models come from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from tests.models import IMAGE, ZOO, conv

__all__ = ["FAMILIES", "family"]

TOKENS = ("tokens:int64[batch,seq]", "mask:int64[batch,seq]")


class Grouped(nn.Module):
    """Grouped convolutions with a residual, as in ResNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a = conv(3, 32), conv(32, 32, groups=4)
        self.b, self.c = conv(32, 64, kernel=1, stride=2), conv(64, 64, groups=4)
        self.head = nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.c(self.b(x + self.a(x)))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Shuffle(nn.Module):
    """Groups whose channels are interleaved between two convolutions, as in ShuffleNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = conv(3, 32), conv(32, 32, kernel=1, groups=4), conv(32, 32, groups=4)
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(self.stem(x))
        n, c, h, w = x.shape
        x = x.view(n, 4, c // 4, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.head(self.b(x).mean((2, 3)))  # type: ignore[no-any-return]


class SqueezeExcite(nn.Module):
    """A gate for each channel, from all of them (Hu et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a = conv(3, 32), conv(32, 32)
        self.squeeze, self.excite = nn.Linear(32, 16), nn.Linear(16, 32)
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.a(x)
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3))))))
        return self.head((x + y * gate[:, :, None, None]).mean((2, 3)))  # type: ignore[no-any-return]


class ConvNext(nn.Module):
    """Depthwise, LayerNorm over channels, two linear layers, a scale for each channel (Liu et al., 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 4, 4)
        self.filter, self.norm = nn.Conv2d(32, 32, 7, padding=3, groups=32), nn.LayerNorm(32)
        self.wide, self.narrow = nn.Linear(32, 128), nn.Linear(128, 32)
        self.scale = nn.Parameter(torch.full((32,), 0.5))
        self.last, self.head = nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.norm(self.filter(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(F.gelu(self.wide(y)))
        x = x + y.permute(0, 3, 1, 2)
        return self.head(self.last(x.mean((2, 3))))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Two levels down and up, each skip concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 16), conv(16, 32, stride=2), conv(32, 64, stride=2)
        self.up1, self.d = nn.ConvTranspose2d(64, 32, 2, 2), conv(64, 32)
        self.up2, self.e = nn.ConvTranspose2d(32, 16, 2, 2), conv(32, 16)
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        b = self.b(a)
        y = self.d(torch.cat([b, self.up1(self.c(b))], 1))
        y = self.e(torch.cat([a, self.up2(y)], 1))
        return self.head(y)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Attention with a projection for each of q, k and v; fewer heads for k and v make it grouped-query."""

    def __init__(self, width: int, heads: int, shared: int = 1) -> None:
        super().__init__()
        self.heads, self.size, self.shared = heads, width // heads, shared
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, width // shared), nn.Linear(width, width // shared)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        n, t, w = x.shape
        q, k, v = (layer(x).view(n, t, -1, self.size).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.shared > 1:
            k, v = k.repeat_interleave(self.shared, 1), v.repeat_interleave(self.shared, 1)
        scores = q @ k.transpose(2, 3) / self.size**0.5
        if mask is not None:
            scores = scores + (1.0 - mask[:, None, None, :].to(x.dtype)) * -1e4
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, w))  # type: ignore[no-any-return]


class Bert(nn.Module):
    """Tokens and a mask in; post-norm layers with attention of its own; `shared` > 1 makes it grouped-query."""

    def __init__(self, shared: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.attention, self.norm1 = Attention(32, 4, shared), nn.LayerNorm(32)
        self.wide, self.narrow, self.norm2 = nn.Linear(32, 128), nn.Linear(128, 32), nn.LayerNorm(32)
        self.head = nn.Linear(32, 5)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = self.norm1(x + self.attention(x, mask))
        x = self.norm2(x + self.narrow(F.gelu(self.wide(x))))
        kept = mask[:, :, None].to(x.dtype)
        return self.head((x * kept).sum(1) / kept.sum(1).clamp(min=1.0))  # type: ignore[no-any-return]


class Fused(nn.Module):
    """One matrix for q, k and v, cut in three."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Linear(8, 32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.wide, self.narrow, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        n, t, w = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, w))
        x = x + self.narrow(F.gelu(self.wide(x)))
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """Patches, a class token, positions, and torch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 32) * 0.02)
        self.position = nn.Parameter(torch.randn(1, 17, 32) * 0.02)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2))
        )
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head(self.layers(x)[:, 0])  # type: ignore[no-any-return]


class Lstm(nn.Module):
    """An LSTM between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.lstm = nn.Sequential(nn.Linear(8, 64), nn.ReLU()), nn.LSTM(64, 32, batch_first=True)
        self.middle, self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU()), nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.before(x))
        return self.head(self.middle(states[:, -1]))  # type: ignore[no-any-return]


class Inverted(nn.Module):
    """Inverted residuals with ReLU6, as in MobileNetV2."""

    def __init__(self) -> None:
        super().__init__()

        def unit(i: int, o: int, kernel: int, groups: int = 1) -> nn.Sequential:
            layer = nn.Conv2d(i, o, kernel, 1, kernel // 2, groups=groups, bias=False)
            return nn.Sequential(layer, nn.BatchNorm2d(o), nn.ReLU6())

        self.stem = unit(3, 16, 3)
        self.a = nn.Sequential(unit(16, 64, 1), unit(64, 64, 3, 64), nn.Conv2d(64, 16, 1), nn.BatchNorm2d(16))
        self.b = nn.Sequential(unit(16, 64, 1), unit(64, 64, 3, 64), nn.Conv2d(64, 24, 1), nn.BatchNorm2d(24))
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(self.b(x + self.a(x)).mean((2, 3)))  # type: ignore[no-any-return]


class TwoTowers(nn.Module):
    """Two inputs of unlike kinds; a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.table = conv(3, 32, stride=2), nn.Sequential(nn.Linear(6, 64), nn.ReLU())
        self.join, self.label, self.box = nn.Linear(96, 64), nn.Linear(64, 5), nn.Linear(64, 4)

    def forward(self, image: torch.Tensor, table: torch.Tensor) -> dict[str, torch.Tensor]:
        joined = F.relu(self.join(torch.cat([self.image(image).mean((2, 3)), self.table(table)], 1)))
        return {"label": self.label(joined), "box": self.box(joined)}


Made = tuple[Callable[[], nn.Module], tuple[str, ...]]

FAMILIES: dict[str, Made] = ZOO | {
    "grouped": (Grouped, (IMAGE,)),
    "shuffle": (Shuffle, (IMAGE,)),
    "squeeze_excite": (SqueezeExcite, (IMAGE,)),
    "convnext": (ConvNext, (IMAGE,)),
    "unet": (UNet, (IMAGE,)),
    "bert": (Bert, TOKENS),
    "gqa": (lambda: Bert(shared=2), TOKENS),
    "fused_qkv": (Fused, ("x:float32[batch,6,8]",)),
    "vit": (ViT, (IMAGE,)),
    "lstm": (Lstm, ("x:float32[batch,7,8]",)),
    "inverted": (Inverted, (IMAGE,)),
    "two_towers": (TwoTowers, (IMAGE, "table:float32[batch,6]")),
}


def family(name: str) -> tuple[nn.Module, tuple[str, ...]]:
    """A network of a family with fixed weights and running statistics of its own, in eval mode, and its inputs."""
    make, inputs = FAMILIES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make()
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                nn.init.uniform_(layer.weight, 0.5, 1.5)
                nn.init.normal_(layer.bias, 0.0, 0.2)
                nn.init.normal_(layer.running_mean, 0.0, 0.2)  # type: ignore[arg-type]
                nn.init.uniform_(layer.running_var, 0.5, 1.5)  # type: ignore[arg-type]
        return module.eval(), inputs
