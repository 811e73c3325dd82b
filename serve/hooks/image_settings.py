"""How an artifact's own image processor makes a network's input of an image, as far as its settings say it plainly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from compress.artifact import Artifact
from compress.processor import IMAGE_SETTINGS
from compress.vetting.texts import read_json

__all__ = ["ImageSettings", "image_settings", "unlike"]

FILTERS = ("NEAREST", "LANCZOS", "BILINEAR", "BICUBIC", "BOX", "HAMMING")  # by Pillow's numbers
BILINEAR = 2


# Of each class of transformers' that is followed to the letter, whether it cuts a centre out.
CLASSES = {
    "ViTImageProcessor": False,
    "ViTFeatureExtractor": False,
    "CLIPImageProcessor": True,
    "CLIPFeatureExtractor": True,
}
SAID = ("resample", "do_resize", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "size")
NEEDLESS = {  # keys that change nothing of what an image of three channels becomes
    "image_processor_type", "feature_extractor_type", "processor_class", "do_convert_rgb", "data_format", "device",
    "input_data_format", "return_tensors", "disable_grouping", "crop_size", "do_center_crop",
}  # fmt: skip


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
    given = _given(source)
    return ImageSettings() if isinstance(given, str) else _settings(given, channels, height, width)


def _given(source: Artifact) -> dict[str, Any] | str:
    """What the artifact's image processor says of itself, or why it says nothing."""
    processor = source.processor
    if processor is None or processor.kind != "image" or IMAGE_SETTINGS not in processor.files:
        return "there is no image processor"
    try:
        given = read_json(processor.folder / IMAGE_SETTINGS)
    except (OSError, ValueError) as err:
        return f"its {IMAGE_SETTINGS} can't be read: {err}"
    return given if isinstance(given, dict) else f"its {IMAGE_SETTINGS} is no object"


def _settings(given: dict[str, Any], channels: int, height: int, width: int) -> ImageSettings:
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


def unlike(source: Artifact, channels: int, height: int, width: int) -> str:
    """Why hooks of `image_settings` would not make of an image what the artifact's processor makes of it; "" where they
    do. Only what is known is allowed: a class, its keys and their values; a default is no value.
    """
    given = _given(source)
    if isinstance(given, str):
        return given
    kind = str(given.get("image_processor_type", given.get("feature_extractor_type", "")))
    cuts = CLASSES.get(kind.removesuffix("Fast").removesuffix("Pil"))
    if cuts is None:
        return f"its processor is {kind[:60] or 'of no class'!a}, and known are {', '.join(CLASSES)}"
    used = {name for name, value in given.items() if value is not None and not name.startswith("_")}
    if odd := sorted(used - {*SAID, *NEEDLESS}):
        return f"its processor says {odd[0][:60]!a}, which is not known here"
    if missing := next((name for name in SAID if name not in used), None):
        return f"its processor says nothing of {missing}"
    if off := next((name for name in ("do_resize", "do_rescale", "do_normalize") if given[name] is not True), None):
        return f"its processor says {off} {given[off]!a}"
    if bool(given.get("do_center_crop")) != cuts:
        return f"its processor says do_center_crop {given.get('do_center_crop')!a}"
    size, found = given["size"], _settings(given, channels, height, width)
    if not found.mean:
        return "it does not say how values are scaled (image_mean, image_std, rescale_factor)"
    if type(given["resample"]) is not int or not 0 <= given["resample"] < len(FILTERS):
        return f"its processor says resample {given['resample']!a}"
    if cuts and found.shorter is None:
        return f"it cuts {given.get('crop_size')!a} of {size!a}, and the network takes {height} by {width}"
    if not cuts and size not in (whole := ({"height": height, "width": width}, *([height] if height == width else ()))):
        return f"it makes images {size!a}, and the network takes {whole[0]!a}"
    return ""


def _shorter(given: dict[str, Any], height: int, width: int) -> int | None:
    if given.get("do_center_crop") is not True or given.get("do_resize") is not True:
        return None
    size, crop = given.get("size"), given.get("crop_size")
    # these keys alone: a longest_edge bounds the other side, and what else there may be is not known
    side = size.get("shortest_edge") if isinstance(size, dict) and size.keys() == {"shortest_edge"} else size
    sides = (crop, crop)
    if isinstance(crop, dict) and crop.keys() == {"height", "width"}:
        sides = (crop["height"], crop["width"])
    return side if type(side) is int and sides == (height, width) and side >= max(height, width) else None


def _numbers(given: Any, count: int) -> tuple[float, ...]:
    found = given if isinstance(given, list) and len(given) == count else []
    plain = all(type(each) in (int, float) and math.isfinite(each) for each in found)
    return tuple(map(float, found)) if plain else ()
