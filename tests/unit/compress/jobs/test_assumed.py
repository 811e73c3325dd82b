"""What was assumed of a checkpoint stands in what is written, and is told once at the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from compress.cli import main
from tests.models import mlp

TOLD = "the weights are behind 'net.', which is taken off; left out, since tests.models:mlp has no place for it: ema."


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    weights = mlp().state_dict()
    behind = {
        f"{name}.{key}": value * scale for name, scale in (("net", 1.0), ("ema", 9.0)) for key, value in weights.items()
    }
    torch.save({"state_dict": behind}, tmp_path / "model.ckpt")
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, label=np.arange(40) % 3)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("default::compress.console.wording.AssumedWarning")
@pytest.mark.parametrize(
    ("words", "json_file", "key", "page"),
    [
        (["export", "model.ckpt", "-o", "out"], "out/report.json", "notes", "out/report.html"),
        (
            ["sensitivity", "model.ckpt", "--eval", "data.npz", "--samples", "20", "--ratios", "0.5", "-o", "out"],
            "out/sensitivity.json", "notes", "out/sensitivity.html",
        ),
        (
            ["finetune", "model.ckpt", "--data", "data.npz", "--epochs", "1", "-o", "out"],
            "out/training.json", "warnings", "out/training.html",
        ),
        (["measure", "model.ckpt", "--rounds", "3", "--json", "out.json"], "out.json", "assumed", ""),
    ],
    ids=["export", "sensitivity", "finetune", "measure"],
)  # fmt: skip
def test_it_is_in_the_report_and_told_once(
    words: list[str], json_file: str, key: str, page: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--model", "tests.models:mlp", "--input", "x:float32[batch,4]"])
    said = capsys.readouterr()
    assert not ended.value.code, said.err
    told = json.loads(Path(json_file).read_text(encoding="utf-8"))[key]
    assert [text for text in told if TOLD in text]
    assert not page or "which is taken off" in Path(page).read_text(encoding="utf-8")
    assert (said.out + said.err).count("which is taken off") == 1


@pytest.mark.filterwarnings("ignore::compress.console.wording.AssumedWarning")
def test_what_a_kept_training_says_of_its_data_is_of_what_is_evaluated_now(folder: Path) -> None:
    other = np.random.default_rng(1).normal(size=(40, 4)).astype(np.float32)
    np.savez("other.npz", x=other, label=np.arange(40) % 3)
    words = ["finetune", "model.ckpt", "--data", "data.npz", "--epochs", "1", "-o", "out", "--work", "work"]
    words += ["--model", "tests.models:mlp", "--input", "x:float32[batch,4]", "--eval"]
    trained = {}
    for data, warns in (("other.npz", False), ("data.npz", True), ("other.npz", False)):
        with pytest.raises(SystemExit) as ended:
            main([*words, data])
        assert not ended.value.code
        told = json.loads(Path("out/training.json").read_text(encoding="utf-8"))
        assert any("trained on the evaluation data" in text for text in told["warnings"]) == warns
        trained[data] = {path.name: path.stat().st_mtime_ns for path in Path("work").glob("01-finetune*")}
    assert len({json.dumps(each) for each in trained.values()}) == 1, "one training, kept"
