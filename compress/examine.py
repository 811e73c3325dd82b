"""Looking into a model file or an artifact, without changing anything."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from compress.artifact import Artifact, Signature
from compress.checkpoint import load
from compress.model import OnnxModel, TorchModel, in_float32, sample_inputs
from compress.onnx_input import vetted_onnx
from compress.options import SourceOptions
from compress.roofline import Roofline, roofline
from compress.stages.onnx_from_torch import OnnxFromTorch

__all__ = ["Examined", "examine", "roofline_of"]


@dataclass(frozen=True)
class Examined:
    """What a file holds: the torch model, unless it is an artifact, and its roofline, if that was asked for."""

    signature: Signature
    model: TorchModel | None
    roofline: Roofline | None


def examine(checkpoint: Path, options: SourceOptions, *, roofs: bool = False, threads: int = 1) -> Examined:
    """Look into a model file or an artifact's folder.

    Raises:
        ToolkitError: it can't be read, or, for a roofline, not be exported.
    """
    if checkpoint.is_dir():
        artifact = Artifact.load(checkpoint)
        path = artifact.model_path.with_name("model.onnx") if artifact.format == "plan" else artifact.model_path
        found = roofline_of(vetted_onnx(path), artifact.signature, threads) if roofs else None
        return Examined(artifact.signature, None, found)
    model = load(checkpoint, inputs=options.input, model=options.model, trust=options.trust, sizes=options.size)
    if not roofs:
        return Examined(model.signature, model, None)
    with tempfile.TemporaryDirectory() as folder:
        exported = OnnxFromTorch().run(in_float32(model), Path(folder), lambda _done, _total, _note: None).model
        assert isinstance(exported, OnnxModel)  # noqa: S101  it is what the stage gives
        return Examined(model.signature, model, roofline_of(exported.path, exported.signature, threads))


def roofline_of(path: Path, signature: Signature, threads: int) -> Roofline:
    """An ONNX file's layers at batch 1 under this machine's roofs."""
    return roofline(path, sample_inputs(signature, 1), threads=threads)
