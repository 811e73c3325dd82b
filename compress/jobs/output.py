"""Putting what a run gives in its place, whole or not at all."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from compress import __version__
from compress.artifact import PROCESSOR, Artifact, Signature, sha256_of
from compress.errors import StageError
from compress.formats.files import files_of, size_of
from compress.formats.onnx.outline import outline
from compress.model import EngineModel, Model, OnnxModel, TorchModel, weight_bytes
from compress.onnx_export.file import MOST
from compress.processor import Processor
from compress.report.export import Report
from compress.runtime.latency import Latency
from compress.stage import Stage
from compress.vetting.swap import replacing_folder

__all__ = ["refuse_too_large", "write_artifact"]

SMALLER = (
    "drop_blocks", "prune_channels", "prune_to_budget", "quantize_onnx", "quantize_within", "quantize_faster",
    "quantize_int4", "train_quantized", "half_onnx",
)  # fmt: skip


def refuse_too_large(model: Model, stages: Sequence[Stage]) -> None:
    """Refuse, before any work, a model that no stage makes small enough for the one file of an artifact.

    Raises:
        StageError: it has more bytes than that holds.
    """
    if not any(stage.name in SMALLER for stage in stages):
        size = weight_bytes(model.module) if isinstance(model, TorchModel) else size_of(model.path)
        _refuse_more_than_fits(size)


def _refuse_more_than_fits(size: int, *, apart: bool = False) -> None:
    """Refuse so many bytes, or weights that lie beside the file already."""
    if size > MOST or apart:
        raise StageError(
            "won't write an artifact: the model is too large for its file",
            why=f"it has {size / 1e9:.1f} GB of weights, and an ONNX file holds {MOST / 1e9:.1f}",
            mend="ask for --int8 dynamic, --precision bf16 or fp16, or --int4 weights; or for more --prune",
        )


def write_artifact(
    model: OnnxModel | EngineModel,
    output: Path,
    report: Report,
    timed: Mapping[str, Latency],
    processor: Processor | None = None,
) -> Artifact:
    """Fill a folder beside the output, then swap the two.

    An engine's folder has the ONNX file that it was built from, too, and engine.json, what TensorRT says of it. What
    makes inputs of texts or images is copied into the folder `processor`.

    Raises:
        StageError: the file's outputs are of other types than the signature says, or it is too large.
    """
    if isinstance(model, OnnxModel):
        _refuse_more_than_fits(size_of(model.path), apart=len(files_of(model.path)) > 1)
    _refuse_other_types(model.path.with_name("model.onnx"), model.signature)
    engine = isinstance(model, EngineModel)
    files = ("model.plan", "model.onnx", "engine.json", "model.plan.stripped") if engine else ("model.onnx",)
    with replacing_folder(output) as beside:
        for name in files:
            if (model.path.with_name(name)).exists():
                shutil.copyfile(model.path.with_name(name), beside / name)
        if processor is not None:
            processor = _copied(processor, beside / PROCESSOR)
        artifact = Artifact(
            folder=beside,
            model_file=files[0],
            format="plan" if engine else "onnx",
            sha256=sha256_of(beside / files[0]),
            signature=model.signature,
            stages=report.stages,
            toolkit_version=__version__,
            runtime="onnxruntime" if report.serving is None else report.serving.runtime,
            processor=processor,
            compared=_compared(report),
        )
        artifact.save()
        report.write(beside, _thinned(timed))
    if processor is not None:
        processor = dataclasses.replace(processor, folder=output / PROCESSOR)
    return dataclasses.replace(artifact, folder=output, processor=processor)


def _compared(report: Report) -> dict[str, tuple[int, ...]]:
    """At which sizes OpenVINO may be believed."""
    if report.serving is None or report.serving.doubtful:
        return {}
    return {dim: tuple(sizes) for dim, sizes in report.serving.compared.items()}


def _refuse_other_types(path: Path, signature: Signature) -> None:
    """What serves the file reads the types of its answers in the signature."""
    for value, spec in zip(outline(path).graph.output, signature.outputs, strict=True):
        kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)).name
        if kind != spec.dtype:
            raise StageError(
                f"won't write {path.name}",
                why=f"its output {value.name!r} is {kind}, and the signature says {spec.dtype}",
                mend="report this model, and say what it was made of",
            )


def _copied(processor: Processor, folder: Path) -> Processor:
    """Its files as they are now: they were hashed when the model was loaded."""
    folder.mkdir()
    for name in processor.files:
        shutil.copyfile(processor.folder / name, folder / name)
    return dataclasses.replace(
        processor, files={name: sha256_of(folder / name) for name in processor.files}, folder=folder
    )


def _thinned(timed: Mapping[str, Latency]) -> dict[str, Sequence[float]]:
    """At most about a thousand latencies of each, for the plot."""
    return {name: found.samples_ms[:: max(1, len(found.samples_ms) // 1000)] for name, found in timed.items()}
