"""An export that lost by INT8 says in its report which layer did it, and what would mend it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import compress
from compress.jobs import blamed as blamed_module
from compress.options import ExportOptions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network whose middle layer is rounded coarsely in INT8, and one that is not; with labels that they know."""
    folder = tmp_path_factory.mktemp("blamed")
    torch.manual_seed(0)
    first, middle = nn.Linear(8, 16), nn.Linear(16, 16)
    module = nn.Sequential(first, nn.ReLU(), middle, nn.ReLU(), nn.Linear(16, 4)).eval()
    x = np.random.default_rng(0).normal(size=(400, 8)).astype(np.float32)
    compress.save(module, folder / "fine.pt", inputs="x:float32[batch,8]")
    with torch.no_grad():
        first.weight[0], first.bias[0] = 0.0, 0.0
        middle.weight[:, 0] = 60.0  # of a channel that is 0: only the step of the others' weights grows
        labels = module(torch.from_numpy(x)).argmax(1).numpy()
    compress.save(module, folder / "coarse.pt", inputs="x:float32[batch,8]")
    np.savez(folder / "data.npz", x=x, y=labels)
    np.savez(folder / "inputs.npz", x=x)
    return folder


def report(folder: Path, model: str, name: str, data: str = "data.npz") -> dict[str, object]:
    options = ExportOptions(
        output=folder / name,
        int8="static",
        smooth=False,
        calibration=str(folder / "inputs.npz"),
        eval=str(folder / data),
    )
    compress.export(folder / model, options)
    found: dict[str, object] = json.loads((folder / name / "report.json").read_text())
    return found


def test_the_layer_that_lost_is_told_with_what_mends_it_and_drawn(folder: Path) -> None:
    found = report(folder, "coarse.pt", "coarse")

    explained = found["explained"]
    assert isinstance(explained, dict)
    assert explained["layers"][0]["name"] == "node_linear_1"
    assert explained["keep_float"] == ["node_linear_1"]
    assert [note for note in found["notes"] if "--keep-float node_linear_1" in note]  # type: ignore[attr-defined]
    page = (folder / "coarse" / "report.html").read_text()
    assert "goes with a layer alone in float" in page
    assert "Signal to noise of each tensor" in page


def test_a_file_that_lost_nothing_by_int8_is_not_looked_into(folder: Path) -> None:
    x = np.load(folder / "inputs.npz")["x"]
    with torch.no_grad():
        scores = compress.load(folder / "fine.pt").module(torch.from_numpy(x)).numpy()
    second, best = np.sort(scores, 1)[:, -2:].T
    sure = best - second > 0.05
    np.savez(folder / "sure.npz", x=x[sure], y=scores[sure].argmax(1))

    assert report(folder, "fine.pt", "fine", "sure.npz")["explained"] is None


def test_what_would_take_long_is_named_as_a_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blamed_module, "SECONDS", 0.0)

    found = report(folder, "coarse.pt", "long")

    assert found["explained"] is None
    assert [note for note in found["notes"] if "`compress explain` tells" in note]  # type: ignore[attr-defined]
