"""What 8 bits make of the outputs is told by the data that the ranges come from, without evaluation data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.model import OnnxModel
from compress.quantize.outputs_lost import outputs_lost
from compress.quantize.quantize_onnx import QuantizeOnnx
from tests.unit.compress.prune.test_prune_channels import quiet
from tests.unit.compress.quantize.test_half_onnx import exported

SAMPLES = 64
X = np.random.default_rng(0).normal(size=(SAMPLES, 4)).astype(np.float32)


class Unlike(nn.Module):
    """An amount of thousands and two scores, in one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 48), nn.Linear(48, 3)
        with torch.no_grad():
            self.b.weight[0] *= 5_000

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))  # type: ignore[no-any-return]


class Turned(Unlike):
    """The same of a sequence, steps before samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, None].expand(-1, 2, -1)).transpose(0, 1)


@pytest.mark.parametrize("network", [Unlike, Turned])
@pytest.mark.parametrize("target", ["cpu", "tensorrt"])
def test_a_column_that_loses_more_than_half_is_warned_of(target: str, network: type[nn.Module], tmp_path: Path) -> None:
    model = exported(network().eval(), ("x:float32[batch,4]",), tmp_path)
    data = Dataset("", {"x": X}, None, "data")
    given = QuantizeOnnx("static", data, target=target).run(model, tmp_path / "next", quiet)  # type: ignore[arg-type]
    lost = given.details["outputs_lost"]
    assert lost["samples"] == (SAMPLES if lost["column_share"] > 0.5 else 32), "a loss is looked at on more"
    assert lost["share"] < 0.05, "the column of thousands hides the others"
    warned = [warning for warning in given.warnings if "--keep-float" in warning]
    assert bool(warned) == (lost["column_share"] > 0.5) == (target == "cpu")
    assert not warned or f"column {lost['column']}" in warned[0]
    assert not warned or lost["column"] > 0


def scaled(by: object, to: object, folder: Path) -> OnnxModel:
    """y = x times one constant, plus another."""
    folder.mkdir()
    stored = [
        numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in {"by": by, "to": to}.items()
    ]
    nodes = [helper.make_node("Mul", ["x", "by"], ["m"]), helper.make_node("Add", ["m", "to"], ["y"])]
    specs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", specs[:1], specs[1:], stored)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(made, folder / "model.onnx")
    signature = Signature((TensorSpec.parse("x:float32[batch,4]"),), (TensorSpec.parse("y:float32[batch,4]"),))
    return OnnxModel(folder / "model.onnx", signature)


@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize(("by", "share"), [(1.0, 0.0), (0.5, 0.25), (0.0, 1.0), (-1.0, 4.0)])
def test_the_share_is_the_error_beside_the_variance_wherever_the_mean_is(
    by: float, share: float, offset: float, tmp_path: Path
) -> None:
    data = Dataset("", {"x": X - X[::2].mean(0)}, None, "data")
    models = scaled(1.0, offset, tmp_path / "float"), scaled(by, offset, tmp_path / "other")
    found = outputs_lost(*models, data)
    assert found is not None
    assert found.share == pytest.approx(share, rel=0.1, abs=1e-3)
    assert (found.warning is not None) == (share > 0.5)


def test_outputs_that_do_not_vary_tell_nothing(tmp_path: Path) -> None:
    models = scaled(0.0, 1.0, tmp_path / "float"), scaled(1.0, 1.0, tmp_path / "other")
    assert outputs_lost(*models, Dataset("", {"x": X}, None, "data")) is None


def test_values_that_are_no_numbers_lose_all(tmp_path: Path) -> None:
    models = scaled(1.0, 0.0, tmp_path / "float"), scaled(np.nan, 0.0, tmp_path / "other")
    found = outputs_lost(*models, Dataset("", {"x": X}, None, "data"))
    assert found is not None
    assert "no numbers" in (found.warning or "")
    assert found.to_dict()["share"] is None


def answering(
    nodes: list[onnx.NodeProto], kind: int, shape: list[object], folder: Path, **weights: object
) -> OnnxModel:
    """A file of `nodes`, from x [batch, 4] to an output y."""
    folder.mkdir()
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    graph = helper.make_graph(nodes, "g", [given], [helper.make_tensor_value_info("y", kind, shape)], stored)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(made, folder / "model.onnx")
    name = {TensorProto.BOOL: "bool", TensorProto.INT64: "int64", TensorProto.FLOAT: "float32"}[kind]
    signature = Signature(
        (TensorSpec.parse("x:float32[batch,4]"),), (TensorSpec.parse(f"y:{name}[{','.join(map(str, shape))}]"),)
    )
    return OnnxModel(folder / "model.onnx", signature)


def flags(bound: float, folder: Path) -> OnnxModel:
    nodes = [helper.make_node("Greater", ["x", "bound"], ["y"])]
    return answering(nodes, TensorProto.BOOL, ["batch", 4], folder, bound=np.float32(bound))


def classes(by: list[float], folder: Path) -> OnnxModel:
    nodes = [
        helper.make_node("Mul", ["x", "by"], ["m"]),
        helper.make_node("ArgMax", ["m"], ["y"], axis=1, keepdims=0),
    ]
    return answering(nodes, TensorProto.INT64, ["batch"], folder, by=np.asarray(by, np.float32))


@pytest.mark.parametrize(
    ("make", "right", "wrong", "warned"),
    [
        (flags, 0.0, 0.0, False),
        (flags, 0.0, 0.02, False),
        (flags, 0.0, 9.0, True),
        (flags, -9.0, 0.0, True),
        (classes, [1, 1, 1, 1], [1, 1, 1, 1.01], False),
        (classes, [1, 1, 1, 1], [1, 0, 0, 0], True),
    ],
    ids=["same flags", "few other flags", "one flag for all", "one flag was right", "a near class", "other classes"],
)
def test_of_flags_and_classes_it_is_told_how_many_change_beside_what_one_answer_misses(
    make: Callable[..., OnnxModel], right: object, wrong: object, warned: bool, tmp_path: Path
) -> None:
    found = outputs_lost(
        make(right, tmp_path / "float"), make(wrong, tmp_path / "other"), Dataset("", {"x": X}, None, "data")
    )
    assert (found is not None and found.warning is not None) == warned
    if warned:
        assert found is not None
        assert found.changed is not None
        assert f"changes {found.changed:.1%} of the answers" in (found.warning or "")
        assert f"misses {found.missed:.1%}" in (found.warning or "")


def test_one_class_that_changes_by_chance_is_not_warned_of(tmp_path: Path) -> None:
    x = np.tile(np.array([3, 2, 1, 0], np.float32), (SAMPLES, 1))
    x[0, 1] = 2.99
    models = classes([1, 1, 1, 1], tmp_path / "float"), classes([1, 1.01, 1, 1], tmp_path / "other")
    found = outputs_lost(*models, Dataset("", {"x": x}, None, "data"))
    assert found is not None
    assert found.share == 1.0
    assert found.missed == 0.0
    assert found.warning is None


def stepped(kind: str, steps: float, folder: Path, *, without: bool = False) -> OnnxModel:
    """An activation whose values are rounded to so many steps to 1 and, maybe, whose last column is always 0."""
    nodes = [
        helper.make_node(kind, ["x"], ["a"]),
        helper.make_node("Mul", ["a", "steps"], ["m"]),
        helper.make_node("Round", ["m"], ["r"]),
        helper.make_node("Div", ["r", "steps"], ["d"]),
        helper.make_node("Mul", ["d", "on"], ["y"]),
    ]
    on = np.array([1, 1, 1, 0 if without else 1], np.float32)
    return answering(nodes, TensorProto.FLOAT, ["batch", 4], folder, steps=np.float32(steps), on=on)


def seldom(kind: str, often: int) -> Dataset:
    """256 samples; the last column is active in so many, none of them of the 32 that are asked first."""
    r = np.random.default_rng(0)
    x = 4 * r.normal(size=(256, 4)).astype(np.float32)
    asked = set(np.linspace(0, 255, 32).astype(int).tolist()) | set(range(0, 256, 8))
    asked |= {at + 1 for at in asked} | {at - 1 for at in asked}
    x[:, 3] = -14 + 2 * r.normal(size=256) if kind == "Sigmoid" else 1e-3 * np.abs(r.normal(size=256))
    x[[at for at in range(256) if at not in asked][:often], 3] = 4
    return Dataset("", {"x": x}, None, "data")


@pytest.mark.parametrize(
    ("kind", "often", "without", "warned"),
    [
        ("Sigmoid", 6, False, False),
        ("Sigmoid", 0, False, False),
        ("Relu", 6, False, False),
        ("Sigmoid", 6, True, True),
        ("Sigmoid", 1, True, True),
        ("Relu", 6, True, True),
        ("Relu", 1, True, True),
    ],
    ids=[
        "a rare label that is kept", "a label that no sample has", "a rare amount that is kept",
        "a rare label that is lost", "a label of one sample that is lost",
        "a rare amount that is lost", "an amount of one sample that is lost",
    ],
)  # fmt: skip
def test_a_column_is_judged_by_samples_that_have_it(
    kind: str, often: int, without: bool, warned: bool, tmp_path: Path
) -> None:
    """On 32 samples it varies by traces, which the steps of all columns lose."""
    models = stepped(kind, 1e6, tmp_path / "float"), stepped(kind, 100, tmp_path / "other", without=without)
    found = outputs_lost(*models, seldom(kind, often))
    assert found is not None
    assert (found.warning is not None) == warned, found
    assert not warned or (found.column, found.samples) == (3, 256)


def labels(steps: float, times: float, columns: slice, folder: Path) -> OnnxModel:
    """Chances of some columns, rounded to so many steps to 1, times a constant."""
    nodes = [
        helper.make_node("Sigmoid", ["x"], ["a"]),
        helper.make_node("Mul", ["a", "steps"], ["m"]),
        helper.make_node("Round", ["m"], ["r"]),
        helper.make_node("Div", ["r", "steps"], ["d"]),
        helper.make_node("Mul", ["d", "times"], ["t"]),
        helper.make_node("Slice", ["t", "first", "last", "axis"], ["y"]),
    ]
    first, last = np.array([columns.start]), np.array([columns.stop])
    if steps == np.inf:
        nodes[1:4] = [helper.make_node("Identity", ["a"], ["d"])]
    shape = ["batch", columns.stop - columns.start]
    return answering(
        nodes, TensorProto.FLOAT, shape, folder,
        steps=np.float32(steps), times=np.float32(times), first=first, last=last, axis=np.array([1]),
    )  # fmt: skip


@pytest.mark.parametrize("times", [1.0, 100.0])
@pytest.mark.parametrize("columns", [slice(0, 4), slice(3, 4)], ids=["beside others", "an output of its own"])
@pytest.mark.parametrize(("steps", "warned"), [(100, False), (0.4, True)])
def test_a_chance_that_no_sample_shows_is_held_against_what_chances_are(
    steps: float, warned: bool, columns: slice, times: float, tmp_path: Path
) -> None:
    """As a chance or in percent; an error that is large for any chance is told."""
    data = seldom("Sigmoid", 0)
    if warned:
        data.inputs["x"][::2] += 14.0
    exact = labels(np.inf, times, columns, tmp_path / "float")
    found = outputs_lost(exact, labels(steps, times, columns, tmp_path / "other"), data)
    assert found is not None
    assert found.samples == 256 or warned
    assert (found.warning is not None) == warned, found


@pytest.mark.parametrize("shape", [["batch", 1], ["batch"]])
@pytest.mark.parametrize(("step", "middle"), [(0.002, 0.008), (0.005, 0.015), (0.005, -0.985), (0.1, 0.5)])
def test_an_amount_from_0_to_1_that_is_an_output_of_its_own_is_no_chance(
    step: float, middle: float, shape: list[object], tmp_path: Path
) -> None:
    """A price in millions, or a rate: what 8 bits make one number is lost, wherever it lies and however small it is."""

    def amount(by: float, folder: Path) -> OnnxModel:
        nodes = [
            helper.make_node("Clip", ["x", "low", "high"], ["c"]),
            helper.make_node("Mul", ["c", "by"], ["m"]),
            helper.make_node("Add", ["m", "to"], ["a"]),
            helper.make_node("Gather", ["a", "first"], ["y"], axis=1),
        ]
        first = np.array([0] if len(shape) > 1 else 0)
        return answering(
            nodes, TensorProto.FLOAT, shape, folder,
            low=np.float32(-2.9), high=np.float32(2.9), by=np.float32(by), to=np.float32(middle), first=first,
        )  # fmt: skip

    data = Dataset("", {"x": X}, None, "data")
    found = outputs_lost(amount(step, tmp_path / "float"), amount(0.0, tmp_path / "other"), data)
    assert found is not None
    assert found.share == pytest.approx(1.0, abs=0.1)
    assert found.warning is not None


def test_an_amount_up_to_a_hundred_is_no_chance(tmp_path: Path) -> None:
    """A column that varies little beside an age may be all that is asked for."""
    x = np.abs(np.random.default_rng(0).normal(size=(64, 4))).astype(np.float32) * [1, 1, 1, 0.01]
    models = stepped("Relu", 1e6, tmp_path / "float"), stepped("Relu", 10, tmp_path / "other")
    found = outputs_lost(*models, Dataset("", {"x": x.astype(np.float32)}, None, "data"))
    assert found is not None
    assert found.column == 3
    assert found.warning is not None


def test_where_32_samples_tell_of_every_column_no_more_are_asked(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
    models = stepped("Relu", 1e6, tmp_path / "float"), stepped("Relu", 100, tmp_path / "other")
    found = outputs_lost(*models, Dataset("", {"x": x}, None, "data"))
    assert found is not None
    assert found.samples == 32


def test_a_file_that_fails_on_what_the_float_file_takes_is_an_error(tmp_path: Path) -> None:
    def looked_up(by: float, folder: Path) -> OnnxModel:
        nodes = [
            helper.make_node("Mul", ["x", "by"], ["m"]),
            helper.make_node("Cast", ["m"], ["at"], to=TensorProto.INT64),
            helper.make_node("Gather", ["table", "at"], ["y"]),
        ]
        table = np.arange(8, dtype=np.float32)
        return answering(nodes, TensorProto.FLOAT, ["batch", 4], folder, by=np.float32(by), table=table)

    right, wrong = looked_up(1.0, tmp_path / "float"), looked_up(9.0, tmp_path / "other")
    data = Dataset("", {"x": X}, None, "data")
    with pytest.raises(StageError) as failed:
        outputs_lost(right, wrong, data)
    what, why, mend = str(failed.value).splitlines()
    assert "the INT8 file does not run on the calibration data" in what
    assert "8 bits round" in why
    assert "--keep-float" in mend
    assert outputs_lost(wrong, right, data) is None, "the float file's own failure is not INT8's"
