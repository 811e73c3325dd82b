"""`compress finetune`, as it is called."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

import compress
from compress import pipeline
from compress.cli import main
from compress.jobs.export import Silent
from compress.jobs.recovery import finetune
from compress.options import FinetuneOptions
from compress.stage import Progress
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
    assert "wrote out: model.pt, training.json, training.html\nnext     compress inspect out/model.pt\n" in shown.out
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


@pytest.mark.parametrize(
    ("held", "mend"),
    [("model.pt", "give out/model.pt"), ("weights.pt", "give out/weights.pt, with the factory of its module: --model")],
)
@pytest.mark.parametrize(
    "words", ["inspect out", "export out -o a", "measure out", "finetune out --data train.npz -o f"]
)
def test_of_the_folder_of_a_training_the_file_in_it_is_named(
    folder: Path, words: str, held: str, mend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "out").mkdir()
    (folder / "out/training.json").touch()
    (folder / "student.pt").rename(folder / "out" / held)
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"its model is the file {held} in it" in said
    assert mend in said


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


def test_a_drop_is_not_told_where_labels_mean_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a teacher, too: labels of others than the model's classes, say."""
    words = ["student.pt", "--data", "train.npz", "--epochs", "1", "--eval", "shifted.npz", "-o", "out"]
    held = dict(np.load(folder / "eval.npz"))
    np.savez(folder / "shifted.npz", image=held["image"], label=(held["label"] + 1) % 4)
    assert call(*words, "--learning-rate", "1e-7") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "! The original is no better than chance on the evaluation data" in shown
    told = json.loads((folder / "out/training.json").read_text())
    assert any("no better than chance" in said for said in told["warnings"])
    assert [row["drop"] for row in told["rows"]] == [None, None]


def test_before_a_training_from_labels_alone_chance_is_what_is_to_be_beaten(folder: Path) -> None:
    assert call("student.pt", "--data", "train.npz", "--eval", "eval.npz", "--epochs", "6", "-o", "out") == 0
    told = json.loads((folder / "out/training.json").read_text())
    assert not any("no better than chance" in said for said in told["warnings"])
    assert told["rows"][1]["drop"] < 0


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


def test_a_forward_that_can_not_be_traced_gives_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next ")]
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line)[2:])
    assert ended.value.code == 0
    assert "params   148" in capsys.readouterr().out


class Watching(Silent):
    """Keeps what is told of data."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def started(self, stage: str) -> Progress:
        if stage != "data":
            return super().started(stage)
        return lambda done, total, _note: self.told.append((done, total))


def test_how_the_hashing_of_computed_data_goes_on_is_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "computed.py").write_text(
        "import numpy as np\n"
        "class Samples:\n"
        "    def __init__(self):\n"
        "        self.held = np.load('train.npz')\n"
        "        self.held = {name: self.held[name] for name in self.held.files}\n"
        "    def __len__(self):\n"
        "        return 100\n"
        "    def __getitem__(self, at):\n"
        "        return {name: array[at] for name, array in self.held.items()}\n"
    )
    monkeypatch.setattr(pipeline, "SHORT_SECONDS", -1.0)
    watching = Watching()
    asked = FinetuneOptions(output=Path("tuned"), data="computed:Samples", epochs=1)
    finetune("student.pt", asked, watcher=watching)
    assert watching.told == [(100, 100)]


def test_training_samples_that_judge_are_told_whatever_the_name_of_their_file(folder: Path) -> None:
    with np.load("eval.npz") as kept:
        np.savez("renamed.npz", **{name: kept[name][:60] for name in kept.files})
    asked = FinetuneOptions(output=Path("tuned"), data="renamed.npz", eval="eval.npz", epochs=1)
    found = finetune("student.pt", asked, watcher=Silent())
    assert found is not None
    told = [text for text in found.warnings if "60 of the 60 samples of --data stand in --eval, too" in text]
    assert len(told) == 1
    assert told[0] in json.loads(Path("tuned/training.json").read_text(encoding="utf-8"))["warnings"]


def test_a_profile_that_there_is_none_of_is_told_with_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["student.pt", "--data", "train.npz", "--epochs", "1", "-o", "out", "--batch-size"]
    assert call(*words, "32") == 0
    assert "profile" not in capsys.readouterr().out, "nobody asked"
    assert call(*words, "32", "--profile") == 0
    kept = "no profile: the training is kept from before, when none was made; add --no-cache and another --work"
    assert kept in capsys.readouterr().out.splitlines()
    assert kept in json.loads(Path("out/training.json").read_text(encoding="utf-8"))["warnings"]
    assert call(*words, "64", "--profile") == 0
    few = "no profile: this run trained 4 steps, and the first 5 are not watched"
    assert few in capsys.readouterr().out.splitlines()


def test_a_profile_of_the_earlier_run_is_told_as_such(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["student.pt", "--data", "train.npz", "--epochs", "1", "--batch-size", "16", "--profile", "-o", "out"]
    assert call(*words) == 0
    first = capsys.readouterr().out.splitlines()
    assert call(*words) == 0
    again = capsys.readouterr().out.splitlines()
    assert first[0].startswith("a step took")
    assert [line for line in again if line not in first] == ["profiled when it was trained: it is kept from before"]


def test_an_export_tells_of_the_profile_of_its_training(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", "student.pt", "--finetune", "train.npz", "--epochs", "1", "--batch-size", "16", "-o", "out"]
    for flags, told in (
        ([], ()),
        (["--profile"], ("finetune: no profile: the training is kept from before, when none was made",)),
        (["--profile", "--work", "new"], ("finetune: a step took", "most time in: ")),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*words, *flags])
        assert not ended.value.code
        shown = capsys.readouterr().out
        assert all(text in shown for text in told)
        assert ("finetune: " in shown) == bool(told)
        findings = json.loads(Path("out/report.json").read_text(encoding="utf-8"))["findings"]
        assert all(any(text in finding for finding in findings) for text in told)


def test_a_search_is_told_drawn_and_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["student.pt", "--teacher", "teacher.pt", "--data", "train.npz", "--epochs", "4", "--hold-out", "0.2"]
    words += ["--tune-training", "5", "--threads", "1", "--profile", "-o", "out"]
    assert call(*words) == 0
    shown = capsys.readouterr()
    assert "of 5 trials" in shown.err
    assert "warning --profile has no use here: --tune-training trains many times" in shown.err
    assert "no profile" not in shown.out
    told = json.loads(Path("out/training.json").read_text(encoding="utf-8"))
    tuning = told["training"]["tuning"]
    assert told["options"]["tune_training"] == len(tuning["trials"]) == 5
    page = Path("out/training.html").read_text(encoding="utf-8")
    assert "Settings that were tried for the training" in page
    assert tuning["flags"] in page
    for name in ("learning rate", "temperature", "batch size", "1 (as asked for)"):
        assert name in page
    assert call(*words) == 0
    assert "kept from before" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--tune-training", "0"], "it goes from 1 to 1,000"),
        (["--tune-training", "4"], "nothing judges them"),
        (["--tune-training", "4", "--hold-out", "0.05"], "13 samples judge them, and 32 are the least"),
        (["--tune-training", "4", "--hold-out", "0.2", "--devices", "2"], "several processes share each training"),
    ],
)
def test_a_search_that_can_not_be_is_refused_in_three_lines(
    folder: Path, flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("student.pt", "--data", "train.npz", *flags, "-o", "out") == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in said] == ["error:", "why:", "mend:"]
    assert why in said[1]
    assert not Path("out").exists()
