"""Hooks around a network of images that came with its image processor, where the user gives none: files in."""

from __future__ import annotations

from pathlib import Path

from compress.artifact import Artifact
from compress.errors import HookError
from serve.hooks.image_settings import unlike
from serve.hooks.new import new_hooks
from serve.hooks.types import item_shape

__all__ = ["write_image_hooks"]

NAME = "image_hooks.py"
OTHERWISE = "or write hooks: `serve hooks new --task image-classification` makes a file to begin with"


def write_image_hooks(source: Artifact, folder: Path) -> Path:
    """Write the hooks that `serve hooks new` would, where the artifact says all that they need.

    Args:
        source: with its image processor's settings.
        folder: for the file.

    Raises:
        HookError: the network takes no images, or its processor is missing or does not say what it does.
    """
    processor = source.processor
    if processor is None or processor.kind != "image":
        mend = f"export the Hugging Face folder that has its preprocessor_config.json; {OTHERWISE}"
        raise _refused(source, "it came with no image processor", mend)
    path, otherwise = folder / NAME, OTHERWISE.removeprefix("or ")
    try:
        new_hooks("image-classification", source, path)
    except HookError as err:
        raise _refused(source, err.why, otherwise) from err
    shape = item_shape(source.signature.inputs[0], batched=source.signature.batched)
    shape = shape[-3:]
    if shape[0] != 3 or not all(isinstance(side, int) for side in shape):
        raise _refused(source, f"it takes {source.signature.inputs[0]}, not three channels of a fixed size", otherwise)
    if why := unlike(source, *map(int, shape)):
        raise _refused(source, why, otherwise)
    return path


def _refused(source: Artifact, why: str, mend: str) -> HookError:
    return HookError(f"can't serve the network of {source.folder} to images", why=why, mend=mend)
