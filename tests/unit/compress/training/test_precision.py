"""In which numbers a network is trained that autocast does not wholly cover."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.model import TorchModel
from compress.options.training import TrainingOptions
from compress.training.finetune import Finetune
from compress.training.updates import precision


class Pairs(nn.Module):
    """nn.Bilinear takes no inputs in bfloat16 beside weights in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 8)
        self.pairs = nn.Bilinear(8, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 6] → [n, 3]."""
        hidden = torch.tanh(self.inner(x))
        out: torch.Tensor = self.pairs(hidden, hidden)
        return out


def fit(asked: str) -> Callable[[], tuple[str, ...]]:
    signature = Signature((TensorSpec("x", "float32", ("batch", 6)),), (TensorSpec("y", "float32", ("batch", 3)),))
    x = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32)
    options = TrainingOptions(epochs=1, train_precision=asked, compile="off", accelerator="cpu")  # type: ignore[arg-type]
    student = TorchModel(Pairs().eval(), signature)
    stage = Finetune(Dataset("", {"x": x}, np.arange(32) % 3, ""), TorchModel(Pairs().eval(), signature), options)
    return lambda: stage.fit(student.module, signature, lambda *_: None).warnings


def test_a_network_that_does_not_run_in_bfloat16_is_trained_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "fast_bfloat16", lambda: True)
    assert any("trained in float32" in warning for warning in fit("auto")())


def test_a_network_that_does_not_run_in_what_was_asked_for_is_refused() -> None:
    with pytest.raises(StageError, match="does not run in bf16-mixed"):
        fit("bf16-mixed")()
