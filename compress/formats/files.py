"""What a model on disk is made of, whatever its kind: the one place that tells its files and their bytes."""

from __future__ import annotations

from pathlib import Path

from compress.formats.hub.folder import is_hub_folder, open_hub_folder
from compress.formats.onnx.load import beside, is_onnx
from compress.processor import FILES

__all__ = ["files_of", "read_of", "size_of"]


def size_of(path: Path) -> int:
    """Bytes of a model file, and of weights beside an ONNX file; of a Hugging Face folder those of its weights.

    Raises:
        OSError, ValueError: it can't be read, or is a damaged ONNX file.
    """
    files = open_hub_folder(path).weights if is_hub_folder(path) else files_of(path)
    return sum(file.stat().st_size for file in files)


def files_of(path: Path) -> list[Path]:
    """What decides a model: the file, and weights beside it, or of a Hugging Face folder all that lies in it.

    Raises:
        OSError, ValueError: it can't be read, or is a damaged ONNX file.
    """
    if is_hub_folder(path):
        return sorted(each for each in path.rglob("*") if each.is_file())
    return [path, *(beside(path) if is_onnx(path) else ())]


def read_of(path: Path) -> list[Path]:
    """Those of a model's files that are read: of a folder, weights and what it says of them, not logs beside these.

    Raises:
        OSError, ValueError, ToolkitError: it can't be read, or is damaged.
    """
    if is_hub_folder(path):
        found = {*open_hub_folder(path).weights, *path.rglob("*.json")}
        return sorted(found | {each for name in FILES for each in path.rglob(name)})
    return sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else files_of(path)
