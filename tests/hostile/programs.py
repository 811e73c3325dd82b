"""What is run over changed files: the two command lines, and parts of long commands that read files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compress.cli import main as compress_main
from compress.jobs.running import run_to_end
from serve.cli.main import main as serve_main

__all__ = ["PROGRAMS", "resume"]


def _prune(arguments: list[str]) -> None:
    """As `compress export MODEL --prune 0.3 --sensitivity FILE` does before it measures."""
    from compress.formats.checkpoint import load
    from compress.prune.prune_channels import PruneChannels
    from compress.prune.sensitivity import Sensitivity

    def command() -> None:
        found = Sensitivity.load(Path(arguments[1]))
        print(found.limits(1.0), found.columns, *found.warnings, *found.notes)
        stage = PruneChannels(0.3, curves=found.curves)
        model = load(arguments[0])
        stage.check(model)
        with tempfile.TemporaryDirectory() as folder:
            print(stage.run(model, Path(folder), lambda *_: None).did)

    run_to_end(command, resumes=False)


def resume(arguments: list[str]) -> None:
    """As `compress export` that goes on in a work folder, and writes what its stages say."""
    from compress.artifact import Artifact, Measured, StageReport, sha256_of
    from compress.formats.checkpoint import load
    from compress.jobs.export import Silent
    from compress.onnx_export.fold import FoldOnnx
    from compress.onnx_export.from_torch import OnnxFromTorch
    from compress.pipeline import run
    from compress.prune.prune_channels import PruneChannels
    from tests.hostile.torch_cases import native_file

    work, out = map(Path, arguments)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "good.pt").write_bytes(native_file(0)[0])
        model = load(Path(folder) / "good.pt")

    def command() -> None:
        stages: list[Any] = [PruneChannels(0.3), OnnxFromTorch(), FoldOnnx()]
        outcomes = run(stages, model, work=work, source="s", watcher=Silent())
        out.mkdir(exist_ok=True)
        rows = []
        for outcome in outcomes:
            given = outcome.given
            print(f"{outcome.stage.name}: {given.did}, {outcome.seconds:.1f} s")
            rows.append(StageReport(outcome.stage.name, given.did, Measured(size_bytes=outcome.size_bytes), outcome.seconds,
                                    given.warnings, given.details, outcome.stage.options))  # fmt: skip
        last = outcomes[-1].given.model
        (out / "model.onnx").write_bytes(last.path.read_bytes())  # type: ignore[union-attr]
        Artifact(out, "model.onnx", "onnx", sha256_of(out / "model.onnx"), last.signature, tuple(rows), "0").save()
        Artifact.load(out)

    run_to_end(command, resumes=False)


PROGRAMS: dict[str, Callable[[list[str]], Any]] = {
    "compress": compress_main, "serve": serve_main, "prune": _prune, "resume": resume,
}  # fmt: skip
