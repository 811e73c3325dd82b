"""What another process is told of a training is all of it: a field that stays behind would train something else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import compress
from compress.data.dataset import Dataset
from compress.errors import RecipeError
from compress.model import TorchModel
from compress.options.training import TrainingOptions
from compress.quantize.qat.train_quantized import TrainQuantized
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.training.finetune import Finetune
from compress.training.in_processes import Shared, _describe, read_job

ASKED = TrainingOptions(
    epochs=3, devices=2, augment=("flip",), freeze=("1.*",), tensorboard=Path("logs"), batch_size=8, train_threads=3
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("told")
    for name in ("student", "teacher"):
        compress.save(nn.Linear(4, 3), folder / f"{name}.pt", inputs="x:float32[batch,4]", outputs=["scores"])
    for name in ("train", "validation", "calibration"):
        np.savez(folder / f"{name}.npz", x=np.ones((8, 4), np.float32), label=np.zeros(8, np.int64))
    return folder


def stages(folder: Path) -> tuple[TorchModel, Finetune, TrainQuantized]:
    """All fields differ from their defaults."""
    model, teacher = compress.load(folder / "student.pt"), compress.load(folder / "teacher.pt")
    train, validation, calibration = (
        Dataset.open(str(folder / f"{name}.npz"), model.signature) for name in ("train", "validation", "calibration")
    )
    tuned = Finetune(train, teacher, ASKED, 7, validation, "hash", "scores", trial=True)
    quantize = QuantizeOnnx("static", calibration, "entropy", True, "tensorrt", ("node",))
    return model, tuned, TrainQuantized(tuned, "tensorrt", quantize, True)


def plain(value: Any) -> Any:
    """To be compared: a model by what it computes, data by what it holds."""
    if isinstance(value, TorchModel):
        return {name: tensor.tolist() for name, tensor in value.module.state_dict().items()}
    if isinstance(value, Dataset):
        return value.source, value.sha256
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


@pytest.mark.parametrize("which", [1, 2], ids=["finetune", "train_quantized"])
def test_every_option_of_a_training_goes_over_to_its_processes(folder: Path, which: int) -> None:
    model, stage = stages(folder)[0], stages(folder)[which]
    assert isinstance(stage, Finetune | TrainQuantized)
    defaults = {field.name: field.default for field in dataclasses.fields(stage)}
    assert not [name for name, usual in defaults.items() if getattr(stage, name) == usual], "a new field belongs here"
    shared: Shared = stage
    _describe(shared, model, folder)
    with read_job(folder) as (again, _):
        pass
    assert plain(again) == plain(stage)
    assert again.options == stage.options


def test_data_in_memory_alone_is_refused(folder: Path) -> None:
    model, tuned, _ = stages(folder)
    kept = dataclasses.replace(tuned, validation=dataclasses.replace(tuned.data, place=""))
    with pytest.raises(RecipeError, match="several processes"):
        _describe(kept, model, folder)


def test_a_description_is_plain_data(folder: Path) -> None:
    for stage in stages(folder)[1:]:
        assert isinstance(stage, Finetune | TrainQuantized)
        assert json.loads(json.dumps(stage.described())).keys() == stage.described().keys()
