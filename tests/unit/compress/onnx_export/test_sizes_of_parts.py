"""How large what a part in ONNX gives is, is what its graph proves: never what it was at the few sizes tried."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper

from compress.errors import StageError
from compress.formats.native.onnx_part import OnnxPart
from compress.formats.onnx.load import load_onnx
from compress.model import OnnxModel, TorchModel
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.onnx_export.torch_from_onnx import TorchFromOnnx, taken_back
from tests.unit.compress.onnx_graphs import normal

node = helper.make_node
TABLES: dict[str, Any] = {
    "w": normal(16, 32), "w2": normal(32, 24), "w3": normal(24, 5), "w1": normal(24, 1), "wf": normal(1, 5),
    "zero": np.array([0]), "one": np.array([1]), "two": np.array([2]), "k": np.array([50]), "minus": np.array([-1]), "unit": np.float32(1), "yes": np.array(True),
    "three": np.array(3), "axis": np.array(1), "scale": normal(24), "w4": normal(24, 12, 3),
}  # fmt: skip
SIZES = (3, 20, 31, 49, 50, 51, 64, 100, 777)
BEFORE = [
    node("MatMul", ["x", "w"], ["h0"]), node("Relu", ["h0"], ["h"]),
    node("MatMul", ["h", "w2"], ["q0"]), node("Relu", ["q0"], ["q"]),
]  # fmt: skip
LENGTH = [node("Shape", ["q"], ["sizes"]), node("Slice", ["sizes", "one", "two"], ["n"])]
AT_MOST = [*LENGTH, node("Min", ["n", "k"], ["m"])]
MEAN = [
    node("ReduceSum", ["v", "one"], ["sum"], keepdims=0), node("Shape", ["v"], ["vs"]),
    node("Slice", ["vs", "one", "two"], ["count"]), node("Cast", ["count"], ["many"], to=1),
    node("Div", ["sum", "many"], ["mean"]),
]  # fmt: skip
OUT = [*MEAN, node("MatMul", ["mean", "w3"], ["y"])]


def branch(name: str, nodes: Sequence[NodeProto], claimed: Sequence[Any] | None = None) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}_out", 1, claimed)])


def by_length(then: NodeProto, other: NodeProto, claimed: Sequence[Any] | None = None) -> list[NodeProto]:
    return [
        *LENGTH, node("Greater", ["n", "k"], ["more"]), node("Squeeze", ["more"], ["is_more"]),
        node("If", ["is_more"], ["v"], name="part", then_branch=branch("then", [then], claimed), else_branch=branch("else", [other], claimed)),
    ]  # fmt: skip


def looped(inner: NodeProto) -> list[NodeProto]:
    def typed(name: str, kind: int, dims: Sequence[int] | None) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, dims)

    inside = helper.make_graph(
        [node("Identity", ["go"], ["go_"]), inner], "body",
        [typed("i", TensorProto.INT64, []), typed("go", TensorProto.BOOL, []), typed("at", 1, None)],
        [typed("go_", TensorProto.BOOL, []), typed("at_", 1, None)],
    )  # fmt: skip
    return [node("Loop", ["three", "yes", "q"], ["v"], name="part", body=inside)]


TOP_K = [
    node("MatMul", ["q", "w1"], ["score"]), node("Squeeze", ["score", "two"], ["flat"]), *AT_MOST,
    node("TopK", ["flat", "m"], ["v", "i"], name="part", axis=1),
    node("ReduceSum", ["v", "one"], ["sum"], keepdims=1), *MEAN[1:], node("MatMul", ["mean", "wf"], ["y"]),
]  # fmt: skip
# What gives at most 50 along an axis of any size, as the heads of detectors and rankers do.
AT_MOST_50: dict[str, list[NodeProto]] = {
    "TopK of as many as there are, at most 50": TOP_K,
    "Slice up to the smaller of two sizes": [
        *AT_MOST, node("Slice", ["q", "zero", "m", "one"], ["v"], name="part"), *OUT,
    ],
    "If with a branch that cuts": [
        *by_length(node("Slice", ["q", "zero", "k", "one"], ["then_out"]), node("Identity", ["q"], ["else_out"])), *OUT,
    ],
    "If that claims another size": [
        *by_length(
            node("Slice", ["q", "zero", "k", "one"], ["then_out"]), node("Identity", ["q"], ["else_out"]), ["0|0", "0|1", 24],
        ),
        *OUT,
    ],
    "If with a branch that would cut": [
        *by_length(node("Identity", ["q"], ["then_out"]), node("Slice", ["q", "zero", "k", "one"], ["else_out"])), *OUT,
    ],
    "Loop that cuts": [*looped(node("Slice", ["at", "zero", "k", "one"], ["at_"])), *OUT],
    "Slice up to a constant": [*[node("Slice", ["q", "zero", "k", "one"], ["v"], name="part")], *OUT],
    "Slice without the last": [node("Slice", ["q", "zero", "minus", "one"], ["v"], name="part"), *OUT],
    "a size by Where": [
        *LENGTH, node("Less", ["n", "k"], ["less"]), node("Where", ["less", "n", "k"], ["m"]),
        node("Slice", ["q", "zero", "m", "one"], ["v"], name="part"), *OUT,
    ],
    "Expand to the smaller of two sizes": [
        *AT_MOST, node("Concat", ["one", "m", "one"], ["wide"], axis=0), node("ReduceMean", ["q", "one"], ["r"], keepdims=1),
        node("Expand", ["r", "wide"], ["v"], name="part"), *OUT,
    ],
    "Range up to the smaller of two sizes": [
        *AT_MOST, node("Squeeze", ["m"], ["m0"]), node("Squeeze", ["zero"], ["z0"]), node("Squeeze", ["one"], ["o0"]),
        node("Range", ["z0", "m0", "o0"], ["places"], name="part"), node("Gather", ["q", "places"], ["v"], axis=1), *OUT,
    ],
}  # fmt: skip


def saved(folder: Path, nodes: Sequence[NodeProto], opset: int = 18, dim: int | str = "T") -> OnnxModel:
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", 1, ["N", dim, 16])], [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(np.asarray(values), name) for name, values in TABLES.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), folder / "m.onnx")
    return load_onnx(folder / "m.onnx")


def through(file: OnnxModel, folder: Path) -> tuple[Path, dict[str, str]]:
    """The file, taken back and written again unpruned: which nodes stayed, too."""
    (folder / "out").mkdir()
    given = TorchFromOnnx().run(file, folder, lambda *_: None)
    found = OnnxFromTorch().run(given.model, folder / "out", lambda *_: None).model  # type: ignore[arg-type]
    assert isinstance(found, OnnxModel)
    return found.path, given.details["kept_as_they_are"]


def assert_same(one: Path, other: Path, sizes: Sequence[int] = SIZES) -> None:
    was, now = (ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]) for path in (one, other))
    for size in sizes:
        x = {"x": normal(2, size, 16)}
        want = was.run(None, x)[0]
        np.testing.assert_allclose(now.run(None, x)[0], want, atol=1e-4 * np.abs(want).max(), err_msg=f"T = {size}")


@pytest.mark.parametrize("case", AT_MOST_50)
def test_at_sizes_far_from_those_tried_it_answers_as_the_file_does(case: str, tmp_path: Path) -> None:
    file = saved(tmp_path, [*BEFORE, *AT_MOST_50[case]])
    written, _ = through(file, tmp_path)
    assert_same(file.path, written)


PROVEN: dict[str, list[NodeProto]] = {
    "CumSum": [node("CumSum", ["q", "axis"], ["v"], name="part")],
    "another's": [node("FastGelu", ["q"], ["v"], name="part", domain="com.microsoft")],
    "If whose branches give as much": by_length(node("Sin", ["q"], ["then_out"]), node("Cos", ["q"], ["else_out"])),
    "Loop whose body gives as much": looped(node("Sin", ["at"], ["at_"])),
    "two inputs of one size": [
        node("Sin", ["q"], ["s"]), node("Add", ["q", "unit"], ["q1"]), node("Mod", ["s", "q1"], ["v"], fmod=1, name="part"),
    ],
    "a window that moves": [
        node("Transpose", ["q"], ["t"], perm=[0, 2, 1]),
        node("AveragePool", ["t"], ["p"], kernel_shape=[3], strides=[2], auto_pad="SAME_UPPER", name="part"),
        node("Transpose", ["p"], ["v"], perm=[0, 2, 1]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", PROVEN)
def test_where_the_graph_proves_it_layers_behind_it_are_layers(case: str, tmp_path: Path) -> None:
    file = saved(tmp_path, [*BEFORE, *PROVEN[case], *OUT])
    given = TorchFromOnnx().run(file, tmp_path, lambda *_: None)
    assert isinstance(given.model, TorchModel)
    names = {name for name, _ in given.model.module.named_parameters()}
    assert {"w.weight", "w2.weight", "w3.weight"} <= names
    assert not any("all behind it" in why for why in given.details["kept_as_they_are"].values())
    written, _ = through(file, tmp_path)
    assert_same(file.path, written)


def test_what_is_proven_of_two_inputs_of_one_size_is_refused_of_others(tmp_path: Path) -> None:
    file = saved(tmp_path, [*BEFORE, *PROVEN["two inputs of one size"], *OUT])
    (part,) = [layer for layer in taken_back(file).module.modules() if isinstance(layer, OnnxPart)]
    part(torch.ones(2, 7, 24), torch.ones(2, 7, 24))
    with pytest.raises(StageError, match="can't run") as caught:
        part(torch.ones(2, 7, 24), torch.ones(2, 1, 24))
    assert "as large as each other in the file" in caught.value.why


def test_what_stays_with_all_behind_it_is_told_by_name(tmp_path: Path) -> None:
    _, kept = through(saved(tmp_path, [*BEFORE, *AT_MOST_50["If with a branch that cuts"]]), tmp_path)
    (why,) = [why for name, why in kept.items() if "'part'" in name]
    assert "all behind it stays, too" in why


def test_what_stays_with_all_behind_it_is_of_the_opset_that_is_written(tmp_path: Path) -> None:
    """Before opset 18 axes of a mean are an attribute, and ONNX's converter takes no graph with an If as a whole."""
    nodes = [
        *AT_MOST_50["If with a branch that cuts"][:-len(OUT)],
        node("ReduceMean", ["v"], ["mean"], axes=[1], keepdims=0),
        node("ReduceMax", ["v"], ["most"], axes=[1], keepdims=0),
        node("Add", ["mean", "most"], ["both"]), node("MatMul", ["both", "w3"], ["y"]),
    ]  # fmt: skip
    file = saved(tmp_path, [*BEFORE, *nodes], opset=15)
    written, kept = through(file, tmp_path)
    assert any("all behind it stays, too" in why for why in kept.values())
    assert_same(file.path, written)


STAYS: dict[str, list[NodeProto]] = {
    "slopes for the last axis": [node("PRelu", ["q", "scale"], ["v"], name="part"), *OUT],
    "halves of an axis that varies": [
        node("Split", ["q"], ["a", "b"], axis=1, num_outputs=2, name="part"), node("Mul", ["a", "b"], ["v"]), *OUT,
    ],
    "a second output that is used": [
        node("LayerNormalization", ["q", "scale"], ["normal", "middle"], name="part"),
        node("Sub", ["normal", "middle"], ["v"]), *OUT,
    ],
}  # fmt: skip


@pytest.mark.parametrize("dim", ["T", 24])
@pytest.mark.parametrize("case", STAYS)
def test_a_node_with_no_form_as_a_layer_stays_and_the_file_goes_in(case: str, dim: int | str, tmp_path: Path) -> None:
    file = saved(tmp_path, [*BEFORE, *STAYS[case]], dim=dim)
    written, kept = through(file, tmp_path)
    assert all("'part'" in name for name in kept)
    assert bool(kept) == (case != "halves of an axis that varies" or dim == "T")
    assert_same(file.path, written, [24] if dim == 24 else (2, 6, 20, 64, 100))
