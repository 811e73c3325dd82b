"""A training learns what it was given: labels stay with their samples, ties stay ties, what judges is not what teaches."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.data.sources import Fetched, Fetcher
from compress.errors import RecipeError
from compress.evaluate.labels_told import squeezed
from compress.evaluate.output_forms import forms_of
from compress.evaluate.output_kind import OutputForm, OutputKind
from compress.model import TorchModel
from compress.options.training import TrainingOptions
from compress.training.batches.loader import Loader
from compress.training.batches.sampler import Sampler
from compress.training.finetune import Finetune
from compress.training.judging import Judge
from compress.training.updates.average import Average
from compress.training.updates.optimizers import optimizer_for
from tests.unit.compress.prune.test_prune_channels import quiet
from tests.unit.compress.training.networks import stage, trained


class Tied(nn.Module):
    """A language model in small: its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 16)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.middle(self.embedding(x).mean(1)))
        return logits


def tied() -> TorchModel:
    signature = Signature((TensorSpec("x", "int64", ("batch", 6)),), (TensorSpec("output", "float32", ("batch", 20)),))
    return TorchModel(Tied().eval(), signature)


def sentences(count: int = 96) -> Dataset:
    rng = np.random.default_rng(0)
    return Dataset("", {"x": rng.integers(0, 20, (count, 6))}, rng.integers(0, 20, count), "some")


@pytest.mark.parametrize(
    "options",
    [{}, {"ema": 0.9}, {"hold_out": 0.25}, {"gradient_checkpointing": True}, {"accumulate": 3}],
    ids=str,
)
def test_tied_weights_stay_one(options: dict[str, Any], tmp_path: Path) -> None:
    before = tied()
    asked = TrainingOptions(
        **{"epochs": 2, "batch_size": 32, "train_precision": "32", "learning_rate": 1e-2, **options}
    )
    given = Finetune(sentences(), None, asked).run(before, tmp_path, quiet)
    assert isinstance(given.model, TorchModel)
    after = given.model.module
    assert isinstance(after, Tied)
    assert after.head.weight is after.embedding.weight
    assert not torch.equal(after.head.weight, before.module.get_parameter("head.weight"))


def test_a_tied_weight_is_in_the_optimizer_once() -> None:
    module = Tied()
    inside = [id(p) for group in optimizer_for(module, 1e-3).param_groups for p in group["params"]]
    assert sorted(inside) == sorted({id(p) for p in module.parameters()})


def test_an_average_has_the_statistics_of_normalization_in_it_too() -> None:
    module = nn.BatchNorm1d(2)
    average = Average(module, 0.5)
    module.running_mean.add_(1.0)  # type: ignore[union-attr]
    average.follow(100)
    assert average.state["running_mean"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("workers", [0, 2])
def test_labels_of_shards_stay_with_their_samples(workers: int, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number, count in enumerate((7, 30, 11, 5)):
        ids = np.arange(count) + 100 * number
        np.savez_compressed(folder / f"{number}.npz", x=np.repeat(ids[:, None], 4, 1).astype(np.float32), label=ids)
    signature = Signature((TensorSpec("x", "float32", ("batch", 4)),), (TensorSpec("y", "float32", ("batch", 500)),))
    whole = Dataset.open(str(folder), signature)
    order = np.random.default_rng(0).permutation(len(whole))
    for data in (whole, whole.part(np.sort(order[:40])), whole.part(order[:40])):
        sampler = Sampler(len(data), 8, 0, data.starts)
        loader = Loader(data, None, 0, workers=workers)
        for epoch in range(2):
            for batch in loader.batches(0, sampler.order(epoch)):
                assert batch.labels is not None
                assert batch.inputs["x"][:, 0].tolist() == batch.labels.tolist()


class Scores(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 2] → the same."""
        return x


def test_a_last_batch_that_is_smaller_counts_by_its_samples() -> None:
    """257 samples are judged in batches of 256 and 1; only the last is wrong."""
    x = np.zeros((257, 2), np.float32)
    x[:, 0] = 1
    labels = np.zeros(257, np.int64)
    labels[-1] = 1
    signature = Signature((TensorSpec("x", "float32", ("batch", 2)),), (TensorSpec("y", "float32", ("batch", 2)),))
    assert judged(Dataset("", {"x": x}, labels, ""), signature, None)[0] == pytest.approx(256 / 257)


def judged(data: Dataset, signature: Signature, teacher: nn.Module | None) -> tuple[float, str]:
    from lightning_fabric import Fabric

    from compress.evaluate.output_kind import form_of

    module = Scores().train()
    form = form_of(TorchModel(module, signature), "y", data.labels)
    judge = Judge(data, signature, Fabric(accelerator="cpu", devices=1), form, taught=teacher is not None)
    return judge(module, teacher), judge.metric.name


@pytest.mark.parametrize("taught", [False, True])
def test_several_labels_at_once_are_judged_by_their_loss(taught: bool) -> None:
    """Squares of logits, or which of them is the largest, would choose another epoch."""
    labels = (np.random.default_rng(0).random((300, 2)) > 0.7).astype(np.int64)
    right = np.where(labels, 5.0, -5.0).astype(np.float32)
    signature = Signature((TensorSpec("x", "float32", ("batch", 2)),), (TensorSpec("y", "float32", ("batch", 2)),))
    teacher = Scores() if taught else None
    good, bad = (judged(Dataset("", {"x": x}, labels, ""), signature, teacher) for x in (right, 0.1 * right))
    assert good[1] == "loss"
    assert good[0] == pytest.approx(np.log1p(np.exp(-5.0)), rel=1e-3)
    assert good[0] < bad[0]


@pytest.mark.parametrize(
    ("name", "shape", "labels", "why"),
    [
        ("flip", ("batch", 16), None, "no input is an image"),
        ("shift:2", ("batch", 2, 16000), None, "no input is an image"),
        ("flip", ("batch", 32, 32, 3), None, "are last"),
        ("flip", ("batch", 3, 32, 32), np.zeros((4, 32, 32), np.int64), "labels are a map"),
    ],
)
def test_changes_that_are_for_images_are_refused_elsewhere(
    name: str, shape: tuple[int | str, ...], labels: Any, why: str
) -> None:
    spec = TensorSpec("x", "float32", shape)
    out = ("batch", 5) if labels is None else ("batch", 5, 32, 32)
    model = TorchModel(nn.Identity(), Signature((spec,), (TensorSpec("y", "float32", out),)))
    data = Dataset("", {"x": np.zeros(spec.at({"batch": 4}), np.float32)}, labels, "")
    with pytest.raises(RecipeError, match="can't change the samples") as caught:
        Finetune(data, model, TrainingOptions(augment=(name,))).check(model)
    assert why in caught.value.why


def test_the_best_epoch_says_by_what_it_was_chosen_and_when_that_is_the_evaluation_data(tmp_path: Path) -> None:
    given = trained(tmp_path, hold_out=0.25)
    assert "by top1 of 25% that were held out" in given.did
    base = stage(tmp_path)
    for evaluation, found in (("other", ""), (base.data.sha256, "trained on the evaluation data")):
        notes = dataclasses.replace(base, evaluation=evaluation).seen
        assert found in "".join(notes)
        assert bool(notes) == bool(found)
    judged_by = dataclasses.replace(base, validation=dataclasses.replace(base.data, digest="v"), evaluation="v").seen
    assert "chosen by the evaluation data" in judged_by[0]


class Both(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"embedding": x.flip(1), "logits": x}


def test_epochs_are_judged_by_the_output_that_the_metric_means() -> None:
    """The second: by the first, none of these labels would be right."""
    x = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
    outputs = tuple(TensorSpec(name, "float32", ("batch", 4)) for name in ("embedding", "logits"))
    signature = Signature((TensorSpec("x", "float32", ("batch", 4)),), outputs)
    fabric = SimpleNamespace(global_rank=0, world_size=1, device="cpu", autocast=contextlib.nullcontext)
    data = Dataset("", {"x": x}, x.argmax(1), "0" * 64)
    judge = Judge(data, signature, fabric, OutputForm(OutputKind.REGRESSION), taught=True)
    assert (judge.metric.name, judge.metric.output) == ("top1", "logits")
    assert judge(Both(), None) == 1


class Maps(nn.Module):
    """A class for each place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 1, 5, 4] → [n, 3, 5, 4]."""
        return self.layers(x)  # type: ignore[no-any-return]


class Masked:
    """A torch Dataset of images and masks [1, 5, 4]."""

    def __init__(self, images: np.ndarray[Any, Any], masks: np.ndarray[Any, Any]) -> None:
        self.images, self.masks = images, masks

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        return self.images[place], self.masks[place]


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("hold_out", [0.0, 0.25])
def test_masks_with_a_dimension_of_1_teach_as_they_are_judged(lazily: bool, hold_out: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((48, 1, 5, 4)).astype(np.float32)
    masks = rng.integers(0, 3, (48, 5, 4))
    signature = Signature(
        (TensorSpec("x", "float32", ("batch", 1, 5, 4)),), (TensorSpec("output", "float32", ("batch", 3, 5, 4)),)
    )
    found = {}
    for name, labels in (("plain", masks), ("wide", masks[:, None])):
        data = Dataset("", {"x": images}, labels, "some")
        if lazily:
            fetcher = Fetcher(Masked(images, labels), ["x"], "masks")
            views = {key: Fetched(shape, kind, key, fetcher.rows) for key, (shape, kind) in fetcher.specs.items()}
            data = Dataset("", {"x": views["x"]}, views["label"], "some", fetcher=fetcher)
        model = TorchModel(Maps().eval(), signature)
        options = TrainingOptions(epochs=1, batch_size=16, hold_out=hold_out, train_precision="32", loader_workers=0)
        training = Finetune(data, None, options)
        training.check(model)
        (tmp_path / name).mkdir()
        given = training.run(model, tmp_path / name, quiet)
        assert given.details["outputs"]["output"]["taken_as"] == "dense"
        assert not any("don't count" in warning for warning in given.warnings)
        assert isinstance(given.model, TorchModel)
        found[name] = given.model.module.state_dict()
    assert all(torch.equal(found["wide"][key], values) for key, values in found["plain"].items())


def test_class_ids_in_a_column_teach() -> None:
    signature = Signature((TensorSpec("x", "float32", ("batch", 6)),), (TensorSpec("y", "float32", ("batch", 3)),))
    x = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)
    model = TorchModel(nn.Linear(6, 3).eval(), signature)
    training = Finetune(
        Dataset("", {"x": x}, np.arange(40)[:, None] % 3, "some"), None,
        TrainingOptions(epochs=1, batch_size=8, train_precision="32", loader_workers=0),
    )  # fmt: skip
    training.check(model)
    assert forms_of(model, squeezed(training.data, signature).labels)[0][0].because == "the labels are class ids"


def test_numbers_whose_labels_are_no_classes_are_not_taught_as_class_scores() -> None:
    signature = Signature((TensorSpec("x", "float32", ("batch", 6)),), (TensorSpec("y", "float32", ("batch", 3)),))
    model = TorchModel(nn.Linear(6, 3).eval(), signature)
    kinds = {
        name: forms_of(model, labels)[0][0].kind
        for name, labels in {
            "none": None, "ids": np.arange(40) % 3, "whole": np.arange(40, dtype=np.float32) % 3,
            "likeness": np.linspace(0, 1, 40), "pairs": np.zeros((40, 2), np.int64),
        }.items()
    }  # fmt: skip
    told = (OutputKind.SOFTMAX,) * 3 + (OutputKind.EMBEDDING,) * 2
    assert tuple(kinds.values()) == told
