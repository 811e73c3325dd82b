"""Putting an artifact in its place, whole or not at all."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from compress import __version__
from compress.artifact import Artifact, sha256_of
from compress.errors import ArtifactError
from compress.latency import Latency
from compress.model import EngineModel, OnnxModel
from compress.report import Report

__all__ = ["beside_output", "check_output", "put_in_place", "write_artifact"]


def _restore(output: Path, old: Path) -> None:
    """Put the earlier artifact back where a swap that was cut short had moved it from."""
    if old.exists() and not output.exists():
        old.rename(output)


def check_output(output: Path, marker: str = "artifact.json", kind: str = "an artifact") -> None:
    """Refuse to replace what is no such folder; one that an earlier run had set aside is put back.

    Args:
        output: the folder.
        marker: a file that each such folder has.
        kind: what it is called.

    Raises:
        ArtifactError: there is something else.
    """
    _restore(output, output.with_name(output.name + ".old"))
    if output.is_file() or (output.is_dir() and any(output.iterdir()) and not (output / marker).exists()):
        raise ArtifactError(
            f"won't replace {output}",
            why="it is a file" if output.is_file() else f"it is a folder that holds something other than {kind}",
            mend="name a new folder with -o",
        )


def beside_output(output: Path) -> Path:
    """An empty folder beside the output, to be filled and put in its place."""
    beside = output.with_name(output.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def put_in_place(beside: Path, output: Path) -> None:
    """Swap a filled folder for what was there; if that fails, what was there stays."""
    old = output.with_name(output.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    try:
        if output.exists():
            output.rename(old)
        beside.rename(output)
    except BaseException:
        _restore(output, old)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_artifact(
    model: OnnxModel | EngineModel, output: Path, report: Report, timed: Mapping[str, Latency]
) -> Artifact:
    """Fill a folder beside the output, then swap the two.

    An engine's folder has the ONNX file that it was built from, too, and engine.json, what TensorRT says of it.
    """
    beside = beside_output(output)
    engine = isinstance(model, EngineModel)
    files = ("model.plan", "model.onnx", "engine.json", "model.plan.stripped") if engine else ("model.onnx",)
    for name in files:
        if (model.path.with_name(name)).exists():
            shutil.copyfile(model.path.with_name(name), beside / name)
    artifact = Artifact(
        folder=beside,
        model_file=files[0],
        format="plan" if engine else "onnx",
        sha256=sha256_of(beside / files[0]),
        signature=model.signature,
        stages=report.stages,
        toolkit_version=__version__,
    )
    artifact.save()
    report.write(beside, _thinned(timed))
    put_in_place(beside, output)
    return dataclasses.replace(artifact, folder=output)


def _thinned(timed: Mapping[str, Latency]) -> dict[str, Sequence[float]]:
    """At most about a thousand latencies of each, for the plot."""
    return {name: found.samples_ms[:: max(1, len(found.samples_ms) // 1000)] for name, found in timed.items()}
