"""What is no model is named for what it is, by its whole magic number."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from compress.artifact import Artifact
from compress.errors import ArtifactError, CheckpointError
from compress.formats.file_kind import file_kind


def picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (3, 2)).save(file, kind)
    return file.getvalue()


def arrays() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.zeros(3), label=np.zeros(3))
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "TIFF", "WebP"])
def test_a_picture_is_called_a_picture(kind: str, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(picture(kind))
    with pytest.raises(CheckpointError, match=r"it looks like a picture") as caught:
        file_kind(tmp_path / "model.pt")
    assert kind in str(caught.value.why)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\x89HDF\r\n\x1a\n" + bytes(50), "an HDF5 file"),
        (b"\x89" + bytes(50), "nothing that torch.save writes"),
        (b"\x08\x0a" + bytes(50), "an ONNX file"),
        (b"GGUF" + bytes(50), "a GGUF file"),
        (bytes(257) + b"ustar\0", "a tar archive"),
        (b"{}", "JSON"),
    ],
)
def test_one_byte_makes_no_kind(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        file_kind(tmp_path / "model")
    assert caught.value.why == f"it looks like {told}"


def test_data_that_is_given_as_the_model_is_called_data(tmp_path: Path) -> None:
    (tmp_path / "train.npz").write_bytes(arrays())
    np.save(tmp_path / "x.npy", np.zeros(3))
    for name in ("train.npz", "x.npy"):
        with pytest.raises(CheckpointError) as caught:
            file_kind(tmp_path / name)
        assert "data and no model" in str(caught.value.why)
        assert "--eval" in str(caught.value.mend)


def test_a_file_is_not_told_to_be_no_folder(tmp_path: Path) -> None:
    (tmp_path / "weights.pth").write_bytes(b"x")
    with pytest.raises(ArtifactError) as caught:
        Artifact.load(tmp_path / "weights.pth")
    assert caught.value.why == "it is a file, and an artifact is a folder"
