"""Training under 8 bits: what comes out bears them better than what went in."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import compress
from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.formats.checkpoint import write
from compress.model import TorchModel, call
from compress.options.training import TrainingOptions
from compress.quantize.qat.train_quantized import TrainQuantized, shorter
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.runtime.backends import OnnxBackend
from compress.training.finetune import Finetune
from tests.families import family
from tests.unit.compress.prune.test_prune_channels import quiet, wrapped
from tests.unit.compress.quantize.test_half_onnx import exported


def training(model: TorchModel, count: int = 512, **options: object) -> Finetune:
    shapes = {spec.name: spec.at({"batch": count}) for spec in model.signature.inputs}
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    seed = int(options.pop("seed", 0))  # type: ignore[call-overload]
    asked = TrainingOptions(**{"epochs": 6, "learning_rate": 1e-3, **options})  # type: ignore[arg-type]
    return Finetune(Dataset("", inputs, None, "train"), model, asked, seed)


def unlike() -> nn.Module:
    """One hidden unit is far larger than the others, so that the range of all is coarse."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 6))
    with torch.no_grad():
        module.get_parameter("0.weight")[0] *= 400
        module.get_parameter("2.weight")[:, 0] /= 400
    return module.eval()


def int8_error(trained: TorchModel, original: TorchModel, data: Dataset, folder: Path) -> float:
    """Mean squared difference of the INT8 file to the original, relative to its power."""
    model = exported(trained.module, ("x:float32[batch,8]",), folder)
    model = dataclasses.replace(model, ranges=trained.ranges)
    int8 = QuantizeOnnx("static", data).run(model, folder / "next", quiet).model
    got = next(iter(OnnxBackend(int8, 1).infer(data.inputs).values()))  # type: ignore[arg-type]
    with torch.no_grad():
        want = next(iter(call(original.module, original.signature.inputs, data.inputs).values())).numpy()
    return float(np.square(got - want).mean() / np.square(want).mean())


def test_int8_after_it_is_nearer_to_the_original(tmp_path: Path) -> None:
    original = wrapped(unlike(), "x:float32[batch,8]")
    trained = TrainQuantized(training(original, epochs=20, learning_rate=3e-3)).run(original, tmp_path, quiet)
    data = training(original).data
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    before = int8_error(original, original, data, tmp_path / "before")
    assert isinstance(trained.model, TorchModel)
    after = int8_error(trained.model, original, data, tmp_path / "after")
    assert after < 0.5 * before
    (tmp_path / "anew").mkdir()
    anew = int8_error(dataclasses.replace(trained.model, ranges={}), original, data, tmp_path / "anew")
    assert after < 0.9 * anew, "what the training learned of ranges is worth something"


@pytest.mark.parametrize("name", ["residual", "hourglass", "vit", "inverted", "lstm"])
def test_a_family_is_trained_and_stays_plain(name: str, tmp_path: Path) -> None:
    """No parametrization, no hook and no wrapper is left: it can be written and loaded again."""
    module, inputs = family(name)
    loaded = compress.load(compress.save(module, tmp_path / "in.pt", inputs=list(inputs)))
    given = TrainQuantized(training(loaded, 32, epochs=1)).run(loaded, tmp_path, quiet)
    assert isinstance(given.model, TorchModel)
    write(given.model, tmp_path / "out.pt")
    again = compress.load(tmp_path / "out.pt").module.state_dict()
    trained, before = given.model.module.state_dict(), loaded.module.state_dict()
    assert all(torch.equal(again[key], value) for key, value in trained.items())
    assert any(not torch.equal(before[key], value) for key, value in trained.items())
    running = [key for key in before if "running" in key]
    assert all(torch.equal(before[key], trained[key]) for key in running), "batch statistics are kept"
    assert given.details["layers"] > 0
    left = set(given.details["left_float"].values())
    assert left == set()
    # The matrices of a recurrent layer are rounded when they are stored; the report names them.
    assert len(given.details["not_simulated"]) <= (3 if name == "lstm" else 0)
    off = given.details["off_levels"]
    assert off.keys() == {spec.name for spec in loaded.signature.outputs}
    assert all(levels["rms"] < 0.5 for levels in off.values()), f"what is exported is what was trained: {off}"


def test_the_seed_decides(tmp_path: Path) -> None:
    model = wrapped(unlike(), "x:float32[batch,8]")

    def weights(seed: int) -> torch.Tensor:
        given = TrainQuantized(training(model, 64, epochs=1, seed=seed)).run(model, tmp_path, quiet)
        return given.model.module.get_parameter("2.weight")  # type: ignore[union-attr]

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_model_without_such_layers_is_an_error(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    model = wrapped(Scaled(), "x:float32[batch,4]")
    with pytest.raises(StageError, match="nothing to train for INT8"):
        TrainQuantized(training(model, 8)).run(model, tmp_path, quiet)


def test_the_target_is_among_the_options() -> None:
    model = wrapped(unlike(), "x:float32[batch,8]")
    options = [TrainQuantized(training(model), target).options for target in ("cpu", "tensorrt")]
    assert options[0] != options[1]
    assert shorter(training(model), 20, 0.25, 0.1).training.epochs == 5
