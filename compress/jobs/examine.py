"""Looking into a model file or an artifact, without changing anything."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.artifact import Artifact, Measured, Signature
from compress.console.durations import bytes_text, ms_text
from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.data.sizes import call_size, typical_inputs
from compress.errors import printable
from compress.evaluate.gains import drop_told
from compress.evaluate.intervals import percent
from compress.formats.files import size_of
from compress.formats.hub.folder import is_hub_folder
from compress.formats.onnx.outline import outline
from compress.formats.onnx.read import vetted_onnx
from compress.formats.onnx.scope import opset_of
from compress.jobs.original import original
from compress.jobs.source import refuse_folder
from compress.model import OnnxModel, TorchModel, in_float32
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.options import SourceOptions
from compress.runtime.roofline import Roofline, roofline
from compress.vetting.texts import read_json

__all__ = ["Examined", "examine", "kind_of_file", "next_of", "roofline_of", "told_of"]


@dataclass(frozen=True)
class Examined:
    """What a file holds: the torch model, the ONNX file or the artifact, and its roofline, if that was asked for."""

    signature: Signature
    model: TorchModel | OnnxModel | None
    roofline: Roofline | None
    artifact: Artifact | None = None


def examine(checkpoint: Path, options: SourceOptions, *, roofs: bool = False, threads: int = 1) -> Examined:
    """Look into a model file or an artifact's folder.

    Raises:
        ToolkitError: it can't be read, or, for a roofline, not be exported.
    """
    refuse_folder(checkpoint)
    if checkpoint.is_dir() and not is_hub_folder(checkpoint):
        artifact = Artifact.load(checkpoint)
        path = artifact.model_path.with_name("model.onnx") if artifact.format == "plan" else artifact.model_path
        found = roofline_of(vetted_onnx(path), artifact.signature, threads) if roofs else None
        return Examined(artifact.signature, None, found, artifact)
    model = original(checkpoint, options, as_it_is=True)
    if not roofs:
        return Examined(model.signature, model, None)
    if isinstance(model, OnnxModel):
        return Examined(model.signature, model, roofline_of(model.path, model.signature, threads))
    with tempfile.TemporaryDirectory() as folder:
        exported = OnnxFromTorch().run(in_float32(model), Path(folder), lambda _done, _total, _note: None).model
        assert isinstance(exported, OnnxModel)  # noqa: S101  it is what the stage gives
        return Examined(model.signature, model, roofline_of(exported.path, exported.signature, threads))


def roofline_of(
    path: Path, signature: Signature, threads: int, *, data: Dataset | None = None, follows: bool = False
) -> Roofline:
    """An ONNX file's layers at batch 1 under this machine's roofs; `follows` as in `roofline`."""
    return roofline(path, typical_inputs(signature, data, 1), threads=threads, follows=follows)


def kind_of_file(model: OnnxModel) -> str:
    """What an ONNX file is, in words: its opset, what wrote it, and its size."""
    graph = outline(model.path)
    by = " ".join(part for part in (graph.producer_name, graph.producer_version) if part)
    told = f"ONNX file of opset {opset_of(graph)}{', by ' + by if by else ''}, {bytes_text(size_of(model.path))}"
    return _shown(told)


def told_of(artifact: Artifact) -> dict[str, str]:
    """An artifact in words, by what is told: what it is, from what, what was done, what it is worth, how to go on.

    What was not measured is left out.
    """
    rows = {row.stage: row for row in artifact.stages}
    report = _report(artifact.folder)
    done = [row for row in artifact.stages if row.stage not in ("original", "original_onnx")]
    size = artifact.model_path.stat().st_size  # all of it: weights beside are refused
    told = {
        "kind": f"artifact of compress {artifact.toolkit_version}: {artifact.model_file}, {bytes_text(size)}, "
        f"sha256 {artifact.sha256[:12]}…",
        "from": str(report.get("source", "")),
        "target": next((str(row.options["target"]) for row in reversed(done) if "target" in row.options), ""),
        "stages": f"\n{' ' * 9}".join(f"{row.stage}: {row.did}" for row in done),
    }
    if done:
        last = done[-1].measured
        original, onnx = (rows[name].measured if name in rows else Measured() for name in ("original", "original_onnx"))
        told |= {
            "metric": _metric(last, original, report),
            "latency": _latency(last, original, onnx, report, call_size(artifact.signature)),
            "size": _sizes(size, original, onnx),
            "params": "" if last.params is None else f"{last.params:,}",
            "MACs": "" if last.macs is None else f"{last.macs:,}",
        }
    return {name: _shown(text) for name, text in told.items() if text}


def _shown(text: str) -> str:
    """Without what would steer a terminal: the artifact may be anybody's."""
    return printable(text, keep="\n")


def next_of(artifact: Artifact) -> tuple[str, ...]:
    """Commands and files to go on with."""
    folder = shlex.quote(str(artifact.folder))
    there = [name for name in ("report.html", "reproduce.sh") if (artifact.folder / name).is_file()]
    return (
        f"serve pack {folder} --repository model_repository --name NAME",
        f"compress measure {folder}",
        *(f"see {artifact.folder / name}" for name in there),
    )


def _report(folder: Path) -> dict[str, Any]:
    """report.json, which an artifact need not have."""
    try:
        found = read_json(folder / "report.json")
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _part(report: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = report.get(name)
    return found if isinstance(found, Mapping) else {}


def _metric(last: Measured, original: Measured, report: Mapping[str, Any]) -> str:
    if last.value is None:
        return "not measured: it was made without --eval"
    told = f"{last.metric} {last.value:.4f}"
    told += "" if original.value is None else f", of the original {original.value:.4f}"
    if last.drop is not None:
        told += f"; {drop_told(last.drop, last.drop_low, last.drop_high, metric=last.metric, scale=last.metric_scale)}"
    judged = _part(report, "evaluation")
    if isinstance(judged.get("samples"), int) and isinstance(judged.get("confidence"), float):
        told += f", {counted(judged['samples'], 'samples')}, {percent(judged['confidence'])} confidence"
    return told


def _latency(last: Measured, original: Measured, onnx: Measured, report: Mapping[str, Any], batch: int) -> str:
    if last.latency_p50_ms is None:
        return "not measured here"
    first = "original in torch" if onnx.latency_p50_ms is not None else "original"
    others = [
        f"{words} {ms_text(row.latency_p50_ms)} ms"
        for words, row in ((first, original), ("in ONNX Runtime", onnx))
        if row.latency_p50_ms is not None
    ]
    where = _part(report, "environment")
    on = f", on {where['cpu']}" if "cpu" in where else ""
    told = f"p50 {ms_text(last.latency_p50_ms)} ms at batch {batch} in {last.runtime}{on}"
    return told + (f" ({', '.join(others)})" if others else "")


def _sizes(size: int, original: Measured, onnx: Measured) -> str:
    others = [
        f"{words} {bytes_text(row.size_bytes)}"
        for words, row in (("original", original), ("as ONNX", onnx))
        if row.size_bytes is not None
    ]
    return bytes_text(size) + (f" ({', '.join(others)})" if others else "")
