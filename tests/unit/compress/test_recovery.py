"""`compress finetune`, as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import compress
from compress.cli import main
from tests.unit.compress.training.networks import data, model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model(tmp_path, "student", 8)
    model(tmp_path, "teacher", 12)
    data(tmp_path)
    data(tmp_path, "eval", 100, seed=9)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["finetune", *words])
    return int(ended.value.code or 0)


def test_a_model_its_figures_and_its_page_are_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "student.pt",
        "--data",
        "train.npz",
        "--eval",
        "eval.npz",
        "--epochs",
        "4",
        "--batch-size",
        "32",
        "--learning-rate",
        "5e-3",
        "-o",
        "out",
    ]
    assert call(*words) == 0
    shown = capsys.readouterr()
    assert "after" in shown.out
    assert "wrote out: model.pt, training.json, training.html" in shown.out
    told = json.loads((folder / "out/training.json").read_text())
    before, after = told["rows"]
    assert (before["name"], after["name"], told["metric"]) == ("before", "after", "top1")
    assert after["value"] > before["value"] + 0.3
    assert after["drop"] == pytest.approx(100 * (before["value"] - after["value"]))
    assert after["drop_low"] < after["drop"] < after["drop_high"]
    assert "<svg" in (folder / "out/training.html").read_text()
    compress.load(folder / "out/model.pt")
    assert call(*words) == 0
    assert "kept from before" in capsys.readouterr().err, "the same again is not trained again"


def test_with_a_teacher_the_drop_is_against_it(folder: Path) -> None:
    words = [
        "student.pt",
        "--teacher",
        "teacher.pt",
        "--data",
        "train.npz",
        "--eval",
        "eval.npz",
        "--epochs",
        "1",
        "-o",
        "out",
    ]
    assert call(*words) == 0
    rows = json.loads((folder / "out/training.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["original", "before", "after"]
    assert rows[0]["drop"] is None


def test_a_teacher_of_another_shape_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compress.save(torch.nn.Linear(4, 2), "other.pt", inputs="x:float32[batch,4]")
    assert call("student.pt", "--teacher", "other.pt", "--data", "train.npz", "-o", "out") == 2
    assert "error: other.pt can't teach student.pt" in capsys.readouterr().err


def test_what_was_there_stays_when_the_training_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("student.pt", "--data", "train.npz", "--epochs", "1", "-o", "out") == 0
    before = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    assert call("student.pt", "--data", "train.npz", "--epochs", "1", "--learning-rate", "1e30", "-o", "out") == 2
    assert "diverged" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == before
    (folder / "mine").mkdir()
    (folder / "mine/thesis.txt").write_text("years of work")
    assert call("student.pt", "--data", "train.npz", "-o", "mine") == 2
    assert (folder / "mine/thesis.txt").exists()


def test_a_forward_that_can_not_be_traced_gives_weights(folder: Path) -> None:
    (folder / "branching.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.head = torch.nn.Linear(36, 4)\n"
        "    def forward(self, image):\n"
        "        x = image.flatten(1)\n"
        "        return self.head(x if x.sum() > 0 else -x)\n"
    )
    import sys

    sys.path.insert(0, "")
    try:
        import branching  # type: ignore[import-not-found]
    finally:
        sys.path.remove("")
    torch.save(branching.Net().state_dict(), "branching.pt")
    words = [
        "--model",
        "branching:Net",
        "--input",
        "image:float32[batch,1,6,6]",
        "--data",
        "train.npz",
        "--epochs",
        "1",
    ]
    assert call("branching.pt", *words, "-o", "out") == 0
    assert set(torch.load(folder / "out/weights.pt", weights_only=True)) == {"head.weight", "head.bias"}
