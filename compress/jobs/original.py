"""The model that a command starts from, of whatever kind its file is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from compress.errors import RecipeError, StageError
from compress.formats.identity import fingerprint_of_module, unknown_of
from compress.formats.onnx.load import fingerprint_of_file, is_onnx, load_onnx
from compress.jobs.source import load_source
from compress.jobs.timed_on import multiplies_bf16
from compress.model import OnnxModel, TorchModel
from compress.onnx_export.torch_from_onnx import taken_back
from compress.options import OptimizeOptions, SourceOptions
from compress.signature import parse_sizes

__all__ = ["Original", "fingerprint_of", "known_by", "original", "tried"]

Original = TorchModel | OnnxModel


def original(checkpoint: Path, options: SourceOptions, *, as_it_is: bool = False) -> Original:
    """Load a model file: one of torch, or an ONNX file, which is taken as it is.

    Args:
        checkpoint: of any kind.
        options: that say how.
        as_it_is: leave one of torch in half precision, which the stages don't compute with.

    Raises:
        ToolkitError: it can't be read, or not with these options.
    """
    if is_onnx(checkpoint):
        _refuse(checkpoint, options)
        return load_onnx(checkpoint, parse_sizes(options.size))
    return load_source(checkpoint, options, as_it_is=as_it_is)


def tried(options: OptimizeOptions, model: Original) -> OptimizeOptions:
    """What a search tries where nobody says: BF16 where this machine multiplies it, no pruning where no layers are.

    It is settled here, once: machines that make candidates may have other CPUs.
    """
    if not options.precision:
        options = dataclasses.replace(options, precision=("fp32", "bf16") if multiplies_bf16(options) else ("fp32",))
    if isinstance(model, TorchModel) or options.prune != OptimizeOptions.prune or options.finetune is not None:
        return options
    try:
        taken_back(model)
    except StageError:
        return dataclasses.replace(options, prune=(0.0,))
    return options


def fingerprint_of(model: Original) -> str:
    """Hex SHA-256 of what is in the file: weights and graph."""
    return fingerprint_of_file(model.path) if isinstance(model, OnnxModel) else fingerprint_of_module(model)


def known_by(model: Original) -> str:
    """`fingerprint_of` a model that a file can name; "" where it has none that lasts."""
    return "" if not isinstance(model, OnnxModel) and unknown_of(model) else fingerprint_of(model)


def _refuse(checkpoint: Path, options: SourceOptions) -> None:
    """Options that are for models of torch."""
    given = [flag for flag, value in (("--input", options.input), ("--model", options.model)) if value]
    if given:
        raise RecipeError(
            f"{given[0]} is given, and {checkpoint} is an ONNX file",
            why="an ONNX file says itself what it computes and what it takes",
            mend=f"leave {given[0]} out; --size says what is usual for a dimension that varies",
        )
