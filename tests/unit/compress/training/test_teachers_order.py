"""A teacher's inputs and outputs are matched with the student's by name, whatever order they have in either file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import compress
from compress.cli import main
from compress.errors import SignatureError
from compress.evaluate.endings import endings_of
from compress.formats.checkpoint import load
from compress.model import TorchModel, call
from compress.model.in_order import InOrder, in_order_of, places_of
from compress.signature import TensorSpec

WIDE, CLASSES = 6, 3


class Two(nn.Module):
    """Classes of one input and numbers of another, each a layer; in the order that is asked for."""

    def __init__(self, *, turned: bool, seed: int = 0, shares: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.a, self.b = nn.Linear(WIDE, 8), nn.Linear(8, CLASSES), nn.Linear(WIDE, CLASSES)
        self.turned, self.shares = turned, shares

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, 6] twice → [n, 3] twice."""
        x, y = (second, first) if self.turned else (first, second)
        classes, values = self.a(torch.relu(self.body(x))), self.b(y)
        classes = torch.softmax(classes, 1) if self.shares else classes
        return (values, classes) if self.turned else (classes, values)


def saved(folder: Path, name: str, *, turned: bool = False, named: str = "xyab", **made: Any) -> TorchModel:
    x, y, a, b = list(named)
    inputs = [f"{x}:float32[batch,{WIDE}]", f"{y}:float32[batch,{WIDE}]"]
    outputs = [a, b]
    module = Two(turned=turned, **made).eval()
    ends = (inputs[::-1], outputs[::-1]) if turned else (inputs, outputs)
    path = compress.save(module, folder / f"{name}.pt", inputs=ends[0], outputs=ends[1])
    return load(path)


def data(folder: Path, teacher: TorchModel) -> None:
    rng = np.random.default_rng(0)
    for name in ("train", "eval"):
        given = {key: rng.standard_normal((256, WIDE)).astype(np.float32) for key in "xy"}
        with torch.no_grad():
            found = call(teacher.module, teacher.signature.inputs, given)
        np.savez(folder / f"{name}.npz", **given, label=next(iter(found.values())).argmax(1).numpy())  # type: ignore[arg-type]


def finetuned(*words: str) -> tuple[int, dict[str, Any]]:
    asked = ["student.pt", "--data", "train.npz", "--eval", "eval.npz", "--judge", "a", "--epochs", "2", "-o", "out"]
    with pytest.raises(SystemExit) as ended:
        main(["finetune", *asked, "--learning-rate", "0.05", "--no-cache", *words])
    told = Path("out/training.json")
    return int(ended.value.code or 0), json.loads(told.read_text()) if told.exists() else {}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    data(tmp_path, saved(tmp_path, "teacher", seed=1))
    saved(tmp_path, "student", seed=2)
    saved(tmp_path, "turned", turned=True, seed=1)
    return tmp_path


@pytest.mark.parametrize("words", [(), ("--distillation", "1"), ("--feature-weight", "1")])
@pytest.mark.usefixtures("folder")
def test_the_order_in_the_teachers_file_changes_nothing(words: tuple[str, ...]) -> None:
    found = []
    for teacher in ("teacher.pt", "turned.pt"):
        code, told = finetuned("--teacher", teacher, *words)
        assert code == 0
        assert told["training"]["outputs"]["a"]["taken_as"] == "softmax"
        assert not any("labels teach 'b'" in said or "other names" in said for said in told["warnings"])
        found.append((told["rows"], told["training"]["loss_last_epoch"]))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)


def test_other_names_are_taken_by_their_order_and_that_is_told(folder: Path) -> None:
    saved(folder, "renamed", seed=1, named="uvcd")
    code, told = finetuned("--teacher", "renamed.pt")
    assert code == 0
    (said,) = [words for words in told["warnings"] if "other names" in words]
    assert "inputs by their order (x as u, y as v) and outputs by their order (a as c, b as d)" in said
    assert told["rows"][0]["value"] == 1


def test_names_of_which_some_are_the_same_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(folder, "mixed", seed=1, named="xyca")
    assert finetuned("--teacher", "mixed.pt")[0] == 2
    said = capsys.readouterr().err
    assert "mixed.pt can't teach student.pt" in said
    assert "its outputs are c:float32[batch,3], a:float32[batch,3]" in said


def specs(*texts: str) -> tuple[TensorSpec, ...]:
    return tuple(map(TensorSpec.parse, texts))


def test_what_a_dimension_that_varies_is_called_says_nothing() -> None:
    ours, theirs = specs("a:float32[batch,length,6]", "b:float32[batch,6]"), specs("b:float32[n,6]", "a:float32[n,t,6]")
    assert places_of(ours, theirs) == (1, 0)


@pytest.mark.parametrize(
    "theirs", ["a:float32[n,7]", "a:float32[4,6]", "a:float32[n,t]", "a:float64[n,6]", "a:float32[n,6,1]"]
)
def test_what_is_fixed_and_the_type_are_the_same(theirs: str) -> None:
    with pytest.raises(SignatureError, match="the shapes don't fit"):
        places_of(specs("a:float32[batch,6]"), specs(theirs))


def test_a_model_in_another_order_is_the_same_model(tmp_path: Path) -> None:
    straight, turned = (saved(tmp_path, f"t{at}", turned=bool(at), seed=1, shares=True) for at in (0, 1))
    there = in_order_of(turned, straight.signature)
    assert isinstance(there.module, InOrder)
    given = {key: torch.randn(4, WIDE) for key in "xy"}
    for mine, its in zip(
        call(there.module, there.signature.inputs, given).values(),
        call(straight.module, straight.signature.inputs, given).values(),
        strict=True,
    ):
        torch.testing.assert_close(mine, its)
    assert endings_of(there) == endings_of(straight) == {"a": "softmax", "b": None}
    assert in_order_of(straight, straight.signature).module is straight.module
