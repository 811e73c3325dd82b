"""What an output is does not hang on the order of the samples, and is the same in an evaluation and in a training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.evaluate.endings import unbounded_of
from compress.evaluate.evaluation import judged
from compress.evaluate.judge import Judge
from compress.evaluate.output_forms import forms_by
from compress.model import OnnxModel, TorchModel
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.runtime.backends import open_model
from tests.unit.compress.prune.test_prune_channels import quiet

N = 400


class Shifted(nn.Module):
    """Gives its input, clipped: no layer whose kind the graph could tell by."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.low, self.high = low, high

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).clamp(self.low, self.high)


def model(module: nn.Module) -> TorchModel:
    specs = (TensorSpec("x", "float32", ("batch", 1)),), (TensorSpec("y", "float32", ("batch", 1)),)
    return TorchModel(module.eval(), Signature(*specs))


def linear() -> nn.Module:
    layer = nn.Linear(1, 1)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.zero_()
    return layer


def sorted_by_label(low: float, high: float) -> Dataset:
    """The first samples are positive, and their logits lie between 0 and 1."""
    x = np.concatenate([np.linspace(0.01, 0.4, N // 2), np.linspace(low, high, N // 2)]).astype(np.float32)
    return Dataset("", {"x": x[:, None]}, (np.arange(N) < N // 2).astype(np.int64), "0" * 64)


@pytest.mark.parametrize(
    ("module", "low", "threshold"),
    [
        (linear(), -1.0, 0.0),
        (Shifted(-5, 5), -1.0, 0.0),
        (Shifted(-5, 5), 0.0, 0.5),
        (Shifted(0, 1), 0.0, 0.5),
        (nn.Sequential(linear(), nn.Sigmoid()), -1.0, 0.5),
    ],
)
def test_the_order_of_the_samples_changes_no_metric(module: nn.Module, low: float, threshold: float) -> None:
    given, original = sorted_by_label(low, 0.0), model(module)
    found = []
    for order in (np.arange(N), np.arange(N)[::-1], np.random.default_rng(0).permutation(N)):
        data, metric, notes = judged(given.part(order), None, None, original)
        assert metric.threshold == threshold
        assert any(f"above {threshold:g}" in note for note in notes)
        found.append(Judge(open_model(original, threads=1), data, metric).original)
    assert len(set(found)) == 1


def test_one_sample_beyond_1_among_all_of_them_tells_logits() -> None:
    given = sorted_by_label(0.0, 0.0)
    given.inputs["x"][17] = 1.5  # between those that are spread over the data
    _, metric, _ = judged(given, None, None, model(Shifted(-5, 5)))
    assert metric.threshold == 0


@pytest.mark.parametrize(
    ("module", "ending"),
    [(linear(), None), (Shifted(-5, 5), "sigmoid"), (nn.Sequential(linear(), nn.Sigmoid()), "sigmoid")],
)
def test_a_training_takes_an_output_for_what_an_evaluation_does(module: nn.Module, ending: Any) -> None:
    """All values are from 0 to 1: only what may give any number is a logit then."""
    given, original = sorted_by_label(0.0, 0.3), model(module)
    (form,), _ = forms_by(original, given)
    _, metric, _ = judged(given, None, None, original)
    assert form.ending == ending
    assert metric.threshold == (0.0 if ending is None else 0.5)


def test_vectors_of_length_1_are_an_embedding_to_both() -> None:
    class Unit(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            lengths = x.square().sum(1, keepdim=True) + 1e-12
            return x * lengths.rsqrt()

    specs = (TensorSpec("x", "float32", ("batch", 4)),), (TensorSpec("y", "float32", ("batch", 4)),)
    original = TorchModel(Unit().eval(), Signature(*specs))
    x = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
    given = Dataset("", {"x": x}, None, "0" * 64)
    assert judged(given, None, None, original)[1].name == "cosine"
    (form,), _ = forms_by(original, given)
    assert form.kind == "embedding"


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (linear(), {"y"}),
        (nn.Sequential(linear(), nn.Flatten()), {"y"}),
        (nn.Sequential(linear(), nn.ReLU()), set()),
        (Shifted(0, 1), set()),
        (nn.Identity(), set()),
    ],
)
def test_what_gives_any_number_is_found_in_torch_and_in_onnx(module: nn.Module, found: set[str], tmp_path: Any) -> None:
    original = model(module)
    assert unbounded_of(original) == found
    onnx = OnnxFromTorch().run(original, tmp_path, quiet).model
    assert isinstance(onnx, OnnxModel)
    assert unbounded_of(onnx) == found
