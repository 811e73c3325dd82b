"""A network whose calls take a fixed number of samples, more than one, is given them in wholes of that number."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import compress
from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.errors import RecipeError
from compress.evaluate.halves import halves
from compress.evaluate.judge import spread
from compress.options import ExportOptions
from compress.training.batches.loader import example


class Unlike(nn.Module):
    """An amount of thousands and two scores, in one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 3)
        with torch.no_grad():
            self.b.weight[0] *= 8e3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))  # type: ignore[no-any-return]


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize(
    ("samples", "judged", "runtime"),
    [(4, False, "auto"), (4, True, "onnxruntime"), (16, False, "onnxruntime"), (64, True, "openvino")],
)
def test_it_is_exported_with_data_and_what_8_bits_lose_is_told(
    samples: int,
    judged: bool,
    runtime: Literal["auto", "onnxruntime", "openvino"],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMPRESS_MEASURE_SECONDS", "0")
    compress.save(Unlike().eval(), tmp_path / "model.pt", inputs=f"x:float32[{samples},8]", outputs=["y"])
    x = np.random.default_rng(0).normal(size=(samples, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x)
    source = str(tmp_path / "data.npz")
    asked = ExportOptions(
        output=tmp_path / "a", int8="static", calibration=source, eval=source if judged else None, runtime=runtime
    )
    _, report = compress.export(tmp_path / "model.pt", asked)
    last = report.stages[-1]
    assert last.details["outputs_lost"]["samples"] == samples
    assert last.details["outputs_lost"]["column_share"] > 0.5
    assert any("INT8 loses" in warning for warning in last.warnings)


def data_of(calls: int, call: int) -> Dataset:
    return Dataset("", {"x": np.arange(calls * call)[:, None]}, None, "data", call=call)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 99))
def test_whatever_is_taken_of_data_is_whole_calls(calls: int, call: int, asked: int) -> None:
    data = data_of(calls, call)
    taken: list[Mapping[str, Any]] = [
        data.first(asked),
        *(inputs for inputs, _ in data.batches(asked)),
        spread(data, asked).take(slice(None))[0],
        example(data, asked).inputs,
    ]
    for inputs in taken:
        rows = np.asarray(inputs["x"])[:, 0].reshape(-1, call)
        assert (rows[:, 0] % call == 0).all()
        assert (rows == rows[:, :1] + np.arange(call)).all()


@pytest.mark.parametrize(
    ("inputs", "call"),
    [
        (["x:float32[4,8]"], 4),
        (["x:float32[1,8]"], 1),
        (["x:float32[batch,8]"], 1),
        (["x:float32[4,8]", "m:bool[4]"], 4),
        (["x:float32[4,8]", "m:bool[2,8]"], 1),
        (["x:float32[4,8]", "t:float32[]"], 1),
        (["q:float32[4,8]", "x:float32[batch,8]"], 1),
    ],
)
def test_a_call_takes_what_all_inputs_begin_with(inputs: list[str], call: int) -> None:
    assert Signature(tuple(map(TensorSpec.parse, inputs)), ()).call == call


def test_one_call_is_not_parted_into_halves() -> None:
    with pytest.raises(RecipeError, match="samples of one call"):
        halves(data_of(1, 4))
