"""Labels that are more than a class for each sample: sets of labels, one label alone, a class for each place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import compress
from compress.artifact import TensorSpec
from compress.console.wording import Note
from compress.data.dataset import Dataset
from compress.errors import RecipeError
from compress.evaluate.evaluation import judged
from compress.evaluate.judge import Judge
from compress.evaluate.label_metrics import IntersectionOverUnion, constant_accuracy, constant_f1, pixel_accuracy_of
from compress.evaluate.metric_choice import find_metric
from compress.evaluate.metrics import METRICS as BUILT_IN
from compress.evaluate.scoring import Scores
from compress.model import Arrays, TorchModel
from compress.signature import Signature

RNG = np.random.default_rng(0)


def model(module: nn.Module, *takes: str) -> TorchModel:
    from compress.model.infer import infer_signature

    return TorchModel(module.eval(), infer_signature(module.eval(), tuple(map(TensorSpec.parse, takes))))


def data(inputs: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> Dataset:
    return Dataset("", {"x": inputs.astype(np.float32)}, labels, "0" * 64)


class Sign:
    """Logits, or probabilities, of 5 labels; `flipped` of them are wrong."""

    runtime, emulated = "numpy", False

    def __init__(self, flipped: int = 0, shares: bool = False) -> None:
        self._signs = np.where(np.arange(5) < flipped, -1, 1)
        self._shares = shares

    def infer(self, inputs: Arrays) -> Arrays:
        logits = 4 * inputs["x"] * self._signs
        return {"y": (1 / (1 + np.exp(-logits)) if self._shares else logits).astype(np.float32)}


FIVE = Signature((TensorSpec("x", "float32", ("batch", 5)),), (TensorSpec("y", "float32", ("batch", 5)),))


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("kind", [np.float32, np.int64, bool])
def test_labels_of_0_and_1_are_judged_each_by_itself(shares: bool, kind: type) -> None:
    x = RNG.standard_normal((300, 5))
    given = data(x, (x > 0).astype(kind))
    metric = find_metric(None, given, FIVE, endings={"y": "sigmoid" if shares else None})
    assert metric.name == "f1_samples"
    judge = Judge(Sign(shares=shares), given, metric)
    assert not judge.doubts
    assert judge.original == 1
    drop = judge.drop(Sign(flipped=1, shares=shares))
    assert 15 < drop.points < 30, "the largest of the outputs would tell something else"
    assert drop.low is not None
    assert drop.high is not None


@pytest.mark.parametrize("name", [None, "f1_samples", "f1"])
def test_the_f1_of_samples_is_that_of_scikit_learn_and_no_other_average(name: str | None) -> None:
    wanted = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(3)
    scores, there = rng.standard_normal((200, 5)), rng.random((200, 5)) < np.array([0.1, 0.2, 0.3, 0.5, 0.7])
    metric = find_metric(name, data(scores, there), FIVE)
    assert metric.name == "f1_samples"
    assert metric.per_sample is not None
    ours = metric.per_sample({"y": scores}, {}, there).mean()
    assert ours == pytest.approx(wanted.f1_score(there, scores > 0, average="samples", zero_division=1))
    for average in ("macro", "micro", "weighted"):
        assert abs(ours - wanted.f1_score(there, scores > 0, average=average)) > 1e-3, average


def of_sklearn(name: str, scores: Any, labels: Any) -> float:
    """A metric as its name is defined by others."""
    sk = pytest.importorskip("sklearn.metrics")
    flat = np.moveaxis(scores, 1, -1)
    found = {
        "top1": lambda: sk.accuracy_score(labels, scores.argmax(1)),
        "top5": lambda: sk.top_k_accuracy_score(labels, scores, k=5, labels=range(scores.shape[1])),
        "binary_accuracy": lambda: sk.accuracy_score(labels.ravel(), scores.ravel() > 0),
        "f1_samples": lambda: sk.f1_score(labels, scores > 0, average="samples", zero_division=1),
        "pixel_accuracy": lambda: sk.accuracy_score(labels.ravel(), flat.argmax(-1).ravel()),
        "miou": lambda: sk.jaccard_score(labels.ravel(), flat.argmax(-1).ravel(), average="macro"),
        "r2": lambda: sk.r2_score(labels, scores),
    }
    return float(found[name]())


OWN = np.random.default_rng(11)
IDS, SETS_OF_5 = OWN.integers(0, 8, 90), (OWN.random((90, 5)) > np.array([0.9, 0.5, 0.4, 0.2, 0.7])).astype(np.int64)


@pytest.mark.parametrize(
    ("name", "shape", "labels"),
    [
        ("top1", (8,), IDS),
        ("top5", (8,), IDS),
        ("binary_accuracy", (1,), SETS_OF_5[:, :1]),
        ("binary_accuracy", (5,), SETS_OF_5),
        ("f1_samples", (5,), SETS_OF_5),
        ("pixel_accuracy", (4, 6, 3), OWN.integers(0, 4, (90, 6, 3))),
        ("miou", (4, 6, 3), OWN.integers(0, 4, (90, 6, 3))),
        ("r2", (5,), OWN.standard_normal((90, 5)).astype(np.float32)),
    ],
)
def test_a_metric_is_what_its_name_says_to_scikit_learn(name: str, shape: tuple[int, ...], labels: Any) -> None:
    scores = np.random.default_rng(5).standard_normal((90, *shape)).astype(np.float32)
    signature = Signature((TensorSpec("x", "float32", ("batch", 2)),), (TensorSpec("y", "float32", ("batch", *shape)),))
    metric = find_metric(name, data(np.zeros((90, 2)), labels), signature)
    tally = Scores(metric)
    for at in range(0, 90, 32):
        tally.add({"y": scores[at : at + 32]}, {}, labels[at : at + 32])
    assert tally.result().mean() == pytest.approx(of_sklearn(name, scores, labels), abs=1e-6)


def test_the_share_of_right_labels_is_no_count_of_right_answers() -> None:
    """Of several to a sample it is no 0 or 1, and a budget's samples are not counted so."""
    x = OWN.standard_normal((400, 5))
    there = (x > 0).astype(np.int64)
    for labels, counted in ((there[:, :1], True), (there, False)):
        spec = TensorSpec("y", "float32", ("batch", labels.shape[1]))
        signature = Signature(FIVE.inputs, (spec,))
        assert find_metric("binary_accuracy", data(x, labels), signature).counted is counted
    rare = np.zeros((400, 5), np.int64)
    rare[:40, 0] = 1
    judge = Judge(
        Sign(), data(np.full((400, 5), -1.0) + 0.1 * x, rare), find_metric("binary_accuracy", data(x, rare), FIVE)
    )
    assert judge.original == pytest.approx(constant_accuracy(rare))
    assert "whoever always gives the most frequent labels has 98.0%" in judge.doubts[0]


@pytest.mark.parametrize(
    "name", ["top1", "binary_accuracy", "f1_samples", "pixel_accuracy", "miou", "r2", "mse", "cosine", "agreement"]
)
def test_outputs_that_are_no_numbers_have_the_worst_score(name: str) -> None:
    tables: dict[str, tuple[Any, tuple[int, ...]]] = {
        "top1": (np.zeros(9, np.int64), (5,)),
        "pixel_accuracy": (np.zeros((9, 4), np.int64), (5, 4)),
        "miou": (np.zeros((9, 4), np.int64), (5, 4)),
        "r2": (OWN.standard_normal((9, 5)).astype(np.float32), (5,)),
    }
    labels, shape = tables.get(name, (np.zeros((9, 5), np.int64), (5,)))
    if name in ("mse", "cosine", "agreement"):
        labels = None
    signature = Signature(FIVE.inputs, (TensorSpec("y", "float32", ("batch", *shape)),))
    metric = find_metric(name, Dataset("", {"x": np.zeros((9, 5), np.float32)}, labels, "0" * 64), signature)
    tally = Scores(metric)
    tally.add({"y": np.full((9, *shape), np.nan, np.float32)}, {"y": np.ones((9, *shape), np.float32)}, labels)
    assert tally.result().mean() == (0 if name == "miou" else metric.worst)


def test_an_original_that_gives_the_usual_labels_is_no_better_than_chance() -> None:
    """Rare labels: to give none at all is right for most of them, and worth nothing."""
    x = RNG.standard_normal((400, 5))
    there = np.zeros((400, 5), np.int64)
    there[:, 0] = 1  # the one that all have
    there[np.arange(400), RNG.integers(1, 5, 400)] = 1
    metric = find_metric(None, data(x, there), FIVE)

    class Usual(Sign):
        def infer(self, inputs: Arrays) -> Arrays:
            noise = 0.1 * inputs["x"]
            return {"y": (noise + np.array([9, -9, -9, -9, -9])).astype(np.float32)}

    assert "no better than chance" in " ".join(Judge(Usual(), data(x, there), metric).doubts)
    assert constant_f1(there) == pytest.approx(2 / 3)


@pytest.mark.parametrize(("labels", "name"), [(np.int64, "binary_accuracy"), (np.float32, "binary_accuracy")])
def test_one_logit_is_judged_by_the_label(labels: type, name: str) -> None:
    x = RNG.standard_normal((400, 5))
    linear = nn.Linear(5, 1)
    nn.init.ones_(linear.weight)
    nn.init.zeros_(linear.bias)
    one = model(linear, "x:float32[batch,5]")
    given, metric, _ = judged(data(x, (x.sum(1) > 0).astype(labels)[:, None]), None, None, one)
    assert metric.name == name
    assert metric.counted
    from compress.runtime.backends import open_model

    judge = Judge(open_model(one, threads=1), given, metric)
    assert not judge.doubts
    assert judge.original == 1


@pytest.mark.parametrize(
    ("shape", "labels", "axis"), [((7, 4, 6, 5), (7, 6, 5), 1), ((7, 6, 5, 4), (7, 6, 5), -1), ((7, 6, 4), (7, 6), -1)]
)
def test_class_ids_for_each_place_are_judged(shape: tuple[int, ...], labels: tuple[int, ...], axis: int) -> None:
    logits, ids = RNG.standard_normal(shape), RNG.integers(0, 4, labels)
    spec = TensorSpec("y", "float32", ("batch", *shape[1:]))
    signature = Signature((TensorSpec("x", "float32", ("batch", 2)),), (spec,))
    metric = find_metric(None, data(np.zeros((7, 2)), ids), signature)
    assert (metric.name, metric.output) == ("pixel_accuracy", "y")
    ids[0, 0] = 255  # what is no class does not count
    assert metric.per_sample is not None
    found = metric.per_sample({"y": logits}, {}, ids)
    there = ids != 255
    right = (logits.argmax(axis) == ids) & there
    flat = (right.reshape(7, -1).sum(1), there.reshape(7, -1).sum(1))
    assert found == pytest.approx(flat[0] / flat[1])
    running = IntersectionOverUnion(axis)
    for at in range(7):
        running.update({"y": logits[at : at + 1]}, ids[at : at + 1])
    wanted = pytest.importorskip("sklearn.metrics").jaccard_score(
        ids[there], logits.argmax(axis)[there], average="macro"
    )
    assert running.compute() == pytest.approx(wanted)
    assert find_metric("miou", data(np.zeros((7, 2)), ids), signature).output == "y"


def test_a_map_whose_answer_is_the_usual_class_is_no_better_than_chance() -> None:
    ids = (RNG.random((60, 8, 8)) < 0.1).astype(np.int64)

    class Background:
        runtime, emulated = "numpy", False

        def infer(self, inputs: Arrays) -> Arrays:
            noise = np.random.default_rng(len(inputs["x"])).random((len(inputs["x"]), 2, 8, 8))
            return {"y": (noise + np.array([9, 0])[:, None, None]).astype(np.float32)}

    signature = Signature(
        (TensorSpec("x", "float32", ("batch", 2)),), (TensorSpec("y", "float32", ("batch", 2, 8, 8)),)
    )
    given = data(np.zeros((60, 2)), ids)
    metric = find_metric(None, given, signature)
    assert "no better than chance" in " ".join(Judge(Background(), given, metric).doubts)
    outside = data(np.zeros((60, 2)), ids + 5)
    assert "is a class of the model" in " ".join(Judge(Background(), outside, metric).doubts)


@pytest.mark.parametrize("name", ["pixel_accuracy", "miou"])
def test_the_best_of_one_class_for_all_places_is_doubted(name: str) -> None:
    """Also where samples have few places that are known, each of which counts for more. Guesses have more of miou."""
    ids = RNG.choice([0, 1, 2], (40, 6, 6), p=[0.2, 0.3, 0.5]).astype(np.int64)
    ids[:20, 1:] = 255
    ids[:20, 0] = RNG.choice([0, 1], (20, 6), p=[0.1, 0.9])
    ids[3] = 255
    rates = []
    for label in range(3):
        given = np.zeros((40, 3, 6, 6), np.float32)
        given[:, label] = 1
        scores = Scores(BUILT_IN[name])
        scores.add({"y": given}, {}, ids)
        rates.append(float(scores.result().mean()))
    chance = BUILT_IN[name].chance()  # type: ignore[misc]
    for part in (slice(0, 25), slice(25, 40)):
        chance.add({"y": given[part]}, ids[part])
    assert chance.doubt(max(rates) - 1e-9, "") is not None
    assert (chance.doubt(max(rates) + 1e-9, "") is None) is (name == "pixel_accuracy")


def test_places_without_an_answer_are_wrong() -> None:
    logits = np.array([[[np.nan, 1.0], [0.0, 0.0], [1.0, 2.0]]])
    assert pixel_accuracy_of(-1)({"y": logits}, {}, np.array([[0, 0, 1]])) == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", ["f1", "f1_samples", "pixel_accuracy", "miou", "binary_accuracy"])
def test_without_such_labels_they_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="can't judge by"):
        find_metric(name, data(np.zeros((9, 5)), np.arange(9) % 5), FIVE)


METRICS = """
import numpy as np
def distance(outputs, labels):
    return np.abs(outputs["y"].argmax(1) - labels)
distance.per_sample, distance.higher_is_better, distance.scale = True, False, 1
def whole(outputs, labels):
    return float((outputs["y"].argmax(1) == labels).mean())
def blind(outputs, labels):
    return float(outputs["y"].mean())
"""


@pytest.mark.parametrize(
    ("name", "learnt", "doubted"),
    [("distance", True, False), ("distance", False, True), ("whole", True, False), ("whole", False, True),
     ("blind", False, False)],
)  # fmt: skip
def test_a_metric_of_the_users_own_is_held_against_shuffled_labels(
    name: str, learnt: bool, doubted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "held_metrics.py").write_text(METRICS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    x = RNG.standard_normal((300, 5))
    labels = np.sort(x.argmax(1)) if not learnt else x.argmax(1)
    given = data(x, labels)
    judge = Judge(Sign(), given, find_metric(f"held_metrics:{name}", given, FIVE))
    assert bool(judge.doubts) is doubted
    assert not doubted or "shuffled" in judge.doubts[0]


def test_a_network_that_finds_edges_is_exported_and_judged_by_its_pixels(tmp_path: Path) -> None:
    """From files, as a user has them: labels [n, height, width] and outputs [n, classes, height, width]."""
    network = nn.Conv2d(1, 2, 1)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[[[-1.0]]], [[[1.0]]]]))
        nn.init.zeros_(network.bias)  # type: ignore[arg-type]
    compress.save(network, tmp_path / "model.pt", inputs="x:float32[batch,1,6,6]")
    x = RNG.standard_normal((40, 1, 6, 6)).astype(np.float32)
    np.savez(tmp_path / "eval.npz", x=x, label=(x[:, 0] > 0).astype(np.uint8))
    loaded = compress.load(tmp_path / "model.pt")
    given, metric, notes = judged(Dataset.open(str(tmp_path / "eval.npz"), loaded.signature), None, None, loaded)
    assert (metric.name, notes) == ("pixel_accuracy", ())
    from compress.runtime.backends import open_model

    judge = Judge(open_model(loaded, threads=1), given, metric)
    assert not judge.doubts
    assert judge.original == 1


class Tags:
    """Logits [n, length, 4] of the tag that a token is."""

    runtime, emulated = "numpy", False

    def infer(self, inputs: Arrays) -> Arrays:
        """Outputs by name."""
        return {"y": 9 * np.eye(4, dtype=np.float32)[inputs["x"].astype(np.int64)]}


@pytest.mark.parametrize("length", [3, 4, 5])
def test_a_sequence_as_long_as_there_are_classes_is_judged_as_any_other(length: int) -> None:
    x = OWN.integers(0, 4, (60, length))
    signature = Signature(
        (TensorSpec("x", "float32", ("batch", "seq")),), (TensorSpec("y", "float32", ("batch", "seq", 4)),)
    )
    for name in ("pixel_accuracy", "miou"):
        judge = Judge(Tags(), data(x, x), find_metric(name, data(x, x), signature))
        assert judge.original == 1
        assert not judge.doubts


def test_where_the_classes_may_be_along_two_dimensions_no_budget_counts_as_kept() -> None:
    x = OWN.integers(0, 4, (60, 4))
    signature = Signature((TensorSpec("x", "float32", ("batch", 4)),), (TensorSpec("y", "float32", ("batch", 4, 4)),))
    for name in ("pixel_accuracy", "miou"):
        judge = Judge(Tags(), data(x, x), find_metric(name, data(x, x), signature))
        assert "along its second dimension or along its last" in judge.doubts[0]
        assert judge.drop(Tags()).counted == np.inf


# --- numbers


class Line(nn.Module):
    """A line, and shares of two classes."""

    def __init__(self, slope: float = 2.0, shift: float = 0.0) -> None:
        super().__init__()
        self.slope, self.shift = slope, shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 2] → [n, 2]."""
        return self.slope * x + self.shift


def line(**fields: float) -> TorchModel:
    return model(Line(**fields), "x:float32[batch,2]")


def numbers(count: int = 200) -> Dataset:
    x = np.random.default_rng(1).standard_normal((count, 2))
    return data(x, (2 * x + 0.1 * np.random.default_rng(2).standard_normal(x.shape)).astype(np.float32))


def test_numbers_are_judged_by_their_labels_as_scikit_learn_does() -> None:
    told = numbers()
    _, metric, notes = judged(told, None, None, line())
    assert (metric.name, metric.output, notes) == ("r2", "output", ())
    judge = Judge(Numpy(2.0), told, metric)
    given, wanted = 2 * told.inputs["x"], np.asarray(told.labels)
    shares = 1 - np.square(given - wanted).sum(0) / np.square(wanted - wanted.mean(0)).sum(0)
    assert judge.original == pytest.approx(shares.mean(), rel=1e-6)
    assert not judge.doubts
    lost = judge.drop(Numpy(1.5))
    assert lost.points > 5
    assert lost.low is not None
    assert lost.low < lost.points


def test_an_original_that_is_as_good_as_the_mean_label_means_nothing() -> None:
    told = numbers()
    _, metric, _ = judged(told, None, None, line())
    assert "always gives the mean label" in Judge(Numpy(-0.01), told, metric).doubts[0]


def test_labels_that_never_change_are_not_judged_by() -> None:
    told = data(RNG.standard_normal((20, 2)), np.full((20, 2), 7.5, np.float32))
    assert judged(told, None, None, line())[1].name != "r2"
    with pytest.raises(RecipeError, match="not all the same"):
        judged(told, "r2", None, line())


def test_shares_of_classes_are_not_numbers_to_hit() -> None:
    shares = np.random.default_rng(3).dirichlet((1, 1), 30).astype(np.float32)
    assert judged(data(RNG.standard_normal((30, 2)), shares), None, None, line())[1].name == "agreement"


def test_class_ids_of_one_output_are_not_numbers_of_another() -> None:
    both = Signature(
        (TensorSpec.parse("x:float32[batch,2]"),),
        (TensorSpec.parse("value:float32[batch,1]"), TensorSpec.parse("logits:float32[batch,2]")),
    )
    for ids in (np.arange(20) % 2, np.arange(20) % 3):
        found = find_metric(None, data(RNG.standard_normal((20, 2)), ids), both)
        assert (found.name, found.output) == ("top1", "logits")


class Numpy:
    """A line as a backend."""

    runtime, emulated = "numpy", False

    def __init__(self, slope: float) -> None:
        self._slope = slope

    def infer(self, inputs: Arrays) -> Arrays:
        """Outputs by name."""
        return {"output": (self._slope * inputs["x"]).astype(np.float32)}


class Maps(nn.Module):
    """Logits of so many classes for each place."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 3, h, w] → [n, classes, h, w]."""
        return self.conv(x)  # type: ignore[no-any-return]


PICTURES = np.random.default_rng(5).standard_normal((40, 3, 6, 5)).astype(np.float32)


def given_by(module: nn.Module) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return np.asarray(module(torch.from_numpy(PICTURES)))


@pytest.mark.parametrize("takes", ["x:float32[batch,3,6,5]", "x:float32[batch,3,height,width]"])
@pytest.mark.parametrize("axis", [1, 3])
def test_masks_with_a_dimension_of_1_are_squeezed(takes: str, axis: int) -> None:
    network = model(Maps(4), takes)
    ids = given_by(network.module).argmax(1)
    told, metric, notes = judged(data(PICTURES, np.expand_dims(ids, axis)), None, None, network)
    assert (metric.name, notes) == ("pixel_accuracy", ())
    assert told.labels is not None
    assert told.labels.shape == ids.shape


@pytest.mark.parametrize("shape", [(5,), (5, 1), (1, 5), (5, 1, 1), (1, 1, 5)])
@pytest.mark.parametrize("kind", [np.int64, np.float32, np.bool_])
def test_one_hot_rows_with_dimensions_of_1_are_classes(shape: tuple[int, ...], kind: type) -> None:
    """They were taken for sets of labels, each there or not."""
    ids = np.arange(40) % 5
    network = model(nn.Linear(3, 5), "x:float32[batch,3]")
    x = RNG.standard_normal((40, 3))
    told, metric, notes = judged(data(x, np.eye(5, dtype=kind)[ids].reshape(40, *shape)), None, None, network)
    assert metric.name == "top1"
    assert "one-hot" in " ".join(notes)
    assert np.array_equal(np.asarray(told.labels), ids)
    told, metric, _ = judged(data(x, ids.reshape(40, *(1 for _ in shape))), None, None, network)
    assert metric.name == "top1"
    assert np.array_equal(np.asarray(told.labels), ids)


def test_a_map_of_one_value_is_judged_as_there_or_not() -> None:
    """As a class of one it would have been wrong in every place."""
    for takes in ("x:float32[batch,3,6,5]", "x:float32[batch,3,height,width]"):
        network = model(Maps(1), takes)
        logits = given_by(network.module)[:, 0]
        for labels in ((logits > 0).astype(np.int64), (logits > 0).astype(np.uint8)[:, None]):
            told, metric, notes = judged(data(PICTURES, labels), None, None, network)
            assert metric.name == "f1_samples"
            assert "above 0:" in notes[0]
            assert metric.per_sample is not None
            assert (metric.per_sample({"output": logits[:, None]}, {}, np.asarray(told.labels)) == 1).all()


@pytest.mark.parametrize(
    ("outside", "places", "noted"), [(255, 3, True), (255, 20, False), (4, 3, False), (-1, 1, True), (None, 0, True)]
)
def test_the_share_of_places_without_a_class_is_told(outside: int | None, places: int, *, noted: bool) -> None:
    network = model(Maps(4), "x:float32[batch,3,6,5]")
    labels = given_by(network.module).argmax(1)
    labels.reshape(40, -1)[:, :places] = -1 if outside is None else outside
    for name in (None, "miou"):
        _, _, notes = judged(data(PICTURES, labels), name, None, network)
        assert len(notes) == (places > 0)
        for note in notes:
            assert note.startswith(f"{places / 30:.2%} of the places")
            assert f"({outside})" in note
            assert isinstance(note, Note) == noted


class Two(nn.Module):
    """Two outputs of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line(1.0, 0.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, 2] → [n, 1] twice."""
        first = self.line(x)[:, :1]
        return first, -first


def test_labels_that_fit_several_outputs_follow_the_named_one() -> None:
    network, whole = model(Two(), "x:float32[batch,2]"), numbers()
    assert whole.labels is not None
    told = data(whole.inputs["x"], whole.labels[:, :1])
    for name in (None, "r2"):
        for output, sign in (("output_0", 1), ("output_1", -1)):
            _, metric, notes = judged(told, name, output, network)
            assert (metric.name, metric.output) == ("r2", output)
            assert not any("do not look" in note or "not looked" in note for note in notes)
            given = {key: side * told.inputs["x"][:, :1] for key, side in (("output_0", 1.0), ("output_1", -1.0))}
            assert metric.per_sample is not None
            score = metric.per_sample(metric.judged(given), {}, np.asarray(told.labels)).mean()
            assert (score > 0) == (sign > 0)
    _, metric, notes = judged(told, None, None, network)
    assert "The labels fit 2 outputs (output_0, output_1): mse does not look at them." in notes[0]
    with pytest.raises(RecipeError, match="can't judge by r2") as caught:
        judged(told, "r2", None, network)
    assert "several outputs fit" in caught.value.why


class Vectors(nn.Module):
    """Unnamed numbers [n, 4], of which nothing says what they are; or their softmax."""

    def __init__(self, *, shares: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.Softmax(1) if shares else nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 2] → [n, 4]."""
        return self.layers(x)  # type: ignore[no-any-return]


def test_that_only_a_shape_says_class_scores_is_told() -> None:
    no_labels = "No labels in the evaluation data: agreement with the original is judged, not accuracy."
    x = RNG.standard_normal((40, 2)).astype(np.float32)
    bare = Dataset("", {"x": x}, None, "0" * 64)
    _, metric, notes = judged(bare, None, None, model(Vectors(), "x:float32[batch,2]"))
    assert metric.name == "agreement"
    assert any("Nothing but its shape" in note and "--metric cosine" in note for note in notes)
    assert all(isinstance(note, Note) for note in notes)
    for name, shares, said in ((None, True, (no_labels,)), ("agreement", False, ())):
        _, metric, notes = judged(bare, name, None, model(Vectors(shares=shares), "x:float32[batch,2]"))
        assert (metric.name, notes) == ("agreement", said)


@pytest.mark.parametrize(
    "labels", [RNG.random(40).astype(np.float32), RNG.integers(0, 9, (40, 2)), RNG.random((40, 3)).astype(np.float32)]
)
def test_labels_that_are_no_classes_make_no_class_scores_of_unnamed_numbers(labels: np.ndarray[Any, Any]) -> None:
    given = data(RNG.standard_normal((40, 2)), labels)
    _, metric, notes = judged(given, None, None, model(Vectors(), "x:float32[batch,2]"))
    assert metric.name == "cosine"
    assert any("not looked at" in note for note in notes)
    assert judged(given, None, None, model(Vectors(shares=True), "x:float32[batch,2]"))[1].name == "agreement"
