"""The model that a command starts from, of whatever kind its file is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from compress.errors import RecipeError
from compress.formats.checkpoint import fingerprint_of_module, load
from compress.formats.onnx.load import fingerprint_of_file, is_onnx, load_onnx
from compress.model import OnnxModel, TorchModel, in_float32
from compress.options import ExportOptions, OptimizeOptions, SourceOptions
from compress.signature import parse_sizes

__all__ = ["Original", "fingerprint_of", "original", "tried"]

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
    model = load(checkpoint, inputs=options.input, model=options.model, trust=options.trust, sizes=options.size)
    return model if as_it_is else in_float32(model)


def tried(options: OptimizeOptions, model: Original) -> OptimizeOptions:
    """What a search tries: of an ONNX file precisions alone, since no channel is cut out of it."""
    return options if isinstance(model, TorchModel) else dataclasses.replace(options, prune=(0.0,))


def fingerprint_of(model: Original) -> str:
    """Hex SHA-256 of what is in the file: weights and graph."""
    return fingerprint_of_file(model.path) if isinstance(model, OnnxModel) else fingerprint_of_module(model)


def _refuse(checkpoint: Path, options: SourceOptions) -> None:
    """Options that are for models of torch."""
    given = [flag for flag, value in (("--input", options.input), ("--model", options.model)) if value]
    if given:
        raise RecipeError(
            f"{given[0]} is given, and {checkpoint} is an ONNX file",
            why="an ONNX file says itself what it computes and what it takes",
            mend=f"leave {given[0]} out; --size says what is usual for a dimension that varies",
        )
    goals: dict[str, object] = {}
    if isinstance(options, ExportOptions):
        goals = {
            "--prune": options.prune, "--target-latency-ms": options.target_latency_ms,
            "--target-size-mb": options.target_size_mb, "--target-params": options.target_params,
            "--finetune": options.finetune, "--int8 qat": options.int8 == "qat" or None,
        }  # fmt: skip
    elif isinstance(options, OptimizeOptions):
        chosen = any(options.prune) and options.prune != OptimizeOptions.prune
        goals = {"--prune": options.prune if chosen else None, "--finetune": options.finetune}
    asked = [flag for flag, value in goals.items() if value is not None]
    if asked:
        raise RecipeError(
            f"can't do {asked[0]} with {checkpoint}",
            why="it takes a network of torch, to cut channels out of it or to train it, and this is an ONNX file",
            mend=f"leave {' and '.join(asked)} out, or start from the torch model that the file was made of",
        )
