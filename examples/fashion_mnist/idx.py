"""Fashion-MNIST from its IDX files, as Debian's package dataset-fashion-mnist installs them."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["FOLDER", "read", "write"]

FOLDER = Path("/usr/share/datasets/fashion-mnist")
CALIBRATION = 512
Array = np.ndarray[Any, Any]


def read(folder: Path, part: str) -> tuple[Array, Array]:
    """Images float32 [n, 1, 28, 28] from 0 to 1 and labels int64 [n].

    Args:
        folder: holds the four .gz files.
        part: "train" (60,000 images) or "t10k" (10,000).

    Raises:
        SystemExit: they are not there.
    """
    try:
        with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
            images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
        with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
            labels = np.frombuffer(file.read(), np.uint8, offset=8)
    except FileNotFoundError as err:
        raise SystemExit(
            f"Fashion-MNIST is not in {folder}: apt-get install dataset-fashion-mnist, or name its folder with --data"
        ) from err
    return images.astype(np.float32) / 255, labels.astype(np.int64)


def write(folder: Path, source: Path) -> None:
    """Write what `compress` takes: train/ (.npy, memory-mapped), calibration.npz and eval.npz."""
    images, labels = read(source, "train")
    (folder / "train").mkdir(parents=True, exist_ok=True)
    np.save(folder / "train/image.npy", images)
    np.save(folder / "train/label.npy", labels)
    chosen = np.random.default_rng(0).choice(len(images), CALIBRATION, replace=False)
    np.savez_compressed(folder / "calibration.npz", image=images[chosen])
    images, labels = read(source, "t10k")
    np.savez_compressed(folder / "eval.npz", image=images, label=labels)
