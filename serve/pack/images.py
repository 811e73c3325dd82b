"""Hooks around a network of images that came with its image processor, where the user gives none: files in."""

from __future__ import annotations

from pathlib import Path

from compress.artifact import Artifact
from compress.errors import HookError
from serve.hooks.new import UNKNOWN, new_hooks

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
    path = folder / NAME
    try:
        new_hooks("image-classification", source, path)
    except HookError as err:
        raise _refused(source, err.why, OTHERWISE.removeprefix("or ")) from err
    if UNKNOWN["MEAN, STD"] in path.read_text(encoding="utf-8"):
        why = "its preprocessor_config.json does not say how values are scaled (image_mean, image_std, rescale_factor)"
        raise _refused(source, why, OTHERWISE.removeprefix("or "))
    return path


def _refused(source: Artifact, why: str, mend: str) -> HookError:
    return HookError(f"can't serve the network of {source.folder} to images", why=why, mend=mend)
