"""The networks that the serving benchmarks serve, each made once, in build/serving; this script makes them all.

tiny      64→256→10 in FP32: what a request costs, not what the network does
compute   a ResNet-50 of half the width in INT8, image:float32[batch,3,224,224], 588 KB a request
medium    a ResNet-50 of full width in INT8 on 64² pixels, 49 KB a request
small     one of half the width on 56² pixels, 38 KB a request
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from compress_resnet50 import Bottleneck
from gateway_overhead import save_network
from rich.console import Console
from torch import nn

import compress
from compress import ExportOptions
from compress.report.progress import Terminal

FOLDER = Path("build/serving")
SIDES = {"compute": 224, "medium": 64, "small": 56}
WIDTHS = {"compute": 32, "medium": 64, "small": 32}


def network(name: str) -> Path:
    """The artifact's folder, made when it isn't there."""
    folder = FOLDER / name
    if folder.is_dir():
        return folder
    FOLDER.mkdir(parents=True, exist_ok=True)
    if name == "tiny":
        return save_network(folder)
    side = SIDES[name]
    work = FOLDER / f"{name}-work"
    work.mkdir(exist_ok=True)
    compress.save(
        resnet(side, WIDTHS[name]),
        work / "model.pt",
        inputs=f"image:float32[batch,3,{side},{side}]",
        outputs=["logits"],
    )
    images = np.random.default_rng(0).standard_normal((16, 3, side, side)).astype(np.float32)
    np.savez(work / "calibration.npz", image=images)
    options = ExportOptions(
        output=folder, work=work / "stages", int8="static", calibration=str(work / "calibration.npz")
    )
    with Terminal(Console(stderr=True)) as terminal:
        compress.export(work / "model.pt", options, watcher=terminal)
    return folder


def resnet(side: int, first: int) -> nn.Module:
    """ResNet-50 (He et al., 2016, table 1) that begins with so many channels in place of 64, untrained."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Conv2d(3, first, 7, 2, 3, bias=False),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    ins = first
    for times, count, stride in ((1, 3, 1), (2, 4, 2), (4, 6, 2), (8, 3, 2)):
        for index in range(count):
            layers.append(Bottleneck(ins, times * first, stride if index == 0 else 1))
            ins = 4 * times * first
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(ins, 1000))
    with torch.no_grad():
        for _ in range(4):
            module(torch.randn(4, 3, side, side))
    return module.eval()


if __name__ == "__main__":
    for each in ("tiny", *SIDES):
        print(network(each))
