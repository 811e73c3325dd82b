"""Folders of images, a folder for each class, made into inputs by the image processor that came with the model."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from compress.console.wording import AssumedWarning, counted
from compress.data.class_names import numbers_of_folders
from compress.errors import DatasetError, MissingExtraError, first_line
from compress.processor import IMAGE_SETTINGS, Processor
from compress.storage.steady import listed, seen
from compress.vetting.files import open_file, refuse_hollow, refuse_larger
from compress.vetting.heard import listener
from compress.vetting.texts import parse_json, read_bytes, read_json

__all__ = ["INDEX", "SUFFIXES", "Images", "images_in", "is_image_folder", "write_index"]

INDEX = "images.json"
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
OTHERS = (".gif", ".tif", ".tiff", ".jfif", ".jp2", ".avif", ".heic", ".heif", ".ppm", ".pgm", ".pnm")
NOTES = "._"  # begins the names of a Mac's
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")  # others are told by their content, and some by programs of their own
LARGEST = 1 << 26  # pixels of an image, as its header has them: a small file may have any number of one colour
LARGEST_FILE = LARGEST * 8 + (1 << 20)  # of four channels of 16 bits, not packed
MOST_NOTES = 1000  # of a PNG, beside its image: texts, times, palettes
MOST_SCANS = 64  # of a JPEG: each goes over all of the image, and may take a few bytes; usual are up to 14
LARGEST_INDEX = 1 << 30  # our own: two million images have 200 MB
ROWS = 64  # brought to 8 bits at a time
BLOCK = 1 << 20  # bytes
KNOWN_BY = "images read once, to know them by"
_MEND = "mend it, or take it away"


def is_image_folder(path: Path) -> bool:
    """Whether a folder holds images, or folders of them, and no arrays."""
    return path.is_dir() and not any(path.glob("*.np[yz]")) and any(not file.is_dir() for file in _found(path))


def images_in(path: Path) -> list[Path]:
    """The images of such a folder, by path."""
    return [file for file in sorted(_found(path)) if not file.is_dir()]


def _found(path: Path) -> Iterator[Path]:
    """A Mac's notes on 1.png, which are in ._1.png beside it on other disks, are none."""
    files = (file for each in ("*", "*/*") for file in path.glob(each) if file.suffix.lower() in SUFFIXES)
    return (file for file in files if not file.name.startswith(NOTES))


def _left_out(path: Path) -> str:
    """What looks like images and is not read, in words; "" where there is none."""
    others = Counter(
        file.suffix.lower()
        for each in ("*", "*/*")
        for file in path.glob(each)
        if file.suffix.lower() in OTHERS and not file.is_dir()
    )
    deeper = sum(file.suffix.lower() in (*SUFFIXES, *OTHERS) and not file.is_dir() for file in path.glob("*/*/*"))
    told = [counted(number, f"{suffix} files") for suffix, number in sorted(others.items())]
    told += [f"{counted(deeper, 'images')} in folders of folders"] if deeper else []
    return f"not read: {', '.join(told)}; {', '.join(SUFFIXES)} in a folder for each class are" if told else ""


def write_index(source: Path, processor: Processor, folder: Path) -> None:
    """Write which images there are, of which class each is, and what makes inputs of them.

    Args:
        source: a folder with a folder for each class, or of images without labels.
        processor: has an image processor, and names of classes.
        folder: that exists, and is empty.

    Raises:
        DatasetError: the processor is missing, or a folder has the name of no class.
    """
    if IMAGE_SETTINGS not in processor.files:
        raise DatasetError(
            f"can't read images for {processor.folder}",
            why=f"there is no {IMAGE_SETTINGS} in it",
            mend="download it; or give images as arrays in an .npz",
        )
    files = images_in(source)
    listed(source, files)
    if left := _left_out(source):
        warnings.warn(f"of {source}, {left}", AssumedWarning, stacklevel=2)
    for file in files:
        with _told(file), open_file(file) as opened:
            refuse_larger(file, opened, LARGEST_FILE)
    try:
        refuse_hollow(source, files)
    except OSError as err:
        raise DatasetError(f"can't read the images in {source}", why=first_line(err), mend=_MEND) from err
    labelled = [file.parent != source and processor.task == "image-classification" for file in files]
    if any(labelled) and not all(labelled):
        loose = files[labelled.index(False)]
        raise DatasetError(
            f"can't tell the classes of the images in {source}",
            why=f"{loose.name} is in none of its folders",
            mend="put each image into the folder of its class, or all into one folder without labels",
        )
    numbers = (
        numbers_of_folders({file.parent.name for file in files}, source, processor.labels) if any(labelled) else {}
    )
    labels = [numbers[file.parent.name] for file in files] if any(labelled) else None
    told = [[[str(file.relative_to(source)), sha] for file, sha in _sums(files)], labels, processor.digest]
    data = {
        "files": [str(file.resolve()) for file in files],
        "labels": labels,
        "processor": str(processor.folder.resolve()),
        "digest": hashlib.sha256(json.dumps(told).encode()).hexdigest(),
    }
    (folder / INDEX).write_text(json.dumps(data))


def _sums(files: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    """Of each file what it is known by."""
    tell = listener()
    tell(0, len(files), KNOWN_BY)
    for number, file in enumerate(files, 1):
        with _told(file):
            yield file, seen(file, LARGEST_FILE)
        tell(number, len(files), KNOWN_BY)


@contextmanager
def _told(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise DatasetError(f"can't read the image {file}", why=first_line(err), mend=_MEND) from err


class Images:
    """Samples as a map-style dataset gives them: `pixel_values` float32 [channels, height, width], and `label`.

    An image is turned as its EXIF data says; one of 16 bits a value is brought to 8.

    Args:
        folder: of `write_index`.
        channels: that the model takes: 3, or 1 of gray.

    Raises:
        DatasetError: the processor can't be made; later, an image can't be read.
        MissingExtraError: transformers or pillow is not installed.
    """

    def __init__(self, folder: Path, channels: int = 3) -> None:
        self._channels = channels
        data = parse_json(read_bytes(folder / INDEX, LARGEST_INDEX), most=LARGEST_INDEX)
        self._files, self._labels = [Path(file) for file in data["files"]], data["labels"]
        self.digest = str(data["digest"])
        self._process = _processor(Path(data["processor"]))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, place: int) -> dict[str, Any]:
        image = self._image(self._files[place])
        try:
            made = self._process(image, return_tensors="np", input_data_format="channels_last")["pixel_values"]
        except DatasetError as err:
            raise DatasetError(f"can't make an input of {self._files[place]}", why=err.why, mend=err.mend) from err
        except Exception as err:  # a configuration is anybody's
            raise DatasetError(
                f"can't make an input of {self._files[place]}",
                why=first_line(err)[:300],
                mend=f"mend {IMAGE_SETTINGS} beside the model; or give images as arrays in an .npz",
            ) from err
        sample: dict[str, Any] = {"pixel_values": np.asarray(made, np.float32)[0]}
        return sample if self._labels is None else sample | {"label": np.int64(self._labels[place])}

    def _image(self, file: Path) -> np.ndarray[Any, Any]:
        """Of a file: uint8 [height, width, channels]."""
        from PIL import Image, ImageOps

        try:
            with warnings.catch_warnings(), open_file(file) as opened:
                warnings.simplefilter("ignore")
                refuse_larger(file, opened, LARGEST_FILE)  # some readers take all of it before they know its size
                _refuse_many_parts(opened)
                with Image.open(opened, formats=FORMATS) as image:
                    if image.width * image.height > LARGEST:
                        many = f"it has {image.width:,} × {image.height:,} pixels"
                        raise DatasetError(
                            f"can't read the image {file}",
                            why=f"{many}, and none may have more than {LARGEST:,}",
                            mend="make it smaller, or take it away",
                        )
                    ImageOps.exif_transpose(image, in_place=True)
                    deep = image.mode.startswith("I")  # 16 bits, which Pillow would cut at 255
                    turned = Image.fromarray(_in_8_bits(np.asarray(image))) if deep else image
                    pixels = np.asarray(turned.convert("L" if self._channels == 1 else "RGB"))
        except MemoryError:
            raise
        except Exception as err:  # Pillow raises of all kinds for damaged files
            if isinstance(err, DatasetError):
                raise
            raise DatasetError(f"can't read the image {file}", why=first_line(err)[:300], mend=_MEND) from err
        return pixels[..., None] if pixels.ndim == 2 else pixels


def _refuse_many_parts(file: BinaryIO) -> None:
    """Refuse a JPEG that says its image over and over, and a PNG with any number of notes beside its own.

    Source: ITU-T T.81, B.1.1.2: a byte of 255 in a scan's own data has a zero behind it, so that its marker is one;
    PNG (third edition, W3C), 5.3: a chunk is its length, its type, so many bytes, and a checksum.
    """
    head = file.read(8)
    if head == b"\x89PNG\r\n\x1a\n":
        notes = 0
        while len(begin := file.read(8)) == 8 and begin[4:] != b"IEND":
            notes += begin[4:] != b"IDAT"
            if notes > MOST_NOTES:
                raise ValueError(f"it has over {MOST_NOTES:,} chunks that are none of its image")
            file.seek(int.from_bytes(begin[:4], "big") + 4, os.SEEK_CUR)
    if head[:3] == b"\xff\xd8\xff":
        file.seek(0)
        scans, before = 0, b""
        while block := file.read(BLOCK):
            scans += (before + block).count(b"\xff\xda")
            before = block[-1:]
        if scans > MOST_SCANS:
            raise ValueError(f"it is written in {scans:,} scans, each of all of the image, and {MOST_SCANS} are taken")
    file.seek(0)


def _in_8_bits(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """uint8 [height, width] of 16 bits a value, some rows at a time: fractions of all of them take 8 times the room."""
    found = np.empty(values.shape, np.uint8)
    for at in range(0, len(values), ROWS):
        found[at : at + ROWS] = np.rint(np.clip(values[at : at + ROWS] / 257, 0, 255))
    return found


def _processor(folder: Path) -> Any:
    from compress.formats.hub.config import offline
    from compress.formats.hub.processor import within_bounds

    with offline() as transformers:
        try:
            import PIL  # noqa: F401
        except ImportError as err:
            raise MissingExtraError("read images", module="PIL", extra="hf") from err
        config: Mapping[str, Any] = read_json(folder / IMAGE_SETTINGS)
        kept = {key: value for key, value in config.items() if key not in ("auto_map", "processor_class")}
        name = str(kept.get("image_processor_type", kept.get("feature_extractor_type", "")))
        name = name.removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
        kind: Any = next((each for word in (f"{name}Pil", name) if (each := getattr(transformers, word, None))), None)
        try:
            if not hasattr(kind, "preprocess"):
                raise ValueError(f"transformers has no image processor {name[:60]!a}")
            return within_bounds(kind.from_dict(kept), kept)
        except Exception as err:  # a configuration is anybody's
            raise DatasetError(
                f"can't make the image processor of {folder}",
                why=first_line(err)[:300],
                mend="give images as arrays in an .npz",
            ) from err
