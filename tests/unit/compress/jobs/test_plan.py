"""`--dry-run`: data by its name, what is kept from before as such, and time for all that is done."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import compress
from compress.errors import StageError
from compress.jobs.export import Silent
from compress.jobs.plan import Estimate, estimates, plan
from compress.model import sample_inputs
from compress.options import ExportOptions
from tests.families import family


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
    other = told(made / "model.pt", ExportOptions(output=made / "out", prune=0.38))
    assert "kept" in row(other, "original: onnx_from_torch, fold_onnx")
    assert "kept" not in row(other, "prune_channels")


@pytest.mark.parametrize(
    ("asked", "stages"),
    [
        ({"int8": "dynamic", "batches": (1, 4)}, ["onnx_from_torch", "fold_onnx", "quantize_onnx"]),
        ({"int8": "auto"}, ["onnx_from_torch", "fold_onnx", "quantize_faster"]),
        (
            {"int8": "auto", "calibration": "samples.npz", "eval": "samples.npz", "max_drop": 100.0},
            ["onnx_from_torch", "fold_onnx", "quantize_within"],
        ),
        (
            {"int8": "static", "calibration": "samples.npz", "smooth": True, "precision": "fp16", "target": "cuda"},
            ["onnx_from_torch", "fold_onnx", "smooth_onnx", "quantize_onnx", "half_onnx"],
        ),
        (
            {"int8": "qat", "calibration": "samples.npz", "finetune": "samples.npz", "hold_out": 0.2, "epochs": 10_000},
            ["finetune", "train_quantized", "onnx_from_torch", "fold_onnx", "quantize_onnx"],
        ),
        ({"target_size_mb": 0.004}, ["prune_to_budget", "onnx_from_torch", "fold_onnx"]),
        ({"target_size_mb": 100.0}, ["prune_to_budget", "onnx_from_torch", "fold_onnx"]),
        (
            {"prune": 0.5, "rounds": 2, "finetune": "samples.npz", "epochs": 10_000, "batch_size": "auto"},
            ["prune_channels", "finetune"] * 2 + ["onnx_from_torch", "fold_onnx"],
        ),
    ],
    ids=str,
)
def test_every_stage_is_tried_and_nothing_is_written(made: Path, asked: dict[str, Any], stages: list[str]) -> None:
    before = sorted(made.rglob("*"))
    rows, _ = estimates(made / "model.pt", ExportOptions(output=made / "out", **asked), Silent())
    assert [row.name for row in rows[2:-1]] == stages
    assert all(row.seconds is not None and row.seconds >= 0 for row in rows)
    first = 2 + stages.index("onnx_from_torch")
    assert (rows[first].seconds == 0) == (first == 2), "the original's own export, where nothing comes before it"
    assert all(row.seconds for row in rows[first + 1 :])
    assert sorted(made.rglob("*")) == before


def test_what_a_stage_would_end_with_is_told_before_the_run(tmp_path: Path) -> None:
    compress.save(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.ReLU()), tmp_path / "m.pt", inputs="x:float32[batch,4]"
    )
    with pytest.raises(StageError, match="nothing was quantized"):
        plan(tmp_path / "m.pt", ExportOptions(output=tmp_path / "out", int8="weights"))


def test_what_hangs_on_weights_that_are_yet_to_be_trained_is_doubted_not_refused(made: Path) -> None:
    asked = ExportOptions(output=made / "out", prune=0.5, rounds=2, finetune=str(made / "samples.npz"), epochs=2)
    second = [row for row in estimates(made / "model.pt", asked, Silent())[0] if row.name == "prune_channels"][1]
    assert second.text.endswith("; as tried: can't remove 29% of the MACs")
    assert second.seconds is not None


def test_more_epochs_more_samples_and_more_calibration_data_take_longer(made: Path) -> None:
    """By far: what is measured is a machine that others use, too."""

    def seconds(name: str, **asked: Any) -> float:
        rows, _ = estimates(made / "model.pt", ExportOptions(output=made / "out", **asked), Silent())
        return next(row.seconds for row in rows if row.name == name) or 0.0

    few, many = (seconds("finetune", finetune=str(made / "samples.npz"), epochs=epochs) for epochs in (1, 100_000))
    assert many > 10 * few


def test_the_wait_for_other_threads_is_told_where_it_was_seen() -> None:
    row = Estimate("finetune", "", 7200.0, one_thread=360.0)
    assert row.told == "2:00 h; 6:00 min with --train-threads 1"
    assert Estimate("engine_from_onnx", "", None).told == "not tried"
