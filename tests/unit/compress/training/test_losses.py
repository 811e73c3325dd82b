"""The loss follows the kind of the output, and what is a probability already is none twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import compress
from compress.data.dataset import Dataset
from compress.evaluate.output_kind import OutputForm, OutputKind
from compress.model import TorchModel
from compress.options.training import TrainingOptions
from compress.stage import Given
from compress.training.finetune import Finetune
from compress.training.losses import distance, fits, labelled
from tests.unit.compress.prune.test_prune_channels import quiet

KINDS = {
    "softmax": (OutputForm(OutputKind.SOFTMAX), (8, 5)),
    "sigmoid": (OutputForm(OutputKind.SIGMOID), (8, 5)),
    "regression": (OutputForm(OutputKind.REGRESSION), (8, 5)),
    "embedding": (OutputForm(OutputKind.EMBEDDING), (8, 5)),
    "dense": (OutputForm(OutputKind.DENSE), (8, 5, 3, 3)),
    "tokens": (OutputForm(OutputKind.DENSE, axis=-1), (8, 6, 5)),
}


def some(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", KINDS)
def test_equal_answers_have_no_distance_and_others_have_one(name: str) -> None:
    form, shape = KINDS[name]
    a, b = some(shape, 0), some(shape, 1)
    assert float(distance(form, a, a, 4.0, 1.0)) == pytest.approx(0, abs=1e-6)
    assert float(distance(form, a, b, 4.0, 1.0)) > 0.01


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize(
    ("kind", "ending", "activate"),
    [
        ("softmax", "softmax", lambda x: x.softmax(1)),
        ("softmax", "log_softmax", lambda x: x.log_softmax(1)),
        ("sigmoid", "sigmoid", torch.sigmoid),
        ("dense", "softmax", lambda x: x.softmax(1)),
    ],
)
def test_probabilities_inside_the_network_give_the_loss_of_their_logits(
    kind: str, ending: Any, activate: Any, temperature: float
) -> None:
    form, shape = KINDS[kind]
    inside = OutputForm(form.kind, form.axis, ending)
    a, b = some(shape, 0), some(shape, 1)
    expected = distance(form, a, b, temperature, 1.0)
    torch.testing.assert_close(distance(inside, activate(a), activate(b), temperature, 1.0), expected)
    labels = (b > 0).float() if kind == "sigmoid" else b.argmax(1)
    assert fits(form, a, labels)
    expected = labelled(form, a, labels, 0.1)
    torch.testing.assert_close(labelled(inside, activate(a), labels, 0.1), expected)


def test_each_place_of_a_map_counts_like_a_sample_of_its_own() -> None:
    form, shape = KINDS["dense"]
    a, b = some(shape, 0), some(shape, 1)
    rows = [output.movedim(1, -1).reshape(-1, shape[1]) for output in (a, b)]
    flat = distance(KINDS["softmax"][0], rows[0], rows[1], 2.0, 1.0)
    torch.testing.assert_close(distance(form, a, b, 2.0, 1.0), flat)


def test_places_without_a_class_are_left_out() -> None:
    form, shape = KINDS["dense"]
    a, labels = some(shape, 0), some(shape, 1).argmax(1)
    labels[:, 0] = 255
    labels[:, 1] = -1
    torch.testing.assert_close(labelled(form, a, labels, 0.0), F.cross_entropy(a[:, :, 2], labels[:, 2]))
    assert float(labelled(form, a, torch.full_like(labels, 255), 0.0)) == 0


def test_squares_are_measured_by_the_spread_of_the_original() -> None:
    form, shape = KINDS["regression"]
    a, b = some(shape, 0), some(shape, 1)
    one = distance(form, a, b, 1.0, 2.0)
    torch.testing.assert_close(distance(form, 1000 * a, 1000 * b, 1.0, 2e6), one)


def network(seed: int, width: int, end: nn.Module) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Linear(width, 10), end).eval()


def taught(folder: Path, end: nn.Module, labels: bool, **options: Any) -> tuple[Given, TorchModel, torch.Tensor]:
    """A student of a teacher of ten labels, of which most are rare."""
    module = network(1, 48, end)
    with torch.no_grad():
        module.get_parameter("2.weight").mul_(4)
        module.get_parameter("2.bias").sub_(2)
    models = []
    for name, each in (("teacher", module), ("student", network(2, 16, end))):
        models.append(compress.load(compress.save(each, folder / f"{name}.pt", inputs="x:float32[batch,12]")))
    teacher, student = models
    x = some((512, 12), 3)
    with torch.no_grad():
        answers = teacher.module(x)
        probabilities = answers if isinstance(end, nn.Sigmoid) else answers.sigmoid()
    hot = (probabilities > 0.5).numpy().astype(np.int64) if labels else None
    data = Dataset("", {"x": x.numpy()}, hot, "some")
    asked = TrainingOptions(**{"epochs": 15, "learning_rate": 1e-2, "train_precision": "32", **options})
    stage = Finetune(data, teacher, asked)
    stage.check(student)
    return stage.run(student, folder, quiet), teacher, x


def wrong(given: Given, teacher: TorchModel, x: torch.Tensor, end: nn.Module) -> float:
    """Share of labels that are not the teacher's."""
    assert isinstance(given.model, TorchModel)
    edge = 0.5 if isinstance(end, nn.Sigmoid) else 0.0
    with torch.no_grad():
        return float(((given.model.module(x) > edge) != (teacher.module(x) > edge)).float().mean())


@pytest.mark.parametrize(("end", "labels"), [(nn.Identity(), True), (nn.Sigmoid(), True), (nn.Sigmoid(), False)])
def test_several_labels_at_once_recover(end: nn.Module, labels: bool, tmp_path: Path) -> None:
    given, teacher, x = taught(tmp_path, end, labels)
    as_classes, _, _ = taught(tmp_path, end, labels, loss="softmax")
    assert given.details["outputs"]["output"]["taken_as"] == "sigmoid"
    assert "output as sigmoid" in given.did
    assert given.warnings == ()
    assert wrong(given, teacher, x, end) < 0.12
    assert wrong(given, teacher, x, end) < 0.5 * wrong(as_classes, teacher, x, end)


def test_what_was_asked_for_is_taken_and_labels_that_do_not_fit_it_are_named(tmp_path: Path) -> None:
    given, _, _ = taught(tmp_path, nn.Identity(), labels=True, loss="embedding", epochs=1)
    assert given.details["outputs"]["output"] == {
        "taken_as": "embedding", "ending": None, "because": "it was asked for",
    }  # fmt: skip


@pytest.mark.parametrize(("end", "precision"), [(nn.Sigmoid(), "32-true"), (nn.Identity(), "bf16-mixed")])
def test_probabilities_are_not_trained_in_numbers_that_round_them_to_1(
    end: nn.Module, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.training.updates.precision.fast_bfloat16", lambda: True)
    given, _, _ = taught(tmp_path, end, labels=True, epochs=1, train_precision="auto")
    assert given.details["precision"] == precision


@pytest.mark.parametrize("accumulate", [1, 3])
def test_parts_of_a_step_weigh_by_their_samples_for_every_kind(accumulate: int, tmp_path: Path) -> None:
    """Unequal parts: 512 samples in batches of 100 and in three parts each."""
    runs = [
        taught(tmp_path, nn.Identity(), True, epochs=1, batch_size=100, accumulate=parts)[0]
        for parts in (1, accumulate)
    ]
    first, second = (run.model.module.state_dict() for run in runs)  # type: ignore[union-attr]
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-3, atol=1e-4)
