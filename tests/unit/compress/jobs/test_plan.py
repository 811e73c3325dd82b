"""`--dry-run`: data by its name, what is kept from before as such, and time for all that is done."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import compress
from compress.jobs.plan import Cost, estimate, plan
from compress.model import sample_inputs
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.options import ExportOptions
from compress.prune.prune_channels import PruneChannels
from tests.families import family
from tests.unit.compress.prune.test_prune_channels import wrapped


@pytest.fixture
def made(tmp_path: Path) -> Path:
    module, inputs = family("mlp")
    compress.save(module, tmp_path / "model.pt", inputs=inputs)
    signature = compress.load(tmp_path / "model.pt").signature
    np.savez(tmp_path / "samples.npz", **sample_inputs(signature, 64))  # type: ignore[arg-type]
    return tmp_path


def told(checkpoint: Path, options: ExportOptions) -> list[str]:
    """The rows of the table."""
    console = Console(file=io.StringIO(), width=300)
    console.print(plan(checkpoint, options))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def row(lines: list[str], name: str) -> str:
    return next(line for line in lines if f" {name} " in line)


def test_data_is_told_by_its_name_and_no_hash_is_printed(made: Path) -> None:
    options = ExportOptions(
        output=made / "out", prune=0.3, int8="static", calibration=str(made / "samples.npz"), target_size_mb=None
    )
    lines = told(made / "model.pt", options)
    assert "calibration=samples.npz" in row(lines, "quantize_onnx")
    assert not re.search(r"[0-9a-f]{10}", "\n".join(lines))
    assert "to compare with" in row(lines, "original: onnx_from_torch, fold_onnx")


def test_a_budget_tells_what_it_searches_with_and_no_hash(made: Path) -> None:
    options = ExportOptions(
        output=made / "out", target_params=2000, calibration=str(made / "samples.npz"), int8="static"
    )
    lines = told(made / "model.pt", options)
    assert not re.search(r"[0-9a-f]{10}", "\n".join(lines))
    searched = row(lines, "prune_to_budget")
    assert "prune=(importance=magnitude, seed=0, scope=global, samples=samples.npz" in searched
    assert "tail=onnx_from_torch fold_onnx quantize_onnx" in searched


def test_stages_that_are_kept_cost_nothing(made: Path) -> None:
    options = ExportOptions(output=made / "out", prune=0.3)
    before = told(made / "model.pt", options)
    assert not any("kept from before" in line for line in before)
    compress.export(made / "model.pt", options)
    after = told(made / "model.pt", options)
    kept = [line for line in after if "kept from before" in line]
    assert len(kept) == 4, "the original's export, and the three stages"
    assert "kept" not in row(after, "compare, measure")
    other = told(made / "model.pt", ExportOptions(output=made / "out", prune=0.4))
    assert "kept" in row(other, "original: onnx_from_torch, fold_onnx")
    assert "kept" not in row(other, "prune_channels")


def test_the_estimate_grows_with_what_is_asked_for() -> None:
    module, inputs = family("mlp")
    model, fold = wrapped(module, *inputs), FoldOnnx()
    plain = estimate(model, [OnnxFromTorch(), fold], 0)
    assert plain[1][2] == 0, "it is the original's own"
    pruned = estimate(model, [PruneChannels(0.5), OnnxFromTorch(), fold], 0)
    assert sum(took for *_, took, _ in pruned) > sum(took for *_, took, _ in plain)
    judged = estimate(model, [OnnxFromTorch(), fold], 10**9)
    assert judged[-1][2] > plain[-1][2]
    assert "1,000,000,000 samples each" in judged[-1][1]
    assert Cost(1, 2, 3).of(0.5, 2) == 8
