"""What the training benchmarks have in common: Fashion-MNIST, its ResNet, and a clock that stops while it is judged."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples/fashion_mnist"))
import idx  # noqa: E402
from networks import ResNet  # noqa: E402

from compress.artifact import Signature  # noqa: E402
from compress.data.dataset import Dataset  # noqa: E402
from compress.formats.checkpoint import load, save  # noqa: E402
from compress.prune.prune_channels import PruneChannels  # noqa: E402
from compress.runtime.measure import cores  # noqa: E402

__all__ = [
    "Clock",
    "Reached",
    "accuracy",
    "fresh",
    "loaded",
    "open_data",
    "original_and_pruned",
    "plain_loop",
    "test_data",
]

FOLDER = ROOT / "build/train-benchmark"
SIGNATURE = "image:float32[batch,1,28,28]"


class Reached(Exception):  # noqa: N818  no error: the training is ended where it has arrived
    """The target accuracy."""


def test_data() -> tuple[torch.Tensor, torch.Tensor]:
    """All 10,000 test images and their labels."""
    images, labels = idx.read(idx.FOLDER, "t10k")
    return torch.from_numpy(images), torch.from_numpy(labels)


def open_data(folder: Path = FOLDER) -> tuple[Dataset, Signature]:
    """All 60,000 training images, memory-mapped, and the network's signature."""
    if not (folder / "train/label.npy").exists():
        idx.write(folder, idx.FOLDER)
    model = load(save(ResNet().eval(), folder / "untrained.pt", inputs=SIGNATURE, outputs=["logits"]))
    return Dataset.open(str(folder / "train"), model.signature), model.signature


def fresh(seed: int) -> nn.Module:
    """The ResNet, untrained."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module: nn.Module = ResNet()
    return module


def original_and_pruned(fraction: float) -> tuple[Any, Any, float]:
    """The trained ResNet that stands in examples/fashion_mnist, what is left of it, and the seconds that pruning took.

    The data and the original are written into FOLDER, too.
    """
    script = ROOT / "examples/fashion_mnist/train_fashion.py"
    subprocess.run([sys.executable, script, FOLDER, "--data-only"], check=True, stdout=sys.stderr)
    original = load(FOLDER / "resnet.pt")
    begun = time.perf_counter()
    pruned = PruneChannels(fraction).run(original, FOLDER, lambda _d, _t, _n: None).model
    return original, pruned, time.perf_counter() - begun


def plain_loop(data: Dataset, module: nn.Module, seed: int, size: int) -> Iterator[None]:
    """As most tutorials write it, by labels alone, in batches of so many: a step each time, without end."""
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module.to(device)
    arrays, labels = data.take(slice(0, len(data)))
    whole = TensorDataset(torch.from_numpy(np.array(arrays["image"])), torch.from_numpy(np.array(labels)))
    loader = DataLoader(whole, batch_size=size, shuffle=True)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)

    def steps() -> Iterator[None]:
        while True:
            for shown, wanted in loader:
                module.train()
                loss = F.cross_entropy(module(shown.to(device)), wanted.to(device))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                yield

    return steps()


def loaded(path: Path) -> Any:
    """A model file."""
    return load(path)


@torch.inference_mode()
def accuracy(module: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of the test images that a copy of the module gets right, in float32."""
    torch.set_num_threads(cores())
    judged = copy.deepcopy(module).cpu().to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    right = 0
    for start in range(0, len(labels), 500):
        shown = images[start : start + 500].contiguous(memory_format=torch.channels_last)
        right += int((judged(shown).argmax(1) == labels[start : start + 500]).sum())
    return right / len(labels)


class Clock:
    """Seconds of training; what is judged in between does not count.

    Args:
        judge: gives the accuracy.
        every: steps between two looks; 0 never looks.
        target: to stop at.
    """

    def __init__(self, judge: Callable[[], float], every: int, target: float) -> None:
        self._judge, self._every, self._target = judge, every, target
        self._begun = time.perf_counter()
        self._apart = 0.0
        self.steps = 0
        self.seconds = 0.0
        self.found: list[tuple[int, float, float]] = []

    def step(self) -> None:
        """A step is through; raises Reached at the target."""
        self.steps += 1
        self.seconds = time.perf_counter() - self._begun - self._apart
        if self._every and self.steps % self._every == 0:
            start = time.perf_counter()
            value = self._judge()
            self._apart += time.perf_counter() - start
            self.found.append((self.steps, self.seconds, value))
            if value >= self._target:
                raise Reached


def median_of(values: list[float]) -> float:
    """The middle one."""
    return float(np.median(values))
