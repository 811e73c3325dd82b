"""A small network that learns in a second, its teacher, and noisy patterns for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import compress
from compress.data.dataset import Dataset
from compress.model import TorchModel
from compress.options.training import TrainingOptions
from compress.stage import Given
from compress.training.finetune import Finetune

CLASSES = 4


def network(width: int, *, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(width)
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Dropout(dropout), nn.Flatten(), nn.Linear(width * 9, CLASSES),
    ).eval()  # fmt: skip


def model(folder: Path, name: str, width: int, *, dropout: float = 0.0) -> TorchModel:
    path = folder / f"{name}.pt"
    compress.save(network(width, dropout=dropout), path, inputs="image:float32[batch,1,6,6]", outputs=["logits"])
    return compress.load(path)


class TwoHeaded(nn.Module):
    """Logits, and a value that no label is about."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(),
            nn.Linear(36, 24, bias=False),
            nn.BatchNorm1d(24),
            nn.ReLU(),
            nn.Linear(24, 24, bias=False),
            nn.BatchNorm1d(24),
            nn.ReLU(),
        )
        self.first, self.second = nn.Linear(24, CLASSES), nn.Linear(24, 2)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, 1, 6, 6] → [n, classes], [n, 2]."""
        hidden = self.body(image)
        return self.first(hidden), self.second(hidden)


def two_headed(folder: Path, name: str, seed: int) -> TorchModel:
    torch.manual_seed(seed)
    inputs, outputs = "image:float32[batch,1,6,6]", ["logits", "value"]
    return compress.load(compress.save(TwoHeaded().eval(), folder / f"{name}.pt", inputs=inputs, outputs=outputs))


def patterns(count: int, noise: float = 1.0, seed: int = 0) -> tuple[Any, Any]:
    """Images float32 [count, 1, 6, 6] and labels int64 [count]."""
    labels = np.random.default_rng(seed).integers(0, CLASSES, count)
    means = np.random.default_rng(99).standard_normal((CLASSES, 1, 6, 6))
    images = means[labels] + noise * np.random.default_rng(seed + 1).standard_normal((count, 1, 6, 6))
    return images.astype(np.float32), labels


def data(folder: Path, name: str = "train", count: int = 256, noise: float = 1.0, seed: int = 0) -> Path:
    images, labels = patterns(count, noise, seed)
    np.savez(folder / f"{name}.npz", image=images, label=labels)
    return folder / f"{name}.npz"


def stage(folder: Path, *, taught: bool = False, seed: int = 0, count: int = 256, **options: Any) -> Finetune:
    student = model(folder, "student", 8)
    teacher = model(folder, "teacher", 16) if taught else None
    opened = Dataset.open(str(data(folder, count=count)), student.signature)
    asked: dict[str, Any] = {"epochs": 2, "batch_size": 32, "train_precision": "32", "learning_rate": 5e-3} | options
    return Finetune(opened, teacher, TrainingOptions(**asked), seed)


def trained(folder: Path, **options: Any) -> Given:
    work = folder / "work"
    work.mkdir(exist_ok=True)
    return stage(folder, **options).run(model(folder, "student", 8), work, lambda _done, _total, _note: None)


def weights(given: Given) -> dict[str, torch.Tensor]:
    assert isinstance(given.model, TorchModel)
    return given.model.module.state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def near(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-5) -> bool:
    return all(torch.allclose(a[name], b[name], rtol=tolerance, atol=tolerance) for name in a)


def accuracy(given: Given, images: Any, labels: Any) -> float:
    assert isinstance(given.model, TorchModel)
    with torch.no_grad():
        answers = given.model.module(torch.from_numpy(images)).argmax(1).numpy()
    return float((answers == labels).mean())
