"""Which files of a folder make a model's inputs, and how long a text, how large an image they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compress.artifact import sha256_of
from compress.errors import CheckpointError, DatasetError, first_line
from compress.formats.hub.bounds import DEEPEST
from compress.formats.hub.folder import WHOLE, HubFolder, has, inside, json_of
from compress.processor import FILES, IMAGE_SETTINGS, LARGEST_FILE, Processor

__all__ = ["image_size", "processor_of", "within_bounds"]

LARGEST_SIDE = 4096
LARGEST_AREA = 1 << 25  # pixels of an image on its way, before it is cropped
SMALLEST_SHARE = 0.05  # of an image that is kept (crop_pct): the image is made as much larger before
_UNBOUNDED = 1 << 20  # what tokenizers write for a length without an end


def processor_of(
    folder: HubFolder, kind: str, task: str, labels: tuple[str, ...], longest: int | None, pad: Any = None
) -> Processor | None:
    """A folder's files that make inputs; None where it has none.

    Args:
        folder: of the model.
        kind, task, labels: see `Processor`.
        longest: tokens that the network has positions for.
        pad: the configuration's pad_token_id.

    Raises:
        CheckpointError: one of them is no file, leads out of the folder, or is larger than it may be.
    """
    for place in dict.fromkeys((folder.path, folder.root)):
        names = [name for name in FILES if has(place, name)]
        files = {name: _digest(inside(place, name, folder.root)) for name in names}
        if files:
            text = kind == "text"
            filler = pad if text and type(pad) is int and 0 <= pad < 1 << 31 else None
            length = _max_length(folder, longest) if text else None
            return Processor(kind, task, files, labels, length, place, pad_token_id=filler)
    return None


def _digest(path: Path) -> str:
    try:
        return sha256_of(path, LARGEST_FILE)
    except OSError as err:
        raise CheckpointError(f"can't read {path}", why=first_line(err), mend=f"take it away, or {WHOLE}") from err


def _max_length(folder: HubFolder, longest: int | None) -> int:
    told = [longest]
    for name, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        place = next((each for each in (folder.root, folder.path) if has(each, name)), None)
        if place is not None:
            data = json_of(place, name, folder.root)
            told.append(data.get(key) if isinstance(data, dict) else None)
    lengths = [int(each) for each in told if isinstance(each, int | float) and 0 < each < _UNBOUNDED]
    return min(lengths, default=512)


def image_size(folder: HubFolder, config: Any) -> tuple[int, int]:
    """Height and width of the images that the folder's processor makes.

    Raises:
        CheckpointError: neither processor nor configuration says.
    """
    data: Any = json_of(folder.path, IMAGE_SETTINGS, folder.root) if has(folder.path, IMAGE_SETTINGS) else {}
    data = data if isinstance(data, dict) else {}
    if why := _too_large("", data):
        raise CheckpointError(
            f"won't make images for {folder.path}",
            why=f"{IMAGE_SETTINGS}: {why}",
            mend=f"give it the sizes of the training, each at most {LARGEST_SIDE}",
        )
    crop = data.get("crop_size") if data.get("do_center_crop", "crop_size" in data) else None
    for size in (crop, data.get("size"), getattr(config, "image_size", None)):
        found = _sides(size)
        if found is not None and max(found) <= LARGEST_SIDE:
            return found
    raise CheckpointError(
        f"can't tell the size of images for {folder.path}",
        why=f"neither its {IMAGE_SETTINGS} nor its config.json says",
        mend=f'add "size": {{"height": 224, "width": 224}} to {IMAGE_SETTINGS}, as in the training',
    )


def _sides(size: Any) -> tuple[int, int] | None:
    if isinstance(size, dict):
        size = [size.get("height", size.get("shortest_edge")), size.get("width", size.get("shortest_edge"))]
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(sides) == 2 and all(type(side) is int and side > 0 for side in sides):
        return sides[0], sides[1]
    return None


def within_bounds(process: Any, data: Mapping[str, Any]) -> Callable[..., Any]:
    """An image processor that makes no image far larger on its way than its numbers and the image's own ratio allow.

    Args:
        process: of transformers, takes `images`: one of [height, width, channels].
        data: its settings.

    Raises:
        ValueError: a number of them is too large.
        DatasetError: when it is called: this image would get too large.
    """
    if why := _too_large("", data):
        raise ValueError(why)

    def bounded(images: Any, **options: Any) -> Any:
        height, width = images.shape[:2]
        pixels = _on_the_way(process, width, height)
        if pixels > LARGEST_AREA:
            raise DatasetError(
                f"can't make an input of an image of {width:,} × {height:,} pixels",
                why=f"the model's processor would resize it to {pixels:,.0f}, by its shortest edge",
                mend="cut the image to a ratio that the model was trained on, or take it away",
            )
        return process(images=images, **options)

    return bounded


def _on_the_way(process: Any, width: int, height: int) -> float:
    """Pixels that an image is resized to before it is cropped, where its ratio decides."""
    size = dict(getattr(process, "size", None) or {})
    shortest, longest = size.get("shortest_edge"), size.get("longest_edge")
    if not shortest or getattr(process, "do_resize", True) is False:
        return 0
    side = shortest / (getattr(process, "crop_pct", None) or 1)
    pixels = float(side * side * max(width, height) / min(width, height))
    return min(pixels, float(longest * longest)) if longest else pixels


def _too_large(key: str, value: Any, depth: int = 0) -> str:
    """Which number of a processor's settings has an image take more memory than any image should; "" if none."""
    if depth > DEEPEST:
        return f"{key[:60]!a} is nested too deeply"
    if isinstance(value, Mapping):
        return next((why for name, each in value.items() if (why := _too_large(str(name), each, depth + 1))), "")
    if isinstance(value, list):
        return next((why for each in value if (why := _too_large(key, each, depth + 1))), "")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    most = LARGEST_AREA if key.endswith("pixels") else LARGEST_SIDE
    if not abs(value) <= most:
        return f"{key[:60]!a} is {str(value)[:30]}, over {most:,}"
    return f"{key[:60]!a} is {value}, under {SMALLEST_SHARE}" if key == "crop_pct" and value < SMALLEST_SHARE else ""
