"""Train a small residual network on scikit-learn's handwritten digits and save it for `compress export`.

    python examples/digits/train.py build/demo

writes model.pt, train.npz, calibration.npz and eval.npz; the three sets share no image.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from network import DigitsNet
from rich.progress import track
from sklearn.datasets import load_digits
from torch.nn import functional as F

import compress

EPOCHS = 24
BATCH = 64


def load() -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """The 1,797 images, shuffled and split into train, calibration and eval.

    Pixels are rounded to the 8-bit levels of a PNG file, so that an image that went through one gives the very
    same tensor: float32[n, 1, 8, 8], 0 to 1.
    """
    digits = load_digits()
    pixels = np.rint(digits.images / 16 * 255).astype(np.uint8)
    images = pixels.astype(np.float32)[:, None] / np.float32(255)
    labels = digits.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(images))
    parts = {"eval": order[:500], "calibration": order[500:628], "train": order[628:]}
    return {name: {"image": images[index], "label": labels[index]} for name, index in parts.items()}


def shifted(images: torch.Tensor) -> torch.Tensor:
    """Each image of the batch moved by up to one pixel in each direction."""
    padded = F.pad(images, (1, 1, 1, 1))
    moves = torch.randint(0, 3, (len(images), 2))
    return torch.stack([p[:, y : y + 8, x : x + 8] for p, (y, x) in zip(padded, moves.tolist(), strict=True)])


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/demo")
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    data = load()
    images, labels = (torch.from_numpy(data["train"][key]) for key in ("image", "label"))
    net = DigitsNet()
    steps = EPOCHS * -(-len(images) // BATCH)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    for _ in track(range(EPOCHS), description="training"):
        net.train()
        for index in torch.split(torch.randperm(len(images)), BATCH):
            loss = F.cross_entropy(net(shifted(images[index])), labels[index], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    net.eval()
    with torch.no_grad():
        answers = net(torch.from_numpy(data["eval"]["image"])).argmax(1).numpy()
    accuracy = float((answers == data["eval"]["label"]).mean())
    for name, arrays in data.items():
        np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    compress.save(net, folder / "model.pt", inputs="image:float32[batch,1,8,8]", outputs=["logits"])
    print(f"accuracy on {len(answers)} held-out images: {accuracy:.4f}; saved {folder / 'model.pt'}")


if __name__ == "__main__":
    main()
