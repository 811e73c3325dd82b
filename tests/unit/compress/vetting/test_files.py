"""What lies in a folder under a file's name is looked at before it is opened."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from compress.artifact import sha256_of
from compress.data.dataset import Dataset
from compress.data.images import is_image_folder, write_index
from compress.data.sources import open_shards
from compress.errors import DatasetError
from compress.processor import IMAGE_SETTINGS, Processor
from compress.signature import Signature, TensorSpec
from compress.vetting.arrays import open_npy, open_npz
from compress.vetting.files import NoFileError, files_in, open_file
from compress.vetting.tables import rows_of
from compress.vetting.texts import read_bytes

pytestmark = pytest.mark.timeout(120)  # a pipe is waited for without end


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


NO_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pipe": (os.mkfifo, "is a pipe"),
    "a link to a pipe": (_link_to_a_pipe, "is a pipe"),
    "a socket": (_socket, "is a socket"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "is a device"),
    "a folder": (Path.mkdir, "is a folder"),
}
kinds = pytest.mark.parametrize("kind", NO_FILES)


@kinds
def test_what_is_no_file_is_named_whoever_opens_it(tmp_path: Path, kind: str) -> None:
    make, why = NO_FILES[kind]
    place = tmp_path / "x.npy"
    make(place)
    for opener in (open_file, sha256_of, open_npy, open_npz):
        with pytest.raises(NoFileError, match=why):
            opener(place)
    with pytest.raises(NoFileError, match=why):
        files_in(tmp_path, "*.npy")
    with pytest.raises(ValueError, match="no file"):
        read_bytes(place)


@kinds
@pytest.mark.parametrize("suffix", [".npy", ".npz"])
def test_a_folder_of_data_holds_files(tmp_path: Path, kind: str, suffix: str) -> None:
    make, why = NO_FILES[kind]
    make(tmp_path / f"x{suffix}")
    signature = Signature((TensorSpec.parse("x:float32[batch,2]"),), (TensorSpec.parse("y:float32[batch,2]"),))
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        Dataset.open(str(tmp_path), signature)
    assert f"x{suffix} {why}" in caught.value.why
    if suffix == ".npz":
        with pytest.raises(NoFileError, match=why):
            open_shards(tmp_path)


@pytest.mark.parametrize("kind", [kind for kind in NO_FILES if kind != "a folder"])
def test_a_folder_of_images_holds_files(tmp_path: Path, kind: str) -> None:
    make, why = NO_FILES[kind]
    images, model, made = tmp_path / "images", tmp_path / "model", tmp_path / "made"
    for folder in (images, model, made):
        folder.mkdir()
    make(images / "a.png")
    (model / IMAGE_SETTINGS).write_text("{}")
    assert is_image_folder(images)
    processor = Processor("image", "features", {IMAGE_SETTINGS: ""}, (), None, model)
    with pytest.raises(DatasetError, match="can't read the image") as caught:
        write_index(images, processor, made)
    assert why in caught.value.why


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".txt"])
def test_a_file_of_texts_is_one(tmp_path: Path, suffix: str) -> None:
    os.mkfifo(tmp_path / f"texts{suffix}")
    with pytest.raises(DatasetError, match="can't read the data"):
        list(rows_of(tmp_path / f"texts{suffix}"))


def test_a_link_to_a_file_is_that_file(tmp_path: Path) -> None:
    np.save(tmp_path / "there.npy", np.arange(3))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "x.npy").symlink_to("../there.npy")
    assert [path.name for path in files_in(folder, "*.npy")] == ["x.npy"]
    assert open_npy(folder / "x.npy").tolist() == [0, 1, 2]
