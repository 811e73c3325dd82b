"""How an artifact's own image processor makes a network's input of an image, as far as its settings say it plainly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from compress.artifact import Artifact
from compress.processor import IMAGE_SETTINGS
from compress.vetting.texts import read_json

__all__ = ["ImageSettings", "image_settings"]

FILTERS = ("NEAREST", "LANCZOS", "BILINEAR", "BICUBIC", "BOX", "HAMMING")  # by Pillow's numbers
BILINEAR = 2


@dataclass(frozen=True)
class ImageSettings:
    """Of an image processor.

    Attributes:
        mean, std: of each channel, of values of 0 to 1; empty where the settings do not say.
        shorter: pixels of an image's shorter side before the centre is cut out of it; None where the whole image is
            taken.
        filter: Pillow's name of what it resizes with.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    shorter: int | None = None
    filter: str = FILTERS[BILINEAR]


def image_settings(source: Artifact, channels: int, height: int, width: int) -> ImageSettings:
    """What the artifact's processor does to an image of so many channels for a network of this size.

    Settings that are missing or of another kind are left out, not guessed: a processor's class may have its own.
    """
    processor = source.processor
    if processor is None or processor.kind != "image" or IMAGE_SETTINGS not in processor.files:
        return ImageSettings()
    try:
        given = read_json(processor.folder / IMAGE_SETTINGS)
    except (OSError, ValueError):
        given = None
    if not isinstance(given, dict):
        return ImageSettings()
    mean, std = _numbers(given.get("image_mean"), channels), _numbers(given.get("image_std"), channels)
    if given.get("do_normalize") is False:
        mean, std = (0.0,) * channels, (1.0,) * channels
    factor = given.get("rescale_factor", 1 / 255)
    rescaled = given.get("do_rescale", True) is True and isinstance(factor, float) and math.isclose(factor, 1 / 255)
    if not (rescaled and mean and std and all(std)):
        mean = std = ()
    resample = given.get("resample", BILINEAR)
    known = type(resample) is int and 0 <= resample < len(FILTERS)
    name = FILTERS[resample if known else BILINEAR]
    return ImageSettings(mean, std, _shorter(given, height, width), name)


def _shorter(given: dict[str, Any], height: int, width: int) -> int | None:
    if given.get("do_center_crop") is not True or given.get("do_resize") is not True:
        return None
    size, crop = given.get("size"), given.get("crop_size")
    side = size.get("shortest_edge") if isinstance(size, dict) else size
    sides = (crop.get("height"), crop.get("width")) if isinstance(crop, dict) else (crop, crop)
    return side if type(side) is int and sides == (height, width) and side >= max(height, width) else None


def _numbers(given: Any, count: int) -> tuple[float, ...]:
    found = given if isinstance(given, list) and len(given) == count else []
    plain = all(type(each) in (int, float) and math.isfinite(each) for each in found)
    return tuple(map(float, found)) if plain else ()
