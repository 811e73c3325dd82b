"""Two small networks for 28 by 28 grey images: a ResNet, and a MobileNetV2-like one, hard to quantize."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["CLASSES", "MobileNet", "ResNet"]

CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
# Of the training images, as shares of white.
MEAN, DEVIATION = 0.2860, 0.3530


class Block(nn.Module):
    """Two convolutions and a shortcut (He et al., Deep Residual Learning, 2016, figure 2)."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outs)
        self.conv2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outs)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and ins == outs
            else nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), nn.BatchNorm2d(outs))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet of 32, 64 and 128 channels; image [batch, 1, 28, 28] from 0 to 1 → logits [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(32)
        self.blocks = nn.Sequential(Block(32, 32, 1), Block(32, 64, 2), Block(64, 128, 2))
        self.head = nn.Linear(128, len(CLASSES))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn(self.stem((image - MEAN) / DEVIATION)))
        return self.head(self.blocks(x).mean((2, 3)))  # type: ignore[no-any-return]


def _unit(ins: int, outs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(ins, outs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outs), nn.ReLU6())


class Inverted(nn.Module):
    """Expand, filter each channel alone, project (Sandler et al., MobileNetV2, 2018, section 3.3)."""

    def __init__(self, ins: int, outs: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = ins * expansion
        self.body = nn.Sequential(
            _unit(ins, wide, 1),
            _unit(wide, wide, 3, stride, groups=wide),
            nn.Conv2d(wide, outs, 1, bias=False),
            nn.BatchNorm2d(outs),
        )
        self.keeps = stride == 1 and ins == outs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.keeps else self.body(x)  # type: ignore[no-any-return]


class MobileNet(nn.Module):
    """Inverted residuals with depthwise convolutions; image [batch, 1, 28, 28] from 0 to 1 → logits [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _unit(1, 16, 3)
        self.blocks = nn.Sequential(
            Inverted(16, 24, 2, 4),
            Inverted(24, 24, 1, 4),
            Inverted(24, 48, 2, 4),
            Inverted(48, 48, 1, 4),
            Inverted(48, 48, 1, 4),
            Inverted(48, 64, 1, 4),
        )
        self.last = _unit(64, 256, 1)
        self.head = nn.Linear(256, len(CLASSES))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.last(self.blocks(self.stem((image - MEAN) / DEVIATION)))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]
