"""The model that a command's first argument names, with what its options say of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from compress.artifact import Artifact
from compress.formats.checkpoint import load
from compress.formats.hub.folder import is_hub_folder, open_hub_folder
from compress.formats.onnx import load as onnx_files
from compress.model import TorchModel, in_float32
from compress.options import SourceOptions
from compress.processor import Columns, Processor

__all__ = ["files_of", "load_source", "read_by", "size_of"]


def load_source(path: Path, options: SourceOptions, *, as_it_is: bool = False) -> TorchModel:
    """A model of float32, whose processor knows the columns that data is read from.

    Args:
        path: any file or folder of a model of torch.
        options: that say how.
        as_it_is: leave one in half precision, which the stages don't compute with.

    Raises:
        ToolkitError: it can't be read.
    """
    model = load(
        path, inputs=options.input, model=options.model, trust=options.trust, sizes=options.size, part=options.part
    )
    model = model if as_it_is else in_float32(model)
    return dataclasses.replace(model, processor=read_by(model, options))


def read_by(model: TorchModel | Artifact, options: SourceOptions) -> Processor | None:
    """What makes inputs of texts and images, with the columns that it is to read; None where the model has none."""
    columns = Columns(options.text_column, options.text_pair_column, options.label_column)
    return None if model.processor is None else dataclasses.replace(model.processor, columns=columns)


def size_of(path: Path) -> int:
    """Bytes of a model file, and of weights beside an ONNX file; of a Hugging Face folder those of its weights."""
    if onnx_files.is_onnx(path):
        return onnx_files.size_of(path)
    files = open_hub_folder(path).weights if is_hub_folder(path) else (path,)
    return sum(file.stat().st_size for file in files)


def files_of(path: Path) -> list[Path]:
    """What decides a model: the file, and weights beside it, or of a Hugging Face folder all that lies in it."""
    if onnx_files.is_onnx(path):
        return [path, *onnx_files.beside(path)]
    return sorted(each for each in path.rglob("*") if each.is_file()) if is_hub_folder(path) else [path]
