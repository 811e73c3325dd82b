"""Recovery: the student comes back to its teacher, the same way each time."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from compress.artifact import TensorSpec
from compress.data.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.model import TorchModel
from compress.model.infer import infer_signature
from compress.options.training import TrainingOptions
from compress.prune.prune_channels import PruneChannels
from compress.training.finetune import Finetune
from tests.unit.compress.prune.test_prune_channels import loaded, quiet


def data_for(model: TorchModel, folder: Path, count: int = 130) -> Dataset:
    """Random inputs; the labels are the model's own answers."""
    x = np.random.default_rng(0).standard_normal((count, *model.signature.inputs[0].shape[1:])).astype(np.float32)  # type: ignore[arg-type]
    with torch.no_grad():
        answers = model.module(torch.from_numpy(x)).argmax(1).numpy()
    np.savez(folder / "train.npz", **{model.signature.inputs[0].name: x}, label=answers)  # type: ignore[arg-type]
    return Dataset.open(str(folder / "train.npz"), model.signature)


def trained(folder: Path) -> tuple[TorchModel, Dataset]:
    """A network that has learnt to tell five noisy patterns apart, and their images."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 320)
    x = rng.standard_normal((5, 3, 16, 16))[labels] + 2 * rng.standard_normal((320, 3, 16, 16))
    np.savez(folder / "train.npz", image=x.astype(np.float32), label=labels)
    model = loaded("residual")
    data = Dataset.open(str(folder / "train.npz"), model.signature)
    images, answers = torch.from_numpy(data.inputs["image"]), torch.from_numpy(labels)
    optimizer = torch.optim.Adam(model.module.parameters(), 3e-3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.module.train()
        for _ in range(6):
            for index in torch.split(torch.randperm(320), 64):
                optimizer.zero_grad()
                F.cross_entropy(model.module(images[index]), answers[index]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        model.module.eval()
    return model, data


def accuracy(model: TorchModel, data: Dataset) -> float:
    with torch.no_grad():
        answers = model.module(torch.from_numpy(data.inputs["image"])).argmax(1).numpy()
    return float((answers == data.labels).mean())


def test_a_pruned_model_recovers_what_it_lost(tmp_path: Path) -> None:
    teacher, data = trained(tmp_path)
    pruned = PruneChannels(0.7).run(teacher, tmp_path, quiet).model
    assert isinstance(pruned, TorchModel)
    given = Finetune(data, teacher, TrainingOptions(epochs=6)).run(pruned, tmp_path, quiet)
    assert isinstance(given.model, TorchModel)
    assert accuracy(teacher, data) > 0.95
    assert accuracy(pruned, data) < 0.8
    assert accuracy(given.model, data) > 0.95
    assert given.details["loss_last_epoch"] < 0.5 * given.details["loss_first_epoch"]
    assert not given.model.module.training


def test_the_same_seed_gives_the_same_weights_and_the_input_stays(tmp_path: Path) -> None:
    teacher = loaded("mlp")
    data = data_for(teacher, tmp_path)
    before = teacher.module.get_parameter("0.weight").clone()
    runs = [
        Finetune(data, teacher, TrainingOptions(epochs=2), seed).run(teacher, tmp_path, quiet).model
        for seed in (1, 1, 2)
    ]
    first, again, other = (run.module.get_parameter("0.weight") for run in runs if isinstance(run, TorchModel))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(teacher.module.get_parameter("0.weight"), before)


def test_outputs_that_are_no_classes_are_taught_without_labels(tmp_path: Path) -> None:
    teacher = loaded("hourglass")
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((16, 3, 16, 16)).astype(np.float32))
    data = Dataset.open(str(tmp_path / "x.npy"), teacher.signature)
    pruned = PruneChannels(0.3).run(teacher, tmp_path, quiet).model
    assert isinstance(pruned, TorchModel)
    given = Finetune(data, teacher, TrainingOptions(epochs=4, batch_size=8)).run(pruned, tmp_path, quiet)
    assert given.details["loss_last_epoch"] < given.details["loss_first_epoch"]


def test_a_training_that_diverges_is_an_error_not_a_model(tmp_path: Path) -> None:
    teacher = loaded("residual")
    with pytest.raises(StageError) as caught:
        Finetune(data_for(teacher, tmp_path), teacher, TrainingOptions(epochs=3, learning_rate=1e30)).run(
            teacher, tmp_path, quiet
        )
    assert "diverged" in caught.value.what
    assert "--learning-rate" in caught.value.mend


def test_a_last_batch_of_one_does_not_break_batch_normalization(tmp_path: Path) -> None:
    teacher = loaded("residual")
    Finetune(data_for(teacher, tmp_path, count=33), teacher, TrainingOptions(epochs=1, batch_size=32)).run(
        teacher, tmp_path, quiet
    )


@pytest.mark.parametrize(
    "options", [{"epochs": 0}, {"batch_size": 1}, {"learning_rate": 0.0}, {"learning_rate": float("nan")}, {"distillation": 2.0}]
)  # fmt: skip
def test_options_out_of_range_are_refused_before_any_work(tmp_path: Path, options: dict[str, float]) -> None:
    teacher = loaded("mlp")
    with pytest.raises(RecipeError, match="can't finetune"):
        Finetune(data_for(teacher, tmp_path), teacher, TrainingOptions(**options)).check(teacher)  # type: ignore[arg-type]


@pytest.mark.parametrize(("loss", "learns"), [("auto", True), ("dense", False)])
def test_a_training_that_has_nothing_to_learn_is_said_to_have(tmp_path: Path, loss: Any, learns: bool) -> None:
    """A softmax over the one channel of a heatmap gives 1 everywhere, whatever the network answers."""
    torch.manual_seed(0)
    heat = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.Flatten(), torch.nn.Softmax(1)).eval()
    heat.append(torch.nn.Unflatten(1, (1, 4, 4)))
    model = TorchModel(heat, infer_signature(heat, (TensorSpec.parse("x:float32[batch,1,4,4]"),)))
    np.savez(tmp_path / "train.npz", x=np.random.default_rng(0).standard_normal((40, 1, 4, 4)).astype(np.float32))
    teacher = copy.deepcopy(heat)
    with torch.no_grad():
        next(teacher.parameters()).mul_(2)
    data = Dataset.open(str(tmp_path / "train.npz"), model.signature)
    stage = Finetune(data, dataclasses.replace(model, module=teacher), TrainingOptions(epochs=2, loss=loss))
    given = stage.run(model, tmp_path, quiet)
    assert ("Nothing was learned" in " ".join(given.warnings)) is not learns
    assert isinstance(given.model, TorchModel)
    moved = [not torch.equal(a, b) for a, b in zip(given.model.module.parameters(), heat.parameters(), strict=True)]
    assert any(moved) or not learns
