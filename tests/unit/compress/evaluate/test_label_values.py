"""All labels are looked at, and those that mean "not known" count for nothing."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.errors import DatasetError, RecipeError
from compress.evaluate import label_values
from compress.evaluate.chance import OfPlaces, OfSets
from compress.evaluate.evaluation import judged
from compress.evaluate.judge import Judge
from compress.evaluate.label_metrics import binary_accuracy_of, constant_accuracy, constant_f1, f1_of
from compress.evaluate.metric_choice import find_metric
from compress.evaluate.output_kind import OutputKind, by_labels
from compress.model import TorchModel
from compress.runtime.backends import open_model
from compress.training.labels import left_out, refuse_labels
from compress.training.losses import labelled

N, K = 6000, 3
X = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
THERE = (X > 0).astype(np.int16)


def network(shape: tuple[int | str, ...]) -> TorchModel:
    """Gives its input as logits, in float32."""
    scale = nn.Linear(shape[-1], shape[-1])  # type: ignore[arg-type]
    with torch.no_grad():
        scale.weight.copy_(5 * torch.eye(shape[-1]))  # type: ignore[arg-type]
        scale.bias.zero_()
    specs = (TensorSpec("x", "float32", ("batch", *shape)),), (TensorSpec("y", "float32", ("batch", *shape)),)
    return TorchModel(scale.eval(), Signature(*specs))


def unknown(rows: Any, value: float, labels: Any = THERE) -> Any:
    found = labels.copy()
    found[rows] = value
    return found


@pytest.mark.parametrize("value", [-1, 255, -100])
@pytest.mark.parametrize("columns", [K, 1])
@pytest.mark.parametrize("rows", [[1], [5], list(range(1, N, 4)), [N - 1]])
def test_one_unknown_label_anywhere_counts_for_nothing(rows: list[int], columns: int, value: int) -> None:
    labels = unknown(rows, value)[:, :columns]
    labels = labels[:, 0] if columns == 1 else labels
    original = network((columns,))
    data, metric, notes = judged(Dataset("", {"x": X[:, :columns]}, labels, "0" * 64), None, None, original)
    assert metric.name == ("binary_accuracy" if columns == 1 else "f1_samples")
    assert len(data) == N - len(rows)
    assert any(str(value) in note for note in notes)
    judge = Judge(open_model(original, threads=1), data, metric)
    assert judge.original == 1
    assert not judge.doubts


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (THERE, "sigmoid"),
        (unknown(7, 2), "regression"),
        (unknown((7, 1), -1), "sigmoid"),
        (unknown((7, 1), np.nan, THERE.astype(np.float32)), "sigmoid"),
        (unknown((7, 1), 255, THERE.astype(np.float32)), "sigmoid"),
        (unknown((7, 1), -1, THERE.astype(np.float32)), "regression"),
        (2 * THERE - 1, "regression"),
        (unknown((N - 2, 1), 0.5, THERE.astype(np.float32)), "regression"),
    ],
)
def test_the_kind_is_told_by_all_labels(labels: Any, kind: str) -> None:
    form = by_labels(labels, TensorSpec("y", "float32", ("batch", K)), None)
    assert form is not None
    assert form.kind == kind


MASK = TensorSpec("y", "float32", ("batch", 1, 6, 6))
MAPS = (np.random.default_rng(1).random((40, 6, 6)) > 0.5).astype(np.uint8)


@pytest.mark.parametrize(
    ("labels", "why"), [(255 * MAPS, "0 and 255"), (unknown((3, 2), 2, MAPS), "some are 2"), (MAPS + 1, "some are 2")]
)
def test_whole_numbers_that_no_mask_holds_are_named(labels: Any, why: str) -> None:
    signature = Signature((TensorSpec("x", "float32", ("batch", 1)),), (MASK,))
    data = Dataset("", {"x": np.zeros((40, 1), np.float32)}, labels, "0" * 64)
    for name in (None, "f1_samples"):
        with pytest.raises(RecipeError, match=why):
            find_metric(name, data, signature)
    assert find_metric("r2", data, signature).name == "r2"
    assert find_metric("cosine", data, signature).name == "cosine"
    for taught in (True, False):
        with pytest.raises(DatasetError, match=why):
            refuse_labels(labels, MASK, "train.npz", taught=taught)
    refuse_labels(labels, MASK, "train.npz", taught=True, loss="regression")


def test_a_depth_map_of_whole_numbers_is_numbers() -> None:
    depths = np.random.default_rng(2).integers(0, 5000, (40, 6, 6)).astype(np.uint16)
    form = by_labels(depths, MASK, None)
    assert form is not None
    assert (form.kind, form.wrong) == (OutputKind.REGRESSION, "")


@pytest.mark.parametrize("ending", [None, "sigmoid"])
@pytest.mark.parametrize("value", [255.0, -1.0, -100.0, float("nan")])
def test_the_loss_of_unknown_labels_is_none(value: float, ending: Any) -> None:
    form = by_labels(MAPS[:, None], MASK, ending)
    assert form is not None
    got = torch.rand(40, 1, 6, 6, requires_grad=True)
    labels = torch.from_numpy(MAPS.astype(np.float32))
    labels[:, 0] = value
    loss = labelled(form, got, labels, 0.1)
    loss.backward()  # type: ignore[no-untyped-call]
    assert got.grad is not None
    assert float(got.grad[:, :, 0].abs().max()) == 0
    rest = labelled(form, got[:, :, 1:], labels[:, 1:], 0.1)
    assert loss.item() == pytest.approx(rest.item())


@pytest.mark.parametrize(
    ("spec", "labels", "told"),
    [
        (MASK, MAPS, None),
        (MASK, unknown((3, 2), 255, MAPS), "labels of 255"),
        (TensorSpec("y", "float32", ("batch", 2, 6, 6)), MAPS, None),
        (TensorSpec("y", "float32", ("batch", 2, 6, 6)), unknown((slice(20), 2), 255, MAPS), "8.33% of the places"),
    ],
)
def test_a_training_tells_what_teaches_nothing(spec: TensorSpec, labels: Any, told: str | None) -> None:
    form = by_labels(labels, spec, None)
    assert form is not None
    words = left_out(form, spec, labels)
    assert words is None if told is None else told in (words or "")


@given(st.integers(0, 2**32 - 1))
def test_scores_and_chance_are_those_of_the_known_labels(seed: int) -> None:
    rng = np.random.default_rng(seed)
    there, known = rng.integers(0, 2, (20, 4)), rng.random((20, 4)) > 0.3
    known[:, 0] = True
    outputs, labels = rng.standard_normal((20, 4)), np.where(known, there, rng.choice([-1, 255, -100], (20, 4)))
    f1, accuracy = (of(0.0)({"y": outputs}, {}, labels) for of in (f1_of, binary_accuracy_of))
    for row in range(20):
        only = known[row]
        one, wanted = {"y": outputs[row : row + 1, only]}, there[row : row + 1, only]
        assert f1[row] == pytest.approx(f1_of(0.0)(one, {}, wanted)[0])
        assert accuracy[row] == pytest.approx(binary_accuracy_of(0.0)(one, {}, wanted)[0])
    chances = [OfSets(constant) for constant in (constant_f1, constant_accuracy)]
    for chance, constant in zip(chances, (constant_f1, constant_accuracy), strict=True):
        chance.add({}, labels)
        assert f"{constant(labels):.1%}" in (chance.doubt(0.0, "") or "")


@pytest.mark.parametrize("share", [0.94, 0.7, 0.25])
@pytest.mark.parametrize("guess", ["the most frequent", "as they come", "the best"])
def test_miou_is_held_against_the_best_guess_of_whoever_looks_at_nothing(share: float, guess: str) -> None:
    rng = np.random.default_rng(3)
    there = np.array([share, *[(1 - share) / 3] * 3])
    labels = rng.choice(4, size=(600, 6, 6), p=there)
    best = there / (1 - there)
    given = {"the most frequent": np.eye(4)[0], "as they come": there, "the best": best / best.sum()}[guess]
    answers = rng.choice(4, size=labels.shape, p=given)
    met = [
        ((labels == each) & (answers == each)).sum() / ((labels == each) | (answers == each)).sum() for each in range(4)
    ]
    chance = OfPlaces(1, of_classes=True)
    chance.add({"y": np.zeros((600, 4, 6, 6), np.float32)}, labels)
    assert np.mean(met) <= chance.rate() + 0.003
    if guess == "the best":
        assert chance.rate() == pytest.approx(np.mean(met), abs=0.003)
    assert f"{chance.rate():.1%}" in (chance.doubt(chance.rate() - 1e-6, "its miou is low") or "")
    assert chance.doubt(chance.rate() + 1e-6, "") is None


def test_a_random_network_is_doubted_by_its_miou() -> None:
    torch.manual_seed(1)
    specs = (TensorSpec("x", "float32", ("batch", 3, 6, 6)),), (TensorSpec("y", "float32", ("batch", 4, 6, 6)),)
    original = TorchModel(nn.Conv2d(3, 4, 1).eval(), Signature(*specs))
    rng = np.random.default_rng(5)
    labels = rng.choice(4, size=(60, 6, 6), p=[0.94, 0.02, 0.02, 0.02])
    given = Dataset("", {"x": rng.standard_normal((60, 3, 6, 6)).astype(np.float32)}, labels, "0" * 64)
    data, metric, _ = judged(given, "miou", None, original)
    (doubt,) = Judge(open_model(original, threads=1), data, metric).doubts
    assert "no better than chance" in doubt


def test_wide_maps_on_the_disk_are_looked_at_a_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_values, "BLOCK", 1 << 16)
    shape = (64, 256, 256)
    labels = np.lib.format.open_memmap(tmp_path / "labels.npy", mode="w+", dtype=np.float32, shape=shape)
    labels[:] = np.random.default_rng(0).random((1, *shape[1:]), np.float32)
    output = TensorSpec("y", "float32", ("batch", *shape[1:]))
    tracemalloc.start()
    refuse_labels(labels, output, "train.npz", taught=True, loss="regression")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < labels.size / 2, "a truth value for each is as many bytes as there are labels"
