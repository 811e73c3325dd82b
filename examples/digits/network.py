"""A small residual network for 8x8 grey images."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["DigitsNet"]


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.relu(y + self.shortcut(x))  # type: ignore[no-any-return]


class DigitsNet(nn.Module):
    """[batch, 1, 8, 8] in 0 to 1 -> logits [batch, 10]."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 96)) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        blocks: list[nn.Module] = []
        channels = widths[0]
        for stage, width in enumerate(widths):
            blocks += [Block(channels, width, 1 if stage == 0 else 2), Block(width, width, 1)]
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.blocks(self.stem(image)).mean((2, 3)))  # type: ignore[no-any-return]
