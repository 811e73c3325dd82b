"""More weights than one message of protobuf holds: the stages go through, and the artifact is one file that fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import compress
from compress import Artifact, ExportOptions
from compress.errors import StageError
from compress.formats.checkpoint import save
from compress.jobs import output
from compress.jobs.export import Silent
from compress.onnx_export import file
from compress.pipeline import Outcome

WIDTH, LAYERS = 320, 5
FLOAT_BYTES = 4 * LAYERS * WIDTH * WIDTH
X = f"x:float32[batch,{WIDTH}]"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if a file held two thirds of this model's weights in FP32."""
    for module in (file, output):
        monkeypatch.setattr(module, "MOST", FLOAT_BYTES * 2 // 3)
    layers = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    save(nn.Sequential(*layers).eval(), tmp_path / "model.pt", inputs=X)
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).standard_normal((64, WIDTH), np.float32))
    return tmp_path


@pytest.mark.parametrize(
    "wanted",
    [
        {"int8": "dynamic"}, {"int8": "static", "calibration": "x.npz"}, {"int4": "weights"}, {"precision": "fp16"},
        {"precision": "bf16"}, {"prune": 0.5, "calibration": "x.npz"},
    ],
    ids=lambda wanted: next(iter(wanted)) + "-" + str(next(iter(wanted.values()))),
)  # fmt: skip
def test_what_makes_it_small_enough_gives_one_file(folder: Path, wanted: dict[str, Any]) -> None:
    wanted = {name: str(folder / value) if name == "calibration" else value for name, value in wanted.items()}
    artifact, report = compress.export(folder / "model.pt", ExportOptions(output=folder / "artifact", **wanted))
    assert Artifact.load(folder / "artifact").model_path.stat().st_size < FLOAT_BYTES * 2 // 3
    assert not list((folder / "artifact").glob("*.data"))
    beside = list((folder / "artifact.work").glob("*/model.onnx.data"))
    assert bool(beside) == ("prune" not in wanted)
    exported = next(stage for stage in report.stages if stage.stage == "onnx_from_torch")
    assert (exported.measured.size_bytes or 0) > FLOAT_BYTES or "prune" in wanted
    assert artifact.sha256


def test_a_largest_size_counts_weights_that_lie_beside_the_file(folder: Path) -> None:
    """Of a candidate with weights beside, the file alone is as small as anybody likes."""
    wanted = FLOAT_BYTES / 2 / 1e6
    options = ExportOptions(output=folder / "artifact", target_size_mb=wanted, calibration=str(folder / "x.npz"))
    compress.export(folder / "model.pt", options)
    size = Artifact.load(folder / "artifact").model_path.stat().st_size
    assert FLOAT_BYTES * 0.3 < size <= wanted * 1e6


def test_what_was_kept_of_it_is_taken_again_and_a_damaged_part_is_not(folder: Path) -> None:
    class Seen(Silent):
        def __init__(self) -> None:
            self.reused: list[bool] = []

        def ended(self, outcome: Outcome) -> None:
            if outcome.stage.name in ("onnx_from_torch", "fold_onnx"):
                self.reused.append(outcome.reused)

    def run() -> list[bool]:
        seen = Seen()
        options = ExportOptions(output=folder / "artifact", int8="dynamic")
        compress.export(folder / "model.pt", options, watcher=seen)
        return seen.reused

    run()
    assert all(run())
    weights = next((folder / "artifact.work").glob("01-*/model.onnx.data"))
    data = bytearray(weights.read_bytes())
    data[100] ^= 1
    weights.write_bytes(data)
    assert run() == [True, True, False, True]  # of the original first, which has files of its own


def test_what_nothing_makes_smaller_is_refused_before_any_work(folder: Path) -> None:
    with pytest.raises(StageError, match="too large for its file") as told:
        compress.export(folder / "model.pt", ExportOptions(output=folder / "artifact"))
    assert "--int8 dynamic" in (told.value.mend or "")
    assert not (folder / "artifact.work").exists()


def test_an_onnx_file_with_weights_beside_it_is_made_smaller(folder: Path) -> None:
    compress.export(folder / "model.pt", ExportOptions(output=folder / "artifact", int8="dynamic"))
    large = next((folder / "artifact.work").glob("02-*/model.onnx"))
    compress.export(large, ExportOptions(output=folder / "again", int8="dynamic"))
    assert Artifact.load(folder / "again").model_path.stat().st_size < FLOAT_BYTES * 2 // 3
