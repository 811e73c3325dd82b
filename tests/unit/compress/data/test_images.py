"""Images are made into inputs as transformers does, and folders are classes by name."""

from __future__ import annotations

import json
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from compress.artifact import TensorSpec
from compress.console.wording import AssumedWarning
from compress.data.dataset import Dataset
from compress.data.images import _in_8_bits
from compress.data.reading import arrays_of
from compress.errors import DatasetError
from compress.formats.hub.config import offline
from compress.processor import Processor
from compress.signature import Signature
from compress.vetting import texts

SIDE = 8


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("maker")
    config: dict[str, Any] = {"image_processor_type": "ViTImageProcessor", "size": {"height": SIDE, "width": SIDE}}
    config |= {"image_mean": [0.5], "image_std": [0.5]}
    (folder / "gray").mkdir()
    (folder / "gray" / "preprocessor_config.json").write_text(json.dumps(config))
    config |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    return folder


def opened(images: Path, maker: Path, labels: tuple[str, ...] = (), channels: int = 3) -> Dataset:
    folder = maker if channels == 3 else maker / "gray"
    processor = Processor("image", "image-classification", {"preprocessor_config.json": ""}, labels, None, folder)
    signature = Signature((TensorSpec("pixel_values", "float32", ("batch", channels, SIDE, SIDE)),), ())
    return Dataset.open(arrays_of(str(images), processor), signature)


def folders(place: Path, *names: str) -> Path:
    for name in names:
        (place / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(place / name / "1.png")
    return place


KNOWN = {
    "the model's names": (("Dog", "Cat"), ("Cat", "Dog"), [1, 0], None),
    "in another case": (("Dog", "Cat"), ("cat", "dog"), [1, 0], "cat is Cat"),
    "numbers": (("Dog", "Cat"), ("0", "1"), [0, 1], None),
    "a model with no names": (("LABEL_0", "LABEL_1"), ("cat", "dog"), [0, 1], "0 cat, 1 dog"),
    "a model with nothing": ((), ("cat", "dog"), [0, 1], "0 cat, 1 dog"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", KNOWN)
def test_folders_are_classes_by_name_and_what_is_assumed_is_told(tmp_path: Path, maker: Path, case: str) -> None:
    labels, names, wanted, told = KNOWN[case]
    folders(tmp_path / "images", *names)
    if told is None:
        data = opened(tmp_path / "images", maker, labels)
    else:
        with pytest.warns(AssumedWarning, match=told):
            data = opened(tmp_path / "images", maker, labels)
    found = data.take(slice(0, 2))[1]
    assert found is not None
    assert found.tolist() == wanted


def test_images_of_other_classes_are_other_data(tmp_path: Path, maker: Path) -> None:
    """The model's names decide the labels: who exchanges two of them asks for another training."""
    images = folders(tmp_path / "images", "cat", "dog")
    first, second = opened(images, maker, ("cat", "dog")), opened(images, maker, ("dog", "cat"))
    assert first.take(slice(0, 2))[1].tolist() != second.take(slice(0, 2))[1].tolist()  # type: ignore[union-attr]
    assert first.sha256 != second.sha256


def test_an_image_that_is_exchanged_is_read_again(tmp_path: Path, maker: Path) -> None:
    images = folders(tmp_path / "images", "cat", "dog")
    first = opened(images, maker, ("cat", "dog"))
    Image.new("RGB", (5, 5), "red").save(images / "cat" / "1.png")
    assert opened(images, maker, ("cat", "dog")).sha256 != first.sha256


@pytest.mark.filterwarnings("error")
def test_images_that_are_left_out_are_told(tmp_path: Path, maker: Path) -> None:
    images = folders(tmp_path / "images", "cat", "dog")
    for name in ("cat/2.gif", "cat/3.TIF", "dog/4.gif", "dog/notes.txt"):
        (images / name).touch()
    folders(images / "dog", "young")
    with pytest.warns(AssumedWarning, match=r"not read: 2 \.gif files, 1 \.tif file, 1 image in folders of folders;"):
        assert len(opened(images, maker, ("cat", "dog"))) == 2


def test_folders_that_are_called_as_other_classes_numbers_are_told(tmp_path: Path, maker: Path) -> None:
    stars = ("1", "2", "3")
    with pytest.warns(AssumedWarning, match="names of classes, which are numbers"):
        data = opened(folders(tmp_path / "images", "1", "2"), maker, stars)
    assert np.asarray(data.take(slice(0, 2))[1]).tolist() == [0, 1]


FOREIGN = {
    "other names": (("Dog", "Cat"), ("bird", "fish"), "Dog, Cat"),
    "numbers from 1": (("Dog", "Cat"), ("1", "2"), "Dog, Cat"),
    "a number that is no digit": (("Dog", "Cat"), ("²", "1"), "Dog, Cat"),
    "a name of two classes": (("crane", "crane"), ("crane",), "several classes so: 0, 1"),
    "two names that differ in case": (("Crane", "crane"), ("CRANE",), "several classes so: 0, 1"),
    "too few for the order": (("LABEL_0", "LABEL_1", "LABEL_2"), ("cat", "dog"), "LABEL_0, LABEL_1"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_folder_of_no_class_or_of_several_is_refused(tmp_path: Path, maker: Path, case: str) -> None:
    labels, names, why = FOREIGN[case]
    with pytest.raises(DatasetError) as caught:
        opened(folders(tmp_path / "images", *names), maker, labels)
    assert why in caught.value.why


def test_an_image_is_turned_as_it_says_as_transformers_does(tmp_path: Path, maker: Path) -> None:
    turned = Image.Exif()
    turned[0x112] = 6
    pixels = np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "1.jpg", exif=turned)
    with offline() as transformers:
        from transformers.image_utils import load_image

        process = transformers.AutoImageProcessor.from_pretrained(maker)
        wanted = process(images=load_image(str(tmp_path / "1.jpg")), return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(opened(tmp_path, maker).take(slice(0, 1))[0]["pixel_values"], wanted, atol=1e-6)


def test_16_bits_of_gray_are_scaled_not_cut(tmp_path: Path, maker: Path) -> None:
    ramp = np.linspace(0, 1, SIDE * SIDE).reshape(SIDE, SIDE)
    for name, values in (("8", np.rint(ramp * 255).astype(np.uint8)), ("16", np.rint(ramp * 65535).astype(np.uint16))):
        (tmp_path / name).mkdir()
        Image.fromarray(values).save(tmp_path / name / "1.png")
    few, many = (opened(tmp_path / name, maker).take(slice(0, 1))[0]["pixel_values"] for name in ("8", "16"))
    np.testing.assert_allclose(many, few, atol=0.01)


def test_a_model_of_gray_takes_images(tmp_path: Path, maker: Path) -> None:
    for name, color in (("1", (255, 255, 255)), ("2", (0, 0, 0))):
        Image.new("RGB", (20, 10), color).save(tmp_path / f"{name}.png")
    values = opened(tmp_path, maker, channels=1).take(slice(0, 2))[0]["pixel_values"]
    assert values.shape == (2, 1, SIDE, SIDE)
    assert values[:, 0, 0, 0].tolist() == [1.0, -1.0]


@pytest.mark.parametrize("content", [b"", b"no image", None])
def test_a_damaged_image_is_named(tmp_path: Path, maker: Path, content: bytes | None) -> None:
    file = tmp_path / "images" / "1.jpg"
    file.parent.mkdir()
    Image.effect_noise((64, 64), 50).save(file)
    file.write_bytes(file.read_bytes()[:400] if content is None else content)
    with pytest.raises(DatasetError) as caught:
        opened(file.parent, maker)
    assert str(file) in caught.value.what
    assert "take it away" in caught.value.mend


def png_of(width: int, height: int, *, depth: int) -> bytes:
    """Gray, all 0, whatever its size in a few bytes."""
    packed = zlib.compressobj(9)
    row = bytes(1 + width * depth // 8)
    content = b"".join(packed.compress(row) for _ in range(height)) + packed.flush()
    parts = ((b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)), (b"IDAT", content), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_an_image_of_more_pixels_than_any_may_have_is_refused_before_it_is_decoded(tmp_path: Path, maker: Path) -> None:
    side = 8200
    content = png_of(8, 8, depth=16)
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 16, 0, 0, 0, 0)
    (tmp_path / "1.png").write_bytes(content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:])
    with pytest.raises(DatasetError, match="can't read the image") as caught:
        opened(tmp_path, maker)
    assert "8,200 × 8,200 pixels, and none may have more than 67,108,864" in caught.value.why


def test_16_bits_of_many_pixels_are_scaled_a_part_at_a_time() -> None:
    values = np.random.default_rng(0).integers(0, 1 << 16, (3000, 2000), dtype=np.uint16)
    tracemalloc.start()
    found = _in_8_bits(values)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(found, np.rint(values / 257).astype(np.uint8))
    assert most < 2 * found.nbytes


def test_a_jpeg_that_says_its_image_over_and_over_is_refused(tmp_path: Path, maker: Path) -> None:
    """Each of its scans is a few bytes, and goes over all of the image."""
    (tmp_path / "images").mkdir()
    file = tmp_path / "images" / "1.jpg"
    Image.effect_noise((64, 64), 50).convert("RGB").save(file, progressive=True)
    assert opened(tmp_path / "images", maker).inputs["pixel_values"][:].shape == (1, 3, SIDE, SIDE)
    whole = file.read_bytes()
    last = whole.rindex(b"\xff\xda")
    file.write_bytes(whole[:last] + whole[last:-2] * 300 + whole[-2:])
    with pytest.raises(DatasetError, match="can't read the image") as caught:
        opened(tmp_path / "images", maker)
    assert "scans, each of all of the image" in caught.value.why


def test_a_png_with_any_number_of_notes_beside_its_image_is_refused(tmp_path: Path, maker: Path) -> None:
    (tmp_path / "images").mkdir()
    file = tmp_path / "images" / "1.png"
    Image.effect_noise((64, 64), 50).convert("RGB").save(file)
    whole = file.read_bytes()
    note = b"tEXtkey\0value"
    note = (len(note) - 4).to_bytes(4, "big") + note + zlib.crc32(note).to_bytes(4, "big")
    file.write_bytes(whole[:33] + note * 100 + whole[33:])
    assert opened(tmp_path / "images", maker).inputs["pixel_values"][:].shape == (1, 3, SIDE, SIDE)
    file.write_bytes(whole[:33] + note * 5000 + whole[33:])
    with pytest.raises(DatasetError, match="can't read the image") as caught:
        opened(tmp_path / "images", maker)
    assert "chunks that are none of its image" in caught.value.why


def test_a_folder_of_very_many_images_is_read(tmp_path: Path, maker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of them is our own: a stranger's JSON has fewer values."""
    for at in range(30):
        folders(tmp_path / "images", f"{at}")
    monkeypatch.setattr(texts, "MAX_VALUES", 50)
    monkeypatch.setattr(texts, "MAX_BYTES", 1000)
    assert len(opened(tmp_path / "images", maker)) == 30
