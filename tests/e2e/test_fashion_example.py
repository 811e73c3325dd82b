"""The Fashion-MNIST networks that stand in the repository are what the README says they are."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import compress
from compress.runtime.backends import open_model
from tests.e2e.conftest import ROOT

FOLDER = ROOT / "examples/fashion_mnist"
DATA = Path("/usr/share/datasets/fashion-mnist")


@pytest.mark.parametrize("name", ["resnet", "mobilenet"])
def test_the_checkpoint_loads_without_its_code_and_is_small(name: str) -> None:
    path = FOLDER / f"{name}.pt"
    assert path.stat().st_size < 2_000_000
    model = compress.load(path)
    images = np.random.default_rng(0).random((3, 1, 28, 28), np.float32)
    logits = open_model(model, threads=1).infer({"image": images})["logits"]
    assert logits.shape == (3, 10)
    assert np.isfinite(logits).all()


def write_idx(folder: Path, part: str, count: int) -> None:
    """A few images in the format of the data set."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (count, 28, 28), np.uint8), rng.integers(0, 10, count, np.uint8)
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz", "wb") as file:
        file.write(bytes(16) + images.tobytes())
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz", "wb") as file:
        file.write(bytes(8) + labels.tobytes())


def test_training_runs_from_the_files_to_a_checkpoint(tmp_path: Path) -> None:
    for part, count in (("train", 1300), ("t10k", 500)):
        write_idx(tmp_path, part, count)
    command = [
        sys.executable,
        str(FOLDER / "train_fashion.py"),
        str(tmp_path / "out"),
        "--epochs",
        "1",
        "--data",
        str(tmp_path),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "of the test images right" in done.stdout
    assert compress.load(tmp_path / "out/resnet.pt").signature.inputs[0].shape == ("batch", 1, 28, 28)
    assert len(np.load(tmp_path / "out/calibration.npz")["image"]) == 512


def test_missing_data_says_how_to_get_it(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "train_fashion.py"), str(tmp_path / "out"), "--data", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert "dataset-fashion-mnist" in done.stderr


@pytest.mark.skipif(not DATA.exists(), reason="Debian's package dataset-fashion-mnist is not installed")
@pytest.mark.parametrize(("name", "least"), [("resnet", 0.925), ("mobilenet", 0.92)])
def test_the_test_images_are_told_apart(name: str, least: float) -> None:
    with gzip.open(DATA / "t10k-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)[::5].astype(np.float32) / 255
    with gzip.open(DATA / "t10k-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)[::5]
    logits = open_model(compress.load(FOLDER / f"{name}.pt"), threads=2).infer({"image": images})["logits"]
    assert (logits.argmax(1) == labels).mean() > least - 0.01
