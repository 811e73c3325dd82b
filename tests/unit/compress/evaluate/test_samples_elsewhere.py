"""An output [tokens, samples, classes] is not held against labels [samples, tokens], whatever their sizes are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import compress
from compress.data.dataset import Dataset
from compress.errors import RecipeError
from compress.evaluate.evaluation import judged
from compress.model import TorchModel


class TokensFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.transpose(self.layer(x), 0, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TorchModel:
    path = tmp_path_factory.mktemp("tokens") / "model.pt"
    compress.save(TokensFirst(), path, inputs="x:float32[batch,seq,4]", outputs=["logits"])
    found = compress.load(path)
    assert isinstance(found, TorchModel)
    return found


def data(path: Path, tokens: int, *, labels: bool) -> str:
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {"x": random.standard_normal((12, tokens, 4)).astype(np.float32)}
    arrays |= {"label": random.integers(0, 3, (12, tokens))} if labels else {}
    np.savez(path, **arrays)
    return str(path)


@pytest.mark.parametrize("tokens", [12, 7])
@pytest.mark.parametrize("metric", [None, "pixel_accuracy"])
def test_labels_are_refused(model: TorchModel, tmp_path: Path, tokens: int, metric: str | None) -> None:
    samples = Dataset.open(data(tmp_path / "1.npz", tokens, labels=True), model.signature)
    with pytest.raises(RecipeError, match="can't judge 'logits' by pixel_accuracy") as caught:
        judged(samples, metric, None, model)
    assert caught.value.why.startswith("'logits' is float32[seq, batch, 3]: samples are its dimension 2")


def test_without_labels_it_is_told(model: TorchModel, tmp_path: Path) -> None:
    samples = Dataset.open(data(tmp_path / "1.npz", 7, labels=False), model.signature)
    _, metric, notes = judged(samples, "cosine", None, model)
    assert metric.name == "cosine"
    assert any("its samples do not come first" in note for note in notes)
