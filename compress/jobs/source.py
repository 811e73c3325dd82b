"""The model that a command's first argument names, with what its options say of it."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

from google.protobuf.message import DecodeError

from compress.artifact import Artifact
from compress.console.wording import AssumedWarning
from compress.errors import CheckpointError, ToolkitError
from compress.formats.checkpoint import load
from compress.formats.hub.folder import ADAPTER, is_hub_folder, weights_elsewhere
from compress.formats.onnx.load import is_onnx, load_onnx
from compress.model import TorchModel, in_float32
from compress.onnx_export.torch_from_onnx import taken_back
from compress.options import SourceOptions
from compress.processor import Columns, Processor
from compress.signature import parse_sizes
from compress.tokenizer.type_ids import NAME as TYPES

__all__ = ["DAMAGED", "load_source", "read_by", "refuse_folder"]

# What a file that can't be read raises, where others tell of that.
DAMAGED = (ToolkitError, OSError, ValueError, DecodeError)

# What `compress finetune` writes into its folder, and how each is named to a command.
HELD = {"model.pt": "", "weights.pt": ", with the factory of its module: --model package.module:factory"}


def load_source(path: Path, options: SourceOptions, *, as_it_is: bool = False) -> TorchModel:
    """A model of float32, whose processor knows the columns that data is read from.

    Args:
        path: any file or folder of a model of torch.
        options: that say how.
        as_it_is: leave one in half precision, which the stages don't compute with.

    Raises:
        ToolkitError: it can't be read.
    """
    refuse_folder(path)
    if is_onnx(path) and options.pooling is None:
        return taken_back(load_onnx(path, parse_sizes(options.size)))
    model = load(
        path, inputs=options.input, model=options.model, trust=options.trust, sizes=options.size, part=options.part,
        pooling=options.pooling, pairs=options.text_pair_column is not None,
    )  # fmt: skip
    model = model if as_it_is else in_float32(model)
    return dataclasses.replace(model, processor=read_by(model, options))


def refuse_folder(path: Path) -> None:
    """Refuse the folder of a training, of an adapter, or of weights alone, by what is meant or what is missing.

    Raises:
        CheckpointError: it is such a folder, and neither an artifact nor one of Hugging Face's.
    """
    if not path.is_dir() or is_hub_folder(path) or (path / "artifact.json").is_file():
        return
    for name, how in HELD.items():
        if (path / name).is_file():
            raise CheckpointError(
                f"{path} is a folder, and no model by itself",
                why=f"its model is the file {name} in it",
                mend=f"give {path / name}{how}",
            )
    if (path / ADAPTER).is_file():
        raise CheckpointError(
            f"{path} is an adapter (LoRA and its like), and no model by itself",
            why=f"{ADAPTER} says so: it changes another model's weights, which are not in the folder",
            mend="load both with peft, write model.merge_and_unload().save_pretrained(folder), and name that folder",
        )
    if elsewhere := weights_elsewhere(path):
        raise CheckpointError(f"{path} is a folder, and no model by itself", why=elsewhere[0], mend=elsewhere[1])
    weights = sorted(each.name for each in path.glob("*") if each.suffix in (".safetensors", ".bin"))
    if weights:
        raise CheckpointError(
            f"{path} is not whole",
            why=f"there are weights in it ({weights[0]}), and no config.json that says of what network",
            mend="put the config.json of the model beside them; or write --model package.module:factory and --input, "
            f"and name {path / weights[0]}",
        )


def read_by(model: TorchModel | Artifact, options: SourceOptions) -> Processor | None:
    """What makes inputs of texts and images, with the columns that it is to read; None where the model has none."""
    columns = Columns(options.text_column, options.text_pair_column, options.label_column)
    if model.processor is None:
        return None
    read = dataclasses.replace(model.processor, columns=columns)
    if read.joined and read.kind == "text" and _knows_one(model):
        told = (
            f"--text-pair-column: the model takes no {TYPES}, so a second text differs from a first by what stands "
            "between them alone. If it was trained with them, begin with its Hugging Face folder and this option"
        )
        warnings.warn(told, AssumedWarning, stacklevel=3)
    return read


def _knows_one(model: TorchModel | Artifact) -> bool:
    """Whether it takes no types of texts, and may know them none the less: a classifier takes what it knows."""
    given = {spec.name for spec in model.signature.inputs}
    return model.processor is not None and model.processor.task != "sequence-classification" and TYPES not in given
