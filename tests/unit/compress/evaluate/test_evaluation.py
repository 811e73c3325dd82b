"""What is judged, on which samples, and when a budget counts as kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import compress
from compress import ExportOptions, OptimizeOptions
from compress.artifact import Measured, Signature, StageReport, TensorSpec
from compress.data.class_labels import with_class_ids
from compress.data.dataset import Dataset
from compress.data.overlap import overlaps
from compress.data.sources import Fetched, Fetcher
from compress.errors import BudgetError, RecipeError
from compress.evaluate.evaluation import budget_of, evaluation_of
from compress.evaluate.halves import halves
from compress.evaluate.judge import KEPT_BYTES, Budget, Judge
from compress.evaluate.metric_choice import find_metric
from compress.evaluate.metrics import METRICS
from compress.evaluate.scoring import batch_for
from compress.formats import checkpoint
from compress.formats.native import graph as graph_file
from compress.jobs.evidence import missed_budgets
from compress.jobs.export import prepare
from compress.jobs.sensitivity import sensitivity
from compress.model import Arrays, TorchModel
from compress.options import SensitivityOptions
from compress.prune.sensitivity import Sensitivity

X = TensorSpec("x", "float32", ("batch", 4))
CLASSIFIER = Signature((X,), (TensorSpec("y", "float32", ("batch", 6)),))


def samples(count: int, labels: Any = None, seed: int = 0) -> Dataset:
    x = np.random.default_rng(seed).standard_normal((count, 4)).astype(np.float32)
    return Dataset("eval", {"x": x}, labels, "hash")


class Gives:
    """A backend that gives what a function makes of x."""

    runtime = "table"
    emulated = False

    def __init__(self, **outputs: Any) -> None:
        self.outputs, self.largest = outputs, 0

    def infer(self, inputs: Arrays) -> Arrays:
        self.largest = max(self.largest, len(inputs["x"]))
        return {name: np.asarray(make(inputs["x"]), np.float32) for name, make in self.outputs.items()}


def wide(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.hstack([x, x[:, :2] * 0.5])


def answers(data: Dataset) -> np.ndarray[Any, Any]:
    return np.asarray(wide(data.inputs["x"]).argmax(1))


# What chooses and what proves


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 300), st.integers(1, 7), st.booleans())
def test_the_halves_share_no_sample_and_have_each_label_alike(count: int, classes: int, labelled: bool) -> None:
    labels = np.random.default_rng(count).integers(0, classes, count) if labelled else None
    data = Dataset("", {"x": np.arange(count, dtype=np.float32)[:, None]}, labels, "h")
    choice, proof = halves(data)
    taken = [set(part.take(slice(None))[0]["x"][:, 0].tolist()) for part in (choice, proof)]
    assert not taken[0] & taken[1]
    assert len(taken[0] | taken[1]) == count
    assert choice.sha256 != proof.sha256
    if labels is not None:
        for label in range(classes):
            first, second = (int((np.asarray(part.labels) == label).sum()) for part in (choice, proof))
            assert abs(first - second) <= 1
    again = halves(data)[0].take(slice(None))[0]["x"]
    assert (again == choice.take(slice(None))[0]["x"]).all(), "two commands on the same data share the split"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=60), st.integers(1, 4), st.booleans())
def test_copies_of_a_sample_are_in_one_half(counts: list[int], classes: int, mixed: bool) -> None:
    """What has chosen proves nothing, under whatever label it comes again."""
    x = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    labels = np.random.default_rng(1).integers(0, classes, len(x)) if mixed else x % classes
    choice, proof = halves(Dataset("", {"x": x[:, None].astype(np.float32)}, labels, "h"))
    one, other = (set(part.take(slice(None))[0]["x"][:, 0].tolist()) for part in (choice, proof))
    assert one
    assert other
    assert not one & other
    assert len(choice) + len(proof) == len(x)
    if not mixed:
        for label in range(classes):
            first, second = (int((np.asarray(part.labels) == label).sum()) for part in (choice, proof))
            assert abs(first - second) <= max(counts[label::classes], default=0)


def test_copies_of_one_sample_are_no_two_halves() -> None:
    with pytest.raises(RecipeError, match="copies of one sample"):
        halves(Dataset("eval.npz", {"x": np.ones((50, 4), np.float32)}, None, "h"))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier, data that it does well on, and some that it does not."""
    folder = tmp_path_factory.mktemp("task")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5)).eval()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1200, 8)).astype(np.float32)
    with torch.no_grad():
        y = module(torch.from_numpy(x)).argmax(1).numpy()
    y[::20] = (y[::20] + 1) % 5
    compress.save(module, folder / "model.pt", inputs="x:float32[batch,8]", outputs=["logits"])
    np.savez(folder / "eval.npz", x=x, label=y)
    np.savez(folder / "choice.npz", x=x[:400] + np.float32(0.01), label=y[:400])
    np.savez(folder / "calibration.npz", x=x[:64])
    np.savez(folder / "strange.npz", x=x, label=np.full(1200, 7))
    np.savez(folder / "unlike.npz", x=x, label=rng.integers(0, 5, 1200))
    np.savez(folder / "one.npz", x=x[:1], label=y[:1])
    np.savez(folder / "minus.npz", x=x, label=np.where(np.arange(1200) % 100, y, -1))
    return folder


def exported(task: Path, output: Path, **more: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"eval": "eval.npz", "int8": "static", "calibration": "calibration.npz", **more}
    compress.export(task / "model.pt", ExportOptions(output=output, **asked))
    found: dict[str, Any] = json.loads((output / "report.json").read_text(encoding="utf-8"))
    return found


def test_layers_are_chosen_by_one_half_and_proven_on_the_other(task: Path, tmp_path: Path) -> None:
    report = exported(task, tmp_path / "out", max_drop=5.0)
    assert report["evaluation"]["samples"] == 600
    assert report["evaluation"]["chosen_on"]["samples"] == 600
    assert report["evaluation"]["chosen_on"]["sha256"] != report["evaluation"]["sha256"]
    assert any("600 of the 1,200 evaluation samples and proven on the other 600" in text for text in report["findings"])
    last = report["stages"][-1]
    assert last["details"]["samples"] == 600
    assert last["measured"]["drop_high"] <= 5.0
    assert last["options"]["target"] == "cpu", "findings, inspect and lint go by it"


def test_what_makes_a_sensitivity_doubtful_is_told_where_it_is_used(task: Path, tmp_path: Path) -> None:
    asked = SensitivityOptions(output=tmp_path / "s", eval="eval.npz", samples=100)
    sensitivity(task / "model.pt", asked)
    file = tmp_path / "s/sensitivity.json"
    held = json.loads(file.read_text(encoding="utf-8")) | {"warnings": ["Its drops tell nothing."]}
    file.write_text(json.dumps(held), encoding="utf-8")
    report = exported(task, tmp_path / "out", prune=0.3, sensitivity=file)
    assert f"{file}: Its drops tell nothing." in report["findings"]


@pytest.mark.parametrize("max_drop", [None, 5.0])
def test_copies_within_the_evaluation_data_are_told(task: Path, tmp_path: Path, max_drop: float | None) -> None:
    """Intervals are those of samples that are not there; one and the same sample never chooses and proves."""
    with np.load(task / "eval.npz") as found:
        np.savez(tmp_path / "twice.npz", **{name: np.concatenate([found[name], found[name]]) for name in found})  # type: ignore[arg-type]
    report = exported(task, tmp_path / "out", max_drop=max_drop, eval=str(tmp_path / "twice.npz"))
    told = next(text for text in report["findings"] if "have the inputs of another one" in text)
    assert told.startswith("Of 2,400 evaluation samples 1,200 ")
    assert told.endswith("narrower than they should be.")
    if max_drop is not None:
        assert report["evaluation"]["split"].endswith("copies of a sample kept together)")
        assert report["evaluation"]["samples"] + report["evaluation"]["chosen_on"]["samples"] == 2400
    once = exported(task, tmp_path / "once", max_drop=max_drop)
    assert not any("of another one" in text for text in once["findings"])


@pytest.mark.parametrize("confidence", [0.0, 1e-17, 0.9999999999999999, 1.0, 1.5])
def test_a_confidence_that_no_interval_has_is_refused(task: Path, confidence: float) -> None:
    asked = ExportOptions(output=Path("o"), eval="e", confidence=confidence, max_drop=3.0)
    with pytest.raises(RecipeError, match="sure"):
        evaluation_of(asked, compress.load(task / "model.pt"), {"eval": str(task / "eval.npz")}, chooses=False)


def test_a_run_that_chooses_nothing_proves_on_all(task: Path, tmp_path: Path) -> None:
    report = exported(task, tmp_path / "out")
    assert report["evaluation"]["samples"] == 1200
    assert report["evaluation"]["chosen_on"] is None
    assert not any("chosen" in text for text in report["findings"])


def test_a_second_set_chooses_and_all_of_the_first_proves(task: Path, tmp_path: Path) -> None:
    report = exported(task, tmp_path / "out", max_drop=3.0, selection="choice.npz")
    assert (report["evaluation"]["samples"], report["evaluation"]["chosen_on"]["samples"]) == (1200, 400)


def test_a_sensitivity_of_the_same_data_leaves_it_half(task: Path, tmp_path: Path) -> None:
    asked = SensitivityOptions(output=tmp_path / "s", eval="eval.npz", samples=100)
    sensitivity(task / "model.pt", asked)
    report = exported(task, tmp_path / "out", prune=0.3, sensitivity=tmp_path / "s")
    assert report["evaluation"]["samples"] == 600


@pytest.mark.parametrize(
    ("more", "what", "why"),
    [
        ({"max_drop": 0.5}, "can't be sure of 0.5 points", "it takes 765 to choose by, and as many others"),
        ({"max_drop": 0.1, "int8": None, "calibration": None}, "can't be sure of 0.1 points", "it takes 3,838"),
        ({"max_drop": 0.0}, "can't be sure of 0 points", "no number of samples is enough"),
        ({"max_drop": 3.0, "selection": "eval.npz"}, "same samples", "hold the same data"),
        ({"selection": "choice.npz"}, "nothing is chosen", "--max-drop"),
        ({"confidence": 95.0}, "95 sure", "from 0.01 to 0.999999"),
        ({"max_drop": 50.0, "eval": "strange.npz"}, "can't keep a largest drop", "go from 7 to 7"),
        ({"max_drop": 50.0, "eval": "minus.npz"}, "can't keep a largest drop", "from -1 to 4, its classes from 0 to 4"),
        ({"max_drop": 50.0, "eval": "unlike.npz"}, "can't keep a largest drop", "no better than chance"),
        ({"max_drop": 99.0, "eval": "one.npz"}, "on one sample", "kind to it"),
        ({"judge": "boxes"}, "'boxes'", "gives logits"),
    ],
)
def test_what_could_prove_nothing_is_refused_before_the_work(
    task: Path, tmp_path: Path, more: dict[str, Any], what: str, why: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        exported(task, tmp_path / "out", **more)
    assert what in caught.value.what
    assert why in caught.value.why
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("strange.npz", "they go from 7 to 7, its classes from 0 to 4"),
        ("minus.npz", "12 of 1,200 labels are no class"),
        ("unlike.npz", "no better than chance"),
        ("one.npz", "One evaluation sample says nothing"),
    ],
)
def test_without_a_budget_a_meaningless_evaluation_is_told_and_has_no_drop(
    task: Path, tmp_path: Path, source: str, words: str
) -> None:
    report = exported(task, tmp_path / "out", eval=source)
    assert any(words in text for text in report["findings"])
    assert all(row["measured"]["drop"] is None for row in report["stages"])


def test_the_winner_of_a_search_is_proven_once_on_samples_that_did_not_choose_it(task: Path, tmp_path: Path) -> None:
    asked = OptimizeOptions(
        output=tmp_path / "best", eval="eval.npz", prune=(0.0,), int8=("dynamic",), goal="size", max_drop=5.0
    )
    found = compress.optimize(task / "model.pt", asked)
    report = json.loads((tmp_path / "best/report.json").read_text(encoding="utf-8"))
    search = json.loads((tmp_path / "best.search/search.json").read_text(encoding="utf-8"))
    assert (found.samples, report["evaluation"]["samples"]) == (600, 600)
    assert found.proof is not None
    assert search["proof"]["drop_high"] == found.proof.drop_high == report["stages"][-1]["measured"]["drop_high"]


def test_a_winner_that_fails_its_proof_is_not_written(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = OptimizeOptions(
        output=tmp_path / "best", eval="eval.npz", prune=(0.0,), int8=("dynamic",), goal="size", max_drop=5.0
    )
    monkeypatch.setattr(
        "compress.jobs.export.budget_of", lambda *_given: Budget(-200.0)
    )  # as if it had lost on the other half
    with pytest.raises(BudgetError, match="samples that did not choose it"):
        compress.optimize(task / "model.pt", asked)
    assert not (tmp_path / "best").exists()
    assert (tmp_path / "best.missed/report.json").exists()


# When a budget is kept


@pytest.mark.parametrize(
    ("drop", "high", "confidence", "kept"),
    [
        (0.5, 0.9, 0.95, True),
        (0.5, 1.1, 0.95, False),
        (0.5, 1.1, None, True),
        (1.1, None, None, False),
        (0.5, None, 0.95, False),  # no interval is known
        (None, None, 0.95, False),
        (None, None, None, False),
        (float("nan"), 0.1, 0.95, False),
        (0.1, float("nan"), 0.95, False),
        (float("inf"), float("inf"), 0.95, False),
        (-3.0, -0.5, 0.95, True),
    ],
)
def test_a_budget_is_kept_when_the_upper_end_keeps_it(
    drop: float | None, high: float | None, confidence: float | None, kept: bool
) -> None:
    assert Budget(1.0, confidence).keeps(drop, high) is kept
    row = StageReport("quantize_onnx", "", Measured(drop=drop, drop_high=high), 1.0)
    missed = missed_budgets(ExportOptions(output=Path("o")), [row], Budget(1.0, confidence))
    assert bool(missed) is not kept


def test_the_estimate_is_held_against_it_only_on_request() -> None:
    asked = ExportOptions(output=Path("o"), budget_by="point")
    assert budget_of(asked, 1.0) == Budget(1.0, None)
    assert budget_of(ExportOptions(output=Path("o"), confidence=0.9), 1.0) == Budget(1.0, 0.9)


def test_with_doubts_no_drop_counts_as_kept() -> None:
    data = samples(200, np.zeros(200, np.int64))
    judge = Judge(Gives(y=wide), data, METRICS["top1"])
    assert judge.doubts
    found = judge.drop(Gives(y=wide))
    assert found.points == 0
    assert found.counted == np.inf


@pytest.mark.parametrize(
    ("make", "metric", "words"),
    [
        (lambda x: np.eye(6)[np.zeros(len(x), int)], "agreement", "the same answer for all 200"),
        (
            lambda x: np.eye(6)[(np.abs(x[:, 0]) > 2.6).astype(int)] + 0.01 * x[:, :1],
            "agreement",
            "one and the same answer for",
        ),
        (lambda x: np.ones((len(x), 6)), "cosine", "the same answer for all 200"),
        (wide, "agreement", ""),
        (wide, "cosine", ""),
    ],
)
def test_an_original_that_always_says_the_same_proves_nothing(make: Any, metric: str, words: str) -> None:
    doubts = Judge(Gives(y=make), samples(200), METRICS[metric]).doubts
    assert (words in " ".join(doubts)) if words else not doubts


@pytest.mark.parametrize(("right", "doubted"), [(0.92, True), (0.999, False)])
def test_the_majority_is_what_an_original_has_to_beat(right: float, doubted: bool) -> None:
    """90 in 100 samples are of one class: whoever always names it is right in 90%."""
    labels = (np.arange(400) % 10 == 0).astype(np.int64)
    wrong = np.random.default_rng(0).random(400) > right
    told = np.where(wrong, 1 - labels, labels)
    data = Dataset("", {"x": told[:, None].astype(np.float32)}, labels, "")
    judge = Judge(Gives(y=lambda x: np.eye(2)[x[:, 0].astype(int)]), data, METRICS["top1"])
    assert bool(judge.doubts) is doubted


# Labels


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.array([0, 2, 1]), ""),
        (np.array([0.0, 2.0, 1.0]), "whole numbers"),
        (np.array([[0], [2], [1]]), ""),
        (np.array([[1, 0, 0], [0, 0, 1], [0, 1, 0]]), "one-hot"),
        (np.array([[1, 0, 0], [0, 0, 1], [0, 1, 0]], np.float32), "one-hot"),
    ],
)
def test_labels_that_say_a_class_become_ids(labels: Any, words: str) -> None:
    data, notes = with_class_ids(samples(3, labels))
    assert data.labels is not None
    assert data.labels.tolist() == [0, 2, 1]
    assert data.labels.dtype.kind in "iu"
    assert words in " ".join(notes)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.array([0.5, 2.0, 1.0]), "no class ids: they are not looked at"),
        (np.array([[1, 1, 0], [0, 0, 1], [0, 0, 0]]), "several classes or none"),
        (np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]), "not looked at"),
    ],
)
def test_labels_that_do_not_are_named(labels: Any, words: str) -> None:
    data, notes = with_class_ids(samples(3, labels))
    assert data.labels is labels
    assert words in " ".join(notes)


def test_labels_of_a_torch_dataset_are_read_once_and_split(task: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "samples_of.py").write_text(
        f"""
import numpy as np, torch
with np.load({str(task / "eval.npz")!r}) as found:
    x, y = found["x"], found["label"]
class Samples(torch.utils.data.Dataset):
    def __len__(self): return len(x)
    def __getitem__(self, i): return dict(x=x[i], label=float(y[i]))
def samples(): return Samples()
""",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    model = compress.load(task / "model.pt")
    asked = ExportOptions(output=Path("o"), eval="samples_of:samples", max_drop=5.0)
    found = evaluation_of(asked, model, {"eval": "samples_of:samples"}, chooses=True)
    assert found is not None
    assert found.choice is not None
    assert any("whole numbers" in note for note in found.notes)
    with np.load(task / "eval.npz") as kept:
        plain = halves(Dataset("", {"x": kept["x"]}, kept["label"], ""))
    for part, want in zip((found.choice, found.proof), plain, strict=True):
        inputs, labels = part.take(slice(10, 20))
        wanted, ids = want.take(slice(10, 20))
        assert labels is not None
        assert (inputs["x"] == wanted["x"]).all()
        assert (labels == ids).all()


def test_what_a_sensitivity_chose_by_does_not_prove_beside_a_second_set(task: Path) -> None:
    model = compress.load(task / "model.pt")
    asked = ExportOptions(output=Path("o"), eval="e", selection="c", int8="static", max_drop=3.0)
    opened = {"eval": str(task / "eval.npz"), "selection": str(task / "choice.npz")}
    whole = evaluation_of(asked, model, opened, chooses=True)
    assert whole is not None
    left = evaluation_of(asked, model, opened, chooses=True, chosen_before=whole.proof.sha256)
    assert left is not None
    assert (len(whole.proof), len(left.proof)) == (1200, 600)


def test_labels_of_text_are_refused() -> None:
    with pytest.raises(RecipeError, match="text"):
        with_class_ids(samples(3, np.array(["cat", "dog", "cat"])))


# Outputs


def outputs(*specs: str) -> Signature:
    return Signature((X,), tuple(TensorSpec.parse(text) for text in specs))


@pytest.mark.parametrize(
    ("specs", "labelled", "metric", "output"),
    [
        (("boxes:float32[batch,4]", "logits:float32[batch,6]"), True, "top1", "logits"),
        (("boxes:float32[batch,4]", "logits:float32[batch,6]"), False, "agreement", "logits"),
        (("output_0:float32[batch,4]", "output_1:float32[batch,6]"), True, "top1", "output_1"),  # holds label 5
        (("embedding:float32[batch,16]",), False, "cosine", "embedding"),
        (("embedding:float32[batch,16]", "states:float32[batch,7,16]"), False, "cosine", None),
        (("y:float32[batch,1]",), False, "mse", "y"),
        (("y:float32[batch]",), False, "mse", "y"),
        (("ids:int64[batch]",), False, "agreement", "ids"),
        (("masks:float32[batch,21,8,8]",), False, "cosine", "masks"),
    ],
)
def test_what_is_judged_follows_from_what_the_output_is(
    specs: tuple[str, ...], labelled: bool, metric: str, output: str | None
) -> None:
    data = samples(60, np.arange(60) % 6 if labelled else None)
    found = find_metric(None, data, outputs(*specs), ask=True)
    assert (found.name, found.output) == (metric, output)


def test_vectors_of_length_one_are_an_embedding() -> None:
    unit = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    signature = outputs("output:float32[batch,16]")
    assert find_metric(None, samples(5), signature, sample={"output": unit}).name == "cosine"
    assert find_metric(None, samples(5), signature, sample={"output": 3 * unit}).name == "agreement"


@pytest.mark.parametrize("name", [None, "top1", "agreement"])
def test_where_it_can_not_be_told_the_user_is_asked(name: str | None) -> None:
    signature = outputs("output_0:float32[batch,6]", "output_1:float32[batch,8]")
    data = samples(60, np.arange(60) % 6)
    with pytest.raises(RecipeError, match="which output") as caught:
        find_metric(name, data, signature, ask=True)
    assert "--judge output_0" in caught.value.mend
    assert find_metric(name, data, signature, output="output_1", ask=True).output == "output_1"


def test_the_output_that_is_named_is_the_one_that_is_judged() -> None:
    data = samples(300)
    signature = outputs("boxes:float32[batch,6]", "logits:float32[batch,6]")
    judge = Judge(Gives(boxes=wide, logits=wide), data, find_metric(None, data, signature, ask=True))
    other = Gives(boxes=lambda x: -wide(x), logits=wide)
    assert judge.drop(other).points == 0
    boxes = Judge(
        Gives(boxes=wide, logits=wide), data, find_metric("cosine", data, signature, output="boxes", ask=True)
    )
    assert boxes.drop(other).points == pytest.approx(200)


def test_a_report_names_the_output_and_the_labels(tmp_path: Path) -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.boxes, self.head = nn.Linear(8, 4), nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.boxes(x), self.head(x)

    torch.manual_seed(0)
    module = Detector().eval()
    x = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    with torch.no_grad():
        y = module(torch.from_numpy(x))[1].argmax(1).numpy()
    compress.save(module, tmp_path / "model.pt", inputs="x:float32[batch,8]", outputs=["where", "scores"])
    np.savez(tmp_path / "eval.npz", x=x, label=np.eye(5)[y])
    _, report = compress.export(tmp_path / "model.pt", ExportOptions(output=tmp_path / "o", eval="eval.npz"))
    assert report.stages[0].measured.metric == "top1"
    assert report.stages[-1].measured.accuracy == 1.0
    told = " ".join(report.findings)
    assert "one-hot: they are taken as class ids" in told
    assert "2 outputs: top1 judges 'scores' (another: --judge)" in told


def test_a_model_that_answers_nan_is_told_and_its_report_is_json(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sqrt(100 - x[:, :1]) + self.head(x)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    x = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    x[::4, 0] = 200
    compress.save(Broken().eval(), tmp_path / "model.pt", inputs="x:float32[batch,8]", outputs=["logits"])
    np.savez(tmp_path / "eval.npz", x=x, label=np.arange(300) % 5)
    compress.export(tmp_path / "model.pt", ExportOptions(output=tmp_path / "o", eval="eval.npz"))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    report = json.loads((tmp_path / "o/report.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert any("for 75 of 300 samples hold NaN" in text for text in report["findings"])
    assert all(row["measured"]["agreement"] == 0.75 for row in report["stages"]), "not even with itself"
    assert all(row["measured"]["drop"] is None for row in report["stages"])


# Memory


def test_no_outputs_are_kept_and_large_ones_go_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = Gives(y=lambda x: np.zeros((len(x), 8, 512, 512)) + x[:, 0, None, None, None])
    data = samples(12)
    assert batch_for(dense, data) == 3  # of 8.4 MB each
    assert batch_for(Gives(y=wide), data) == 64
    judge = Judge(dense, data, METRICS["cosine"])
    assert dense.largest == 3
    assert sum(o["y"].nbytes for o in judge._reference._kept.values()) <= KEPT_BYTES
    labelled = Judge(Gives(y=wide), samples(200, answers(samples(200))), METRICS["top1"])
    assert not labelled._reference._kept, "top1 looks at no outputs of the original"
    monkeypatch.setattr("compress.evaluate.judge.KEPT_BYTES", 0)
    again = Judge(Gives(y=wide), samples(200), METRICS["agreement"])
    assert not again._reference._kept
    assert again.drop(Gives(y=wide)).points == 0
    assert again.drop(Gives(y=lambda x: -wide(x))).points > 90


def test_an_evaluation_is_opened_whole(task: Path) -> None:
    model = compress.load(task / "model.pt")
    assert isinstance(model, TorchModel)
    asked = ExportOptions(output=Path("o"), eval="e", finetune="e")
    path = str(task / "eval.npz")
    found = evaluation_of(asked, model, {"eval": path, "finetune": path}, chooses=False)
    assert found is not None
    assert any("trained on the evaluation data itself" in note for note in found.notes)


# Samples that the model is made with, too


def told_of(task: Path, folder: Path, **arrays: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """What is told of a calibration file that holds these arrays."""
    np.savez(folder / "other.npz", **arrays)
    asked = ExportOptions(output=Path("o"), eval="e", calibration="c", int8="static")
    opened = {"eval": str(task / "eval.npz"), "calibration": str(folder / "other.npz")}
    found = evaluation_of(asked, compress.load(task / "model.pt"), opened, chooses=False)
    assert found is not None
    return found.notes, found.to_dict()["made_with"]


def rows(task: Path) -> np.ndarray[Any, Any]:
    with np.load(task / "eval.npz") as kept:
        return np.asarray(kept["x"])


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (lambda x: x, "on the evaluation data itself"),
        (lambda x: x[::-1].astype(np.float64), "on the evaluation data itself"),
        (lambda x: x[5:105], "100 of the 100 samples of --calibration stand in --eval, too"),
        (lambda x: np.vstack([x[:60], x[:60] + 9]), "60 of the 120 samples of --calibration"),
        (lambda x: np.vstack([x, x + 9]), "1,200 of the 2,400 samples of --calibration"),
        (lambda x: x[7:8], "the only sample of --calibration"),
        (lambda x: np.vstack([x[:1], x[:99] + 9]), ""),  # a double, as data has its own
        (lambda x: x[:100] + 9, ""),
    ],
)
def test_a_calibration_on_what_judges_is_told_by_its_samples(
    task: Path, tmp_path: Path, changed: Any, told: str
) -> None:
    data = np.ascontiguousarray(changed(rows(task)))
    notes, counted = told_of(task, tmp_path, x=data)
    if not told:
        assert not notes
        assert not counted
        return
    (note,) = notes
    assert note.startswith("The model is calibrated")
    assert told in note
    assert counted["calibration"]["samples"] == len(data)


def test_the_report_warns_of_a_copied_evaluation_file(task: Path, tmp_path: Path) -> None:
    shutil.copyfile(task / "eval.npz", tmp_path / "copy.npz")
    report = exported(task, tmp_path / "out", calibration=str(tmp_path / "copy.npz"))
    told = [text for text in report["findings"] if text.startswith("The model is calibrated on the evaluation data")]
    assert len(told) == 1
    assert told[0] not in report["notes"], "it is a warning"
    assert report["evaluation"]["made_with"]["calibration"]["shared"] == 1200


def test_a_large_computed_set_that_holds_the_evaluation_data_is_told(task: Path) -> None:
    x = rows(task)
    model = compress.load(task / "model.pt")
    data = Dataset.open(str(task / "eval.npz"), model.signature)
    more = np.random.default_rng(7).permutation(np.vstack([x, np.tile(x + 9, (19, 1))]))
    names = [spec.name for spec in model.signature.inputs]
    fetcher = Fetcher(TensorDataset(torch.from_numpy(more)), names, "many")
    held = {name: Fetched(shape, dtype, name, fetcher.rows) for name, (shape, dtype) in fetcher.specs.items()}
    found = overlaps(data, {"finetune": Dataset("many", dict(held), None, "h", (), fetcher)})["finetune"]
    assert (found.samples, found.looked_at) == (24_000, 4096)
    assert found.counts
    assert found.shared == pytest.approx(4096 / 20, rel=0.3)
    assert "4,096 samples looked at" in found.told


def test_text_of_another_width_is_the_same_text() -> None:
    one, two = (Dataset("", {"x": np.array(text)}, None, "h") for text in (["a", "b"], ["a", "longer"]))
    assert overlaps(one, {"two": two})["two"].shared == 1


def test_a_sensitivity_is_read_once_and_the_model_traced_once_to_know_it(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is checked is what is acted on, even where the file changes meanwhile."""
    sensitivity(
        task / "model.pt", SensitivityOptions(output=tmp_path / "s", eval="eval.npz", samples=50, ratios=(0.5,))
    )
    read: list[Path] = []
    traced: list[nn.Module] = []
    load, trace = Sensitivity.load, graph_file.to_data

    def loading(path: Path) -> Sensitivity:
        read.append(path)
        return load(path)

    def tracing(module: nn.Module, *, inputs: int) -> Any:
        traced.append(module)
        return trace(module, inputs=inputs)

    monkeypatch.setattr(Sensitivity, "load", loading)
    monkeypatch.setattr("compress.formats.identity.to_data", tracing)
    asked = ExportOptions(output=tmp_path / "o", eval="eval.npz", prune=0.3, sensitivity=tmp_path / "s")
    prepared = prepare(task / "model.pt", asked)
    assert len(read) == 1
    assert len(traced) == 1
    assert isinstance(prepared.model, TorchModel)
    assert checkpoint.fingerprint(prepared.model) in prepared.source
