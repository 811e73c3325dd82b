"""The main job: load, prune, finetune, export, quantize, measure, report; all or nothing."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from compress import __version__
from compress.artifact import Artifact, sha256_of
from compress.checkpoint import fingerprint, load
from compress.dataset import Dataset
from compress.errors import ArtifactError
from compress.findings import findings
from compress.machine import environment, versions
from compress.measure import Latency
from compress.model import Model, OnnxModel
from compress.options import ExportOptions
from compress.pipeline import Outcome, Watcher, check, run
from compress.prove import measure, row, row_of
from compress.recipe import find_data, stages_for
from compress.report import Report
from compress.stages import Progress
from compress.stages.fold_onnx import FoldOnnx
from compress.stages.onnx_from_torch import OnnxFromTorch

__all__ = ["export"]


class Silent:
    """A watcher that shows nothing."""

    def started(self, stage: str) -> Progress:  # noqa: ARG002
        return lambda _done, _total, _note: None

    def ended(self, outcome: Outcome) -> None:
        """Nothing to show."""


def export(
    checkpoint: str | Path, options: ExportOptions, *, watcher: Watcher | None = None
) -> tuple[Artifact, Report]:
    """Take a model file to a measured ONNX artifact.

    Args:
        checkpoint: any file that `compress.load` reads.
        options: what to do to it.
        watcher: is told of each stage; by default nobody is.

    Returns:
        The artifact, with model.onnx, artifact.json, report.json and report.html in its folder, and the report.

    Raises:
        ToolkitError: input that can't be used; an artifact that was there before is left as it was.
    """
    checkpoint = Path(checkpoint)
    watcher = watcher or Silent()
    _check_output(options.output)
    model = load(checkpoint, inputs=options.input, model=options.model, trust_pickle=options.trust_pickle)
    stages = stages_for(options, model, checkpoint)
    data = None if options.eval is None else Dataset.open(find_data(options.eval, checkpoint), model.signature)
    check(stages, model)
    work = options.work or options.output.with_name(options.output.name + ".work")
    source = fingerprint(model) + json.dumps(versions())  # another release may give another output
    baseline = run(
        [OnnxFromTorch(), FoldOnnx()], model, work=work / "original", source=source, watcher=_Renamed(watcher)
    )
    outcomes = run(stages, model, work=work, source=source, watcher=watcher)
    rows: dict[str, Model] = {"original": model, "original_onnx": baseline[-1].given.model}
    rows |= {outcome.stage.name: outcome.given.model for outcome in outcomes}
    compared, timed = measure(rows, data, options.threads, watcher)
    reports = [
        row("original", "as it was given", model, compared, timed, checkpoint.stat().st_size),
        row(
            "original_onnx",
            "exported as it is, to compare sizes and speed with",
            baseline[-1].given.model,
            compared,
            timed,
        ),
    ]
    reports += [row_of(outcome, compared, timed) for outcome in outcomes]
    report = Report(
        command=" ".join(["compress", *sys.argv[1:]]) if Path(sys.argv[0]).stem in ("compress", "__main__") else "",
        source=str(checkpoint),
        signature=model.signature,
        environment=environment(options.threads),
        data={"samples": 0 if data is None else len(data), "sha256": "" if data is None else data.sha256},
        stages=tuple(reports),
        findings=findings(reports),
    )
    final = outcomes[-1].given.model
    assert isinstance(final, OnnxModel)  # noqa: S101  the recipe ends in ONNX stages
    return _write(final, options.output, report, timed), report


class _Renamed:
    """Tells a watcher of the original's own export under names that tell it apart."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def started(self, stage: str) -> Progress:
        return self._watcher.started(f"original: {stage}")

    def ended(self, outcome: Outcome) -> None:
        self._watcher.ended(outcome)


def _restore(output: Path, old: Path) -> None:
    """Put the earlier artifact back where a swap that was cut short had moved it from."""
    if old.exists() and not output.exists():
        old.rename(output)


def _check_output(output: Path) -> None:
    _restore(output, output.with_name(output.name + ".old"))
    if output.is_file() or (output.is_dir() and any(output.iterdir()) and not (output / "artifact.json").exists()):
        raise ArtifactError(
            f"won't replace {output}",
            why="it is a file" if output.is_file() else "it is a folder that holds something other than an artifact",
            mend="name a new folder with -o",
        )


def _write(model: OnnxModel, output: Path, report: Report, timed: Mapping[str, Latency]) -> Artifact:
    """Fill a folder beside the output, then swap the two."""
    beside = output.with_name(output.name + ".part")
    old = output.with_name(output.name + ".old")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    shutil.copyfile(model.path, beside / "model.onnx")
    artifact = Artifact(
        folder=beside,
        model_file="model.onnx",
        format="onnx",
        sha256=sha256_of(beside / "model.onnx"),
        signature=model.signature,
        stages=report.stages,
        toolkit_version=__version__,
    )
    artifact.save()
    report.write(beside, _thinned(timed))
    shutil.rmtree(old, ignore_errors=True)
    try:
        if output.exists():
            output.rename(old)
        beside.rename(output)
    except BaseException:
        _restore(output, old)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return dataclasses.replace(artifact, folder=output)


def _thinned(timed: Mapping[str, Latency]) -> dict[str, Sequence[float]]:
    """At most about a thousand latencies of each, for the plot."""
    return {name: found.samples_ms[:: max(1, len(found.samples_ms) // 1000)] for name, found in timed.items()}
