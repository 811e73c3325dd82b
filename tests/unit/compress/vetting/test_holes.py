"""A file of holes, terabytes on a disk that has a few bytes of them, is refused before anybody reads all of it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from compress.artifact import Artifact, sha256_of
from compress.data.dataset import Dataset
from compress.data.images import write_index
from compress.errors import ArtifactError, CheckpointError, DatasetError
from compress.formats.checkpoint import load
from compress.formats.file_kind import file_kind
from compress.processor import FILES, IMAGE_SETTINGS, LARGEST_FILE, Processor
from compress.signature import Signature, TensorSpec
from compress.vetting import files
from compress.vetting.arrays import open_npy
from compress.vetting.files import HollowError, files_in, open_file
from compress.vetting.heard import heard
from compress.vetting.onnx_wire import OnnxFileError, vet_onnx_bytes
from tests.hostile.onnx_files import artifact, model, outside
from tests.hub_models import bert_folder

pytestmark = pytest.mark.timeout(120)  # a terabyte takes ten minutes, and more to hash
ONE = Signature((TensorSpec.parse("x:float32[batch,4]"),), (TensorSpec.parse("y:float32[batch,4]"),))
SIZE = 8 << 40


def hollow(path: Path, begin: bytes = b"", size: int = SIZE) -> Path:
    path.write_bytes(begin)
    try:
        os.truncate(path, size)
    except OSError:
        pytest.skip("files of this file system are smaller")
    return path


def npy(rows: int) -> bytes:
    """The header of an array of that many rows, whose numbers would follow."""
    import io

    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, 4)})
    return file.getvalue()


def whole(path: Path) -> Path:
    """One that keeps its word: its header says what it has."""
    rows = (1 << 40) // 16
    return hollow(path, npy(rows), len(npy(rows)) + (1 << 40))


@pytest.mark.parametrize("reader", [open_file, sha256_of, open_npy, file_kind, lambda path: files_in(path.parent, "*")])
def test_it_is_refused_by_whoever_opens_it(tmp_path: Path, reader: Callable[[Path], Any]) -> None:
    with pytest.raises((HollowError, CheckpointError), match=r"are on the disk: the others are holes"):
        reader(whole(tmp_path / "x.npy"))


@pytest.mark.parametrize("name", ["x.npy", "x.npz", ""])
def test_data_is_refused_in_three_parts(tmp_path: Path, name: str) -> None:
    whole(tmp_path / (name or "x.npy"))
    with pytest.raises(DatasetError, match="can't read the data") as caught:
        Dataset.open(str(tmp_path / name), ONE)
    assert "1,099,511," in caught.value.why


def test_what_many_files_have_together_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "HOLES", 1 << 20)
    for name in ("a", "b", "c"):
        hollow(tmp_path / f"{name}.npy", npy(1 << 15), len(npy(1 << 15)) + (1 << 19))
        open_file(tmp_path / f"{name}.npy").close()
    with pytest.raises(HollowError, match="the others are holes"):
        files_in(tmp_path, "*.npy")


def test_a_file_with_some_holes_is_read(tmp_path: Path) -> None:
    sparse = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (1 << 20, 4))
    sparse[:10] = 1
    sparse.flush()
    assert len(Dataset.open(str(tmp_path / "x.npy"), ONE)) == 1 << 20


def test_few_blocks_are_no_holes_where_the_file_system_knows_of_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that compresses, or that is far away."""
    monkeypatch.setattr(files, "HOLES", 0)
    monkeypatch.setattr(files, "BLOCK", 0)
    (tmp_path / "a").write_bytes(os.urandom(5000))
    with open_file(tmp_path / "a") as file:
        assert len(file.read()) == 5000
    assert files_in(tmp_path, "a")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("hub") / "bert")


@pytest.mark.parametrize(
    ("name", "size", "why"),
    [
        ("vocab.txt", SIZE, "the others are holes"),
        ("vocab.txt", LARGEST_FILE + 1, "such a file has at most"),
        ("tokenizer.json", SIZE, "the others are holes"),
        ("model.safetensors", SIZE, "the others are holes"),
    ],
)
def test_files_of_a_hub_folder_have_a_bound(bert: Path, tmp_path: Path, name: str, size: int, why: str) -> None:
    folder = Path(shutil.copytree(bert, tmp_path / "bert"))
    begin = (folder / name).read_bytes() if name.endswith("safetensors") else b""
    (folder / name).unlink(missing_ok=True)
    hollow(folder / name, begin, size)
    with pytest.raises(CheckpointError, match="can't read") as caught:
        load(folder)
    assert why in caught.value.why
    assert caught.value.mend


def test_no_image_is_larger_than_its_pixels(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / IMAGE_SETTINGS).write_text("{}")
    processor = Processor("image", "features", {IMAGE_SETTINGS: ""}, (), None, tmp_path)
    Image.new("RGB", (4, 4)).save(tmp_path / "images" / "a.png")
    begin = (tmp_path / "images" / "a.png").read_bytes()
    for size, why in ((SIZE, "the others are holes"), (600 << 20, "such a file has at most")):
        hollow(tmp_path / "images" / "a.png", begin, size)
        with pytest.raises(DatasetError, match="can't read the image") as caught:
            write_index(tmp_path / "images", processor, tmp_path)
        assert why in caught.value.why


def test_weights_beside_an_onnx_file_are_there(tmp_path: Path) -> None:
    made = model()
    hollow(tmp_path / "real")
    outside("real", offset="0", length="64")(made, tmp_path)
    with pytest.raises(OnnxFileError, match="the others are holes"):
        vet_onnx_bytes(made.SerializeToString(), tmp_path)


@pytest.mark.parametrize("which", ["model.onnx", "processor/vocab.txt"])
@pytest.mark.parametrize(("size", "why"), [(SIZE, "the others are holes"), (3 << 30, "")])
def test_an_artifact_is_refused_before_its_files_are_hashed(tmp_path: Path, which: str, size: int, why: str) -> None:
    artifact(tmp_path, model().SerializeToString())
    told = json.loads((tmp_path / "artifact.json").read_text())
    (tmp_path / "processor").mkdir()
    assert "vocab.txt" in FILES
    told["processor"] = {
        "kind": "text", "task": "logits", "files": {"vocab.txt": "0" * 64}, "labels": [], "max_length": 8,
    }  # fmt: skip
    (tmp_path / "processor" / "vocab.txt").write_text("a")
    (tmp_path / "artifact.json").write_text(json.dumps(told))
    hollow(tmp_path / which, b"", size)
    with pytest.raises(ArtifactError, match="can't read") as caught:
        Artifact.load(tmp_path)
    assert why in caught.value.why


def test_how_the_reading_of_a_large_file_goes_on_is_told(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1 << 18, 4), np.float32))
    told: list[tuple[int, int, str]] = []
    with heard(lambda *words: told.append(words)):
        Dataset.open(str(tmp_path / "x.npy"), ONE)
    size = (tmp_path / "x.npy").stat().st_size
    for what, total in (("bytes read once, to know them by", size), ("samples looked at", 1 << 18)):
        done = [(at, of) for at, of, each in told if each == what]
        assert (done[0], done[-1]) == ((0, total), (total, total))
        assert done == sorted(done)
