"""What is kept from before is kept under all that decides an answer: two models that answer differently are two."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compress
from compress import ExportOptions
from compress.artifact import TensorSpec
from compress.errors import RecipeError
from compress.formats.checkpoint import fingerprint
from compress.jobs.export import prepare
from compress.jobs.measure import measure_files
from compress.jobs.sensitivity import sensitivity
from compress.model import TorchModel
from compress.model.infer import infer_signature
from compress.options import MeasureOptions, SensitivityOptions
from compress.storage.hashing import digest_of_code


def model_of(module: nn.Module, spec: str) -> TorchModel:
    module.eval()
    return TorchModel(module, infer_signature(module, (TensorSpec.parse(spec),)))


def encoder(**given: Any) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoderLayer(8, dim_feedforward=16, batch_first=True, **({"nhead": 2} | given))


PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "what a pool counts": (
        lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=True),
        lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        "x:float32[batch,3,8,8]",
    ),
    "where corners lie": (
        lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
        "x:float32[batch,3,8,8]",
    ),
    "an encoder layer's heads": (encoder(), encoder(nhead=4), "x:float32[batch,5,8]"),
    "an encoder layer's order": (encoder(), encoder(norm_first=True), "x:float32[batch,5,8]"),
    "an encoder layer's activation": (encoder(), encoder(activation="gelu"), "x:float32[batch,5,8]"),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_layers_that_are_made_differently_are_told_apart_though_they_look_and_weigh_alike(pair: str) -> None:
    one, other, spec = PAIRS[pair]
    found = []
    for make in (one, other, one):
        torch.manual_seed(0)
        found.append(fingerprint(model_of(make(), spec)))
    assert found[0] == found[2] != found[1]


class Untraceable(nn.Module):
    def __init__(self, gain: float, table: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.gain, self.table = gain, table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.layer(x)
        return answer * self.gain + self.table if x.sum() > 0 else answer


def test_plain_attributes_count_where_the_graph_is_not_known() -> None:
    found = []
    for gain, last in itertools.product((1.0, 5.0), (0.0, 1.0)):
        torch.manual_seed(0)
        module = Untraceable(gain, torch.tensor([1.0, 2.0, 3.0, last]))
        found.append(fingerprint(model_of(module, "x:float32[batch,4]")))
    torch.manual_seed(0)
    again = fingerprint(model_of(Untraceable(1.0, torch.tensor([1.0, 2.0, 3.0, 0.0])), "x:float32[batch,4]"))
    assert len(set(found)) == 4
    assert again == found[0]


def test_code_that_is_imported_from_another_folder_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("app", "lib"):
        (tmp_path / folder).mkdir()
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    (tmp_path / "app" / "their_metric.py").write_text("from their_helper import W\ndef score(a, b): return W\n")
    found = []
    for weight in ("1.0", "2.0"):
        (tmp_path / "lib" / "their_helper.py").write_text(f"W = {weight}\n")
        found.append(digest_of_code("their_metric:score"))
    sys.modules.pop("their_metric", None)
    assert found[0] != found[1]


def test_a_sensitivity_of_another_model_is_refused(tmp_path: Path) -> None:
    import numpy as np

    data = np.random.default_rng(0).standard_normal((60, 8)).astype(np.float32)
    np.savez(tmp_path / "eval.npz", x=data, label=np.arange(60) % 3)
    for seed in (0, 1):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        compress.save(module, tmp_path / f"{seed}.pt", inputs="x:float32[batch,8]")
    options = SensitivityOptions(output=tmp_path / "found", eval=str(tmp_path / "eval.npz"), ratios=(0.5,))
    sensitivity(tmp_path / "0.pt", options)
    asked = ExportOptions(output=tmp_path / "out", prune=0.3, sensitivity=tmp_path / "found")
    assert prepare(tmp_path / "0.pt", asked).stages
    with pytest.raises(RecipeError, match="of another model"):
        prepare(tmp_path / "1.pt", asked)


@pytest.mark.parametrize(
    "given",
    [
        {"max_drop": float("nan")}, {"max_drop": float("inf")}, {"seed": -5}, {"batches": (0,)}, {"batches": (-3,)},
        {"thread_counts": (0,)}, {"threads": 0}, {"threads": 1_000_000}, {"prune": float("nan")},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused_before_the_work(tmp_path: Path, given: dict[str, object]) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    compress.save(module, tmp_path / "m.pt", inputs="x:float32[batch,8]")
    with pytest.raises(RecipeError, match=f"--{next(iter(given)).replace('_', '-')} can't be"):
        prepare(tmp_path / "m.pt", ExportOptions(output=tmp_path / "out", **given))  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="--rounds can't be 0"):
        measure_files([tmp_path / "m.pt"], MeasureOptions(rounds=0))
