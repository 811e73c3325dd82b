"""Folders of images, a folder for each class, made into inputs by the image processor that came with the model."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from compress.artifact import sha256_of
from compress.errors import DatasetError, MissingExtraError, first_line
from compress.processor import Processor
from compress.vetting.texts import read_json

__all__ = ["INDEX", "Images", "is_image_folder", "write_index"]

INDEX = "images.json"
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")  # others are told by their content, and some by programs of their own
LARGEST = 1 << 28  # pixels of an image
_PROCESSOR = "preprocessor_config.json"


def is_image_folder(path: Path) -> bool:
    """Whether a folder holds images, or folders of them, and no arrays."""
    return path.is_dir() and not any(path.glob("*.np[yz]")) and any(_found(path))


def _found(path: Path) -> Any:
    return (
        file for each in ("*", "*/*") for file in path.glob(each) if file.suffix.lower() in SUFFIXES and file.is_file()
    )


def write_index(source: Path, processor: Processor, folder: Path) -> None:
    """Write which images there are, of which class each is, and what makes inputs of them.

    Args:
        source: a folder with a folder for each class, or of images without labels.
        processor: has an image processor, and names of classes.
        folder: that exists, and is empty.

    Raises:
        DatasetError: the processor is missing, or a folder has the name of no class.
    """
    if _PROCESSOR not in processor.files:
        raise DatasetError(
            f"can't read images for {processor.folder}",
            why=f"there is no {_PROCESSOR} in it",
            mend="download it; or give images as arrays in an .npz",
        )
    files = sorted(_found(source))
    labelled = [file.parent != source and processor.task == "image-classification" for file in files]
    if any(labelled) and not all(labelled):
        loose = files[labelled.index(False)]
        raise DatasetError(
            f"can't tell the classes of the images in {source}",
            why=f"{loose.name} is in none of its folders",
            mend="put each image into the folder of its class, or all into one folder without labels",
        )
    labels = [_number(file.parent.name, source, processor, files) for file in files] if any(labelled) else None
    digest = hashlib.sha256(json.dumps([[str(file.relative_to(source)), sha256_of(file)] for file in files]).encode())
    data = {
        "files": [str(file.resolve()) for file in files],
        "labels": labels,
        "processor": str(processor.folder.resolve()),
        "digest": hashlib.sha256(f"{digest.hexdigest()} {processor.digest}".encode()).hexdigest(),
    }
    (folder / INDEX).write_text(json.dumps(data))


def _number(name: str, source: Path, processor: Processor, files: list[Path]) -> int:
    """Of a class by the model's names; where none of them is the folders', by the folders' order."""
    names = {label: number for number, label in enumerate(processor.labels)}
    folders = sorted({file.parent.name for file in files})
    if not set(folders) & names.keys():
        if len(folders) == len(names) or not names:
            return int(name) if all(each.isdigit() for each in folders) else folders.index(name)
        if all(each.isdigit() for each in folders):
            return int(name)
    if name not in names:
        raise DatasetError(
            f"{source} holds the class {name!r}",
            why=f"the model's classes are {', '.join(list(names)[:8])}",
            mend="name the folders as the model names its classes, or by their numbers from 0",
        )
    return names[name]


class Images:
    """Samples as a map-style dataset gives them: `pixel_values` float32 [channels, height, width], and `label`.

    Args:
        folder: of `write_index`.

    Raises:
        DatasetError: the processor can't be made.
        MissingExtraError: transformers or pillow is not installed.
    """

    def __init__(self, folder: Path) -> None:
        data = read_json(folder / INDEX)
        self._files, self._labels = [Path(file) for file in data["files"]], data["labels"]
        self.digest = str(data["digest"])
        self._process = _processor(Path(data["processor"]))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, place: int) -> dict[str, Any]:
        from PIL import Image

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(self._files[place], formats=FORMATS) as image:
                if image.width * image.height > LARGEST:
                    raise DatasetError(
                        f"can't read {self._files[place]}",
                        why=f"it has {image.width:,} × {image.height:,} pixels",
                        mend="make it smaller, or take it away",
                    )
                rgb = image.convert("RGB")
            made = self._process(images=rgb, return_tensors="np")["pixel_values"]
        sample: dict[str, Any] = {"pixel_values": np.asarray(made, np.float32)[0]}
        return sample if self._labels is None else sample | {"label": np.int64(self._labels[place])}


def _processor(folder: Path) -> Any:
    from compress.formats.hub.config import offline
    from compress.formats.hub.processor import within_bounds

    with offline() as transformers:
        try:
            import PIL  # noqa: F401
        except ImportError as err:
            raise MissingExtraError("read images", module="PIL", extra="hf") from err
        config: Mapping[str, Any] = read_json(folder / _PROCESSOR)
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
