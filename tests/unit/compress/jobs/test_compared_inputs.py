"""Two runtimes are held against each other at as many rows as a server may join, whatever the data has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import compress
from compress.artifact import Artifact, Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.evaluate.runtime_choice import distances
from compress.jobs.compared_inputs import COMPARED, MANY, compared_inputs, joined, sizes_of
from compress.jobs.measure import measure_files
from compress.jobs.measure_report import measure_table
from compress.jobs.serving_runtime import apart
from compress.model import Arrays, OnnxModel
from compress.options import ExportOptions, MeasureOptions
from compress.runtime.backends import open_model


def signature(*shape: int | str) -> Signature:
    return Signature((TensorSpec("x", "float32", shape),), (TensorSpec("y", "float32", shape),))


class Echo:
    """It gives what it is given, as far as it takes it."""

    runtime, emulated = "made", False

    def __init__(self, most: int = 1 << 30) -> None:
        self.most = most

    def infer(self, inputs: Arrays) -> Arrays:
        if len(inputs["x"]) > self.most:
            raise StageError("can't", why="so many", mend="fewer")
        return {"y": inputs["x"]}


def batches(samples: int, width: int = 3) -> list[np.ndarray[Any, Any]]:
    x = np.arange(samples * width, dtype=np.float32).reshape(samples, width)
    (found,) = compared_inputs(Dataset("", {"x": x}, None, "data"), signature("batch", width), Echo())
    return [each["x"] for each in found]


@given(st.integers(1, 300))
def test_one_batch_has_64_rows_and_every_sample_is_in_one(samples: int) -> None:
    found = batches(samples)
    assert max(map(len, found)) == 64
    assert len({row[0] for each in found for row in each}) == min(samples, COMPARED)
    assert [len(each) for each in found if len(each) < 64][:1] in ([], [samples % 64])


@given(st.integers(2, 63))
def test_samples_that_come_again_come_in_another_order(samples: int) -> None:
    """A row that is taken from so many rows before is another one."""
    again = batches(samples)[-1]
    assert (again[samples:, 0] != again[:-samples, 0]).all()


@pytest.mark.parametrize(("left", "room"), [(1 << 40, 160 << 20), (80 * (50 << 20), 50 << 20), (1 << 20, 32 << 20)])
@pytest.mark.parametrize("width", [1, 3, 50_000, 500_000, 5_000_000])
def test_rows_are_as_many_as_memory_is_for(width: int, left: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.jobs.compared_inputs.memory_left", lambda: left)
    rows = min(64, max(1, room // (8 * width)))
    assert max(map(len, batches(2, width))) == max(rows, 2 if width < 5_000_000 else 1)
    assert joined(signature("batch", width)) == rows


def test_without_data_random_rows_differ() -> None:
    ((one, more),) = compared_inputs(None, signature("batch", 3), Echo())
    assert (len(one["x"]), len(more["x"])) == (1, 64)
    assert len(np.unique(more["x"], axis=0)) == 64


@pytest.mark.parametrize("shape", [(1, 3), (4, 3)])
def test_a_call_whose_rows_are_fixed_is_left_as_it_is(shape: tuple[int, ...]) -> None:
    (found,) = compared_inputs(None, signature(*shape), Echo())
    assert [each["x"].shape for each in found] == [shape]
    assert joined(signature(*shape)) == 1


def test_rows_that_the_believed_one_refuses_tell_nothing_and_those_that_the_other_refuses_all() -> None:
    inputs: list[Arrays] = [{"x": np.ones((rows, 2), np.float32)} for rows in (1, 64)]
    assert distances({"a": Echo(8), "b": Echo(1)}, "a", inputs) == {"b": 0.0}
    assert distances({"a": Echo(), "b": Echo(8)}, "a", inputs) == {"b": np.inf}


class Wrong(Echo):
    """It gives nothing right from the 38th item of the second axis on."""

    def infer(self, inputs: Arrays) -> Arrays:
        found = inputs["x"].copy()
        found[:, 37:] = 0
        return {"y": found}


@pytest.mark.parametrize("usual", [1, 8, 37, 40])
@pytest.mark.parametrize("with_data", [False, True])
@pytest.mark.parametrize("shape", [(1, "items", 3), ("batch", "items", 3), ("batch", "items", "more")])
def test_what_else_varies_is_compared_at_more_than_is_usual(
    shape: tuple[int | str, ...], with_data: bool, usual: int
) -> None:
    told = signature(*shape).sized({dim: usual if dim == "items" else 3 for dim in shape if dim in ("items", "more")})
    x = np.random.default_rng(0).normal(size=(4, usual, 3)).astype(np.float32)
    data = Dataset("", {"x": x}, None, "data") if with_data else None
    found = compared_inputs(data, told, Echo(), Wrong())
    sizes = sizes_of(told, found)
    assert {usual, MANY, 2 * usual} <= {*sizes["items"]}
    assert all(max(each) >= MANY for each in sizes.values())
    assert apart({"last": Echo(), "other": Wrong()}, found, half=False)[0] > 0.5, "one wrong sample of hundreds is seen"


def test_sizes_that_the_believed_one_refuses_or_that_are_large_are_left_out() -> None:
    told = signature("batch", "items", 3).sized({"items": 8})
    assert max(sizes_of(told, compared_inputs(None, told, Narrow()))["items"]) == 16
    large = signature("batch", "items", 100_000).sized({"items": 60})
    assert sizes_of(large, compared_inputs(None, large, Echo()))["items"] == [60, MANY]


class Narrow(Echo):
    """As Echo, of 20 items at most."""

    def infer(self, inputs: Arrays) -> Arrays:
        if inputs["x"].shape[1] > 20:
            raise StageError("can't", why="so many", mend="fewer")
        return super().infer(inputs)


class Pooled(nn.Module):
    """A layer, the mean over time, two layers: OpenVINO 2026.4 computes its INT8 file wrong from 38 rows on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.relu(self.b(self.a(x).mean(1))))  # type: ignore[no-any-return]


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize("data", ["eval", "calibration"])
def test_what_openvino_serves_it_computes_at_64_rows_too(data: str, tmp_path: Path) -> None:
    compress.save(Pooled().eval(), tmp_path / "model.pt", inputs="x:float32[batch,6,8]", outputs=["y"])
    x = np.random.default_rng(0).normal(size=(256, 6, 8)).astype(np.float32)
    np.savez(tmp_path / "few.npz", x=x[:32])
    few = str(tmp_path / "few.npz")
    asked = ExportOptions(
        output=tmp_path / "a", int8="static", calibration=few, eval=few if data == "eval" else None, runtime="openvino"
    )
    artifact, report = compress.export(tmp_path / "model.pt", asked)
    assert report.serving is not None
    assert report.serving.compared["batch"][-1] == 64
    first, second = (
        open_model(OnnxModel(artifact.model_path, artifact.signature, runtime=name), threads=1).infer({"x": x[:64]})
        for name in ("onnxruntime", "openvino")
    )
    assert np.square(first["y"] - second["y"]).mean() < 0.1 * np.square(first["y"]).mean()


@pytest.mark.usefixtures("openvino")
@pytest.mark.parametrize("alone", [False, True])
def test_measure_says_which_runtime_computes_a_file_differently(alone: bool, tmp_path: Path) -> None:
    compress.save(Pooled().eval(), tmp_path / "model.pt", inputs="x:float32[batch,6,8]", outputs=["y"])
    x = np.random.default_rng(0).normal(size=(64, 6, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x)
    source = str(tmp_path / "data.npz")
    asked = ExportOptions(output=tmp_path / "a", int8="static", calibration=source, runtime="onnxruntime")
    made = Artifact.load(compress.export(tmp_path / "model.pt", asked)[0].model_path.parent)
    answers = [
        open_model(OnnxModel(made.model_path, made.signature, runtime=name), threads=1).infer({"x": x})["y"]
        for name in ("onnxruntime", "openvino")
    ]
    wrong = bool(np.square(answers[0] - answers[1]).mean() > 0.3 * np.square(answers[0]).mean())

    models = [made.model_path.parent] if alone else [tmp_path / "model.pt", made.model_path.parent]
    found = measure_files(models, MeasureOptions(rounds=2, batches=(1, 64), data=source))

    assert [row.batch for row in found.figures if row.differs] == ([64] if wrong else [])
    assert ("OpenVINO computes the file differently" in str(measure_table(found).caption)) == wrong
