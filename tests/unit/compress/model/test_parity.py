"""Two models give the same answers: by each output's own scale, on inputs over all that they may be."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import numpy_helper
from torch import nn

from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.evaluate.parity import difference, differences
from compress.model import TorchModel
from compress.model.drawn import drawn_inputs, indices_of
from compress.model.infer import infer_signature
from compress.onnx_export import from_torch as onnx_from_torch
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.signature import TensorSpec
from tests.families import Bert
from tests.unit.compress.prune.test_prune_channels import quiet

RNG = np.random.default_rng(0)
CLASSES = RNG.dirichlet(np.ones(10_000), 4).astype(np.float32)  # each about 1e-4
LOGITS = RNG.standard_normal((4, 10)).astype(np.float32)
BOXES = np.concatenate([RNG.uniform(0, 640, (4, 4, 50)), RNG.uniform(0, 0.1, (4, 80, 50)) ** 2], 1).astype(np.float32)
USUAL = np.concatenate([RNG.uniform(0, 640, (4, 4, 50)), RNG.uniform(0, 1, (4, 80, 50))], 1).astype(np.float32)
FACES = np.concatenate([RNG.uniform(0, 640, (4, 50, 4)), RNG.uniform(0, 1, (4, 50, 1))], 2).astype(np.float32)
MASKED = np.where(np.arange(10) < 4, np.float32(-1e9), LOGITS)
SAMPLES = LOGITS * np.array([[1], [1], [1e-3], [1]], np.float32)


def without(values: np.ndarray[Any, Any], at: Any) -> np.ndarray[Any, Any]:
    changed = values.copy()
    changed[at] = 0
    return changed


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (CLASSES, np.zeros_like(CLASSES)),
        (CLASSES, CLASSES[:, ::-1]),
        (1e-7 * LOGITS, np.zeros_like(LOGITS)),
        (LOGITS, LOGITS + 0.01),
        (LOGITS, LOGITS * np.nan),
        (LOGITS, np.where(LOGITS.max() == LOGITS, np.inf, LOGITS)),
        (LOGITS, LOGITS[:, :9]),
        (BOXES, without(BOXES, np.s_[:, 4:])),
        (USUAL, without(USUAL, np.s_[:, 4:])),
        (FACES, without(FACES, np.s_[..., 4])),
        (MASKED, without(MASKED, np.s_[:, 4:])),
        (SAMPLES, without(SAMPLES, 2)),
        (np.zeros_like(LOGITS), LOGITS),
        (np.arange(8), np.arange(8)[::-1]),
        (np.array([True, False]), np.array([True, True])),
    ],
    ids=[
        "a softmax over many classes, gone", "a softmax in another order", "tiny values, gone", "a shift", "NaN",
        "infinite", "another shape", "probabilities beside boxes in pixels, gone", "larger ones, gone",
        "one score beside four coordinates, gone", "scores beside a mask's -1e9, gone",
        "one sample of a small scale, gone", "something from nothing", "other classes", "another truth",
    ],
)  # fmt: skip
def test_what_differs_is_seen_at_any_scale(expected: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> None:
    assert not difference(expected, got).fits


TIES = RNG.integers(0, 20, (4, 100, 100))


@pytest.mark.parametrize(
    ("expected", "got"),
    [
        (CLASSES, CLASSES * np.float32(1 + 1e-6)),
        (BOXES, BOXES * np.float32(1 + 1e-6)),
        (FACES, FACES + np.float32(640 * 2e-6)),
        (MASKED, MASKED + np.float32(1e-6)),
        (np.where(LOGITS > 0, np.nan, LOGITS), np.where(LOGITS > 0, np.nan, LOGITS)),
        (np.where(LOGITS > 0, -np.inf, LOGITS), np.where(LOGITS > 0, -np.inf, LOGITS)),
        (np.zeros((2, 3)), np.full((2, 3), 1e-9)),
        (np.zeros((0, 3)), np.zeros((0, 3))),
        (np.float32(2.0).reshape(()), np.float32(2.000001).reshape(())),
        (TIES, np.where(np.arange(100) + 100 * np.arange(100)[:, None] == 77, 3, TIES)),
    ],
    ids=[
        "classes",
        "boxes",
        "faces",
        "masked",
        "NaN",
        "infinite",
        "nothing",
        "empty",
        "a number",
        "four of 40,000 near ties",
    ],
)
def test_rounding_is_no_difference(expected: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> None:
    assert difference(expected, got).fits


@given(
    hnp.arrays(np.float32, (3, 5), elements=st.floats(-1e3, 1e3, width=32)),
    st.floats(-30, 30),
)
def test_the_unit_that_an_output_is_in_makes_no_difference(values: np.ndarray[Any, Any], exponent: float) -> None:
    values = values.astype(np.float64) + np.sign(values) * 1e-3
    scale = 10.0**exponent
    for got, fits in ((values, True), (values + 0.02 * np.abs(values).max(), not values.any())):
        assert difference(scale * values, scale * got).fits == fits


def test_an_output_of_a_sigmoid_has_the_scale_of_1_however_small_its_values_are() -> None:
    nothing_found = 2e-6 * CLASSES / CLASSES.max()
    rounded = nothing_found + np.float32(1.5e-7) * np.sign(LOGITS[0, 0])
    for logistic, fits in (((), False), (("seen",), True)):
        assert differences({"seen": nothing_found}, {"seen": rounded}, logistic=logistic)["seen"].fits == fits
    assert not differences({"seen": nothing_found}, {"seen": 0 * rounded}, logistic=("seen",))["seen"].fits


def test_each_output_is_judged_by_itself() -> None:
    found = differences({"box": 640 * LOGITS, "label": CLASSES}, {"box": 640 * LOGITS, "label": 0 * CLASSES})
    assert {name: apart.fits for name, apart in found.items()} == {"box": True, "label": False}


class Looks(nn.Module):
    """Indices into a layer, into a bare matrix, and two kinds of masks."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rest = nn.Embedding(3000, 4), nn.Parameter(torch.randn(77, 4))

    def forward(self, t: torch.Tensor, p: torch.Tensor, mask: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        x = self.words(t) + self.rest[p.long()]
        return x * mask[..., None] + seen[..., None]  # type: ignore[no-any-return]


LOOKS = ("t:int64[batch,seq]", "p:int32[batch,seq]", "mask:int64[batch,seq]", "seen:bool[batch,seq]")


def model_of(module: nn.Module, *inputs: str, **sizes: int) -> TorchModel:
    return TorchModel(module.eval(), infer_signature(module.eval(), tuple(map(TensorSpec.parse, inputs)), sizes=sizes))


@pytest.mark.parametrize("script", [False, True])
def test_indices_are_drawn_over_the_whole_of_their_tables_and_masks_leave_a_beginning(script: bool) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.script(Looks()) if script else Looks()
    model = model_of(module, *LOOKS, seq=50)
    indices = indices_of(model.module, model.signature)
    assert indices == {"t": 3000, "p": 77}
    drawn = drawn_inputs(model.signature, model.signature.at(40), indices, seed=1)
    assert drawn["t"].max() == 2999
    assert drawn["p"].max() == 76
    assert drawn["t"].min() < 50
    for name in ("mask", "seen"):
        lengths = drawn[name].sum(1)
        assert set(np.unique(drawn[name]).tolist()) == {0, 1}
        assert lengths.min() >= 1
        assert (np.diff(drawn[name].astype(int), axis=1) <= 0).all(), "what is left out comes last"


class Softmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 10_000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).softmax(-1)  # type: ignore[no-any-return]


def damaged(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """The file is changed after it is written, as by an exporter that is wrong."""
    right = onnx_from_torch._check_file

    def wrong(path: Path, *rest: Any) -> None:
        right(path, *rest)
        file = onnx.load(path)
        change(file.graph)
        onnx.save(file, path)

    monkeypatch.setattr(onnx_from_torch, "_check_file", wrong)


def test_a_softmax_that_is_exported_as_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(graph: onnx.GraphProto) -> None:
        graph.node[-1].output[0] = "before"
        zero = numpy_helper.from_array(np.zeros(1, np.float32), "zero")
        graph.initializer.append(zero)
        graph.node.append(onnx.helper.make_node("Mul", ["before", "zero"], ["output"]))

    damaged(monkeypatch, nothing)
    with pytest.raises(StageError) as caught:
        OnnxFromTorch().run(model_of(Softmax(), "x:float32[batch,8]"), tmp_path, quiet)
    assert "'output' is off by 1 of its scale" in caught.value.why


def test_a_row_of_a_table_that_is_exported_wrongly_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def last_row(graph: onnx.GraphProto) -> None:
        table = next(tensor for tensor in graph.initializer if tuple(tensor.dims) == (50, 32))
        values = numpy_helper.to_array(table).copy()
        values[49] = 3
        table.CopyFrom(numpy_helper.from_array(values, table.name))

    damaged(monkeypatch, last_row)
    model = model_of(Bert(), "tokens:int64[batch,seq]", "mask:int64[batch,seq]", seq=6)
    with pytest.raises(StageError):
        OnnxFromTorch().run(model, tmp_path, quiet)


def test_what_only_the_data_shows_is_seen_and_data_is_part_of_what_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values beyond 100 are cut off in the file; random inputs never reach them."""

    def cut(graph: onnx.GraphProto) -> None:
        graph.initializer.append(numpy_helper.from_array(np.float32(100).reshape(()), "most"))
        graph.node.insert(0, onnx.helper.make_node("Clip", ["x", "", "most"], ["cut"]))
        for node in graph.node[1:]:
            node.input[:] = ["cut" if name == "x" else name for name in node.input]

    damaged(monkeypatch, cut)
    model = model_of(nn.Linear(8, 3), "x:float32[batch,8]")
    np.save(tmp_path / "x.npy", np.full((30, 8), 300, np.float32))
    data = Dataset.open(str(tmp_path / "x.npy"), model.signature)
    assert OnnxFromTorch().options != OnnxFromTorch(data).options
    OnnxFromTorch().run(model, tmp_path, quiet)
    with pytest.raises(StageError) as caught:
        OnnxFromTorch(data).run(model, tmp_path, quiet)
    assert "x.npy" in caught.value.what
