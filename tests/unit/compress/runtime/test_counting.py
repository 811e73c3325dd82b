"""MACs and weights of a file are those of what it computes, however it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import GraphProto, TensorProto, helper, numpy_helper
from torch import nn

from compress.artifact import Signature, TensorSpec
from compress.cli import main
from compress.formats.onnx.read import signature_of_onnx
from compress.runtime.measure import Work, onnx_layer_bytes, onnx_params, onnx_work, torch_macs

node = helper.make_node
W = np.ones((8, 5), np.float32)
WIDE = np.ones((8, 50), np.float32)


def weight(name: str, values: np.ndarray[Any, Any] = W) -> TensorProto:
    return numpy_helper.from_array(values, name)


def stored(
    folder: Path, nodes: list[onnx.NodeProto], weights: list[TensorProto], *, batch: object = "batch", **more: Any
) -> Path:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, None])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y], weights), opset_imports=opsets, ir_version=10, **more
    )
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def counted(path: Path) -> tuple[Work, int]:
    return onnx_work(path, signature_of_onnx(path)), onnx_params(path)


@pytest.mark.parametrize("way", ["value", "identity", "floats", "sparse"])
def test_constants_are_weights(way: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"value_floats": [1.0] * 40} if way == "floats" else {"value": weight("", W)}
    if way == "sparse":
        places = numpy_helper.from_array(np.arange(40), "places")
        given = {"sparse_value": helper.make_sparse_tensor(weight("values", W.ravel()), places, W.shape)}
    nodes = [node("Constant", [], ["c"], **given)]
    if way == "floats":
        nodes += [node("Constant", [], ["to"], value_ints=[8, 5]), node("Reshape", ["c", "to"], ["w"])]
    else:
        nodes += [node("Identity", ["c"], ["d"]), node("Identity", ["d"], ["w"])]
    path = stored(tmp_path, [*nodes, node("MatMul", ["x", "w"], ["y"], "fc")], [])
    assert counted(path) == (Work(40, 0), 40)
    if way != "floats":
        assert onnx_layer_bytes(path) == {"fc": 160}


def test_what_functions_hold_is_counted_at_each_call(tmp_path: Path) -> None:
    body = [node("MatMul", ["a", "b"], ["m"]), node("Relu", ["m"], ["r"])]
    function = helper.make_function("own", "Layer", ["a", "b"], ["r"], body, [helper.make_opsetid("", 20)])
    calls = [node("Layer", ["x", "v"], ["h"], domain="own"), node("Layer", ["h", "w"], ["y"], domain="own")]
    weights = [weight("v", np.ones((8, 8), np.float32)), weight("w")]
    assert counted(stored(tmp_path, calls, weights, functions=[function])) == (Work(64 + 40, 0), 64 + 40)


def test_what_nothing_reads_does_not_count(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w"], ["y"]), node("MatMul", ["x", "dead"], ["nowhere"])]
    path = stored(tmp_path, nodes, [weight("w"), weight("unread", WIDE), weight("dead")])
    assert counted(path) == (Work(40, 0), 40)


def branch(values: np.ndarray[Any, Any]) -> GraphProto:
    """Both branches call their tensors alike."""
    shown = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", values.shape[1]])
    nodes = [node("MatMul", ["x", "inner"], ["made"]), node("Relu", ["made"], ["out"])]
    return helper.make_graph(nodes, "branch", [], [shown], [weight("inner", values)])


def test_of_an_if_the_larger_branch_counts(tmp_path: Path) -> None:
    nodes = [
        node("ReduceMax", ["x"], ["top"], keepdims=0), node("Greater", ["top", "zero"], ["asked"]),
        node("If", ["asked"], ["y"], then_branch=branch(W), else_branch=branch(WIDE)),
    ]  # fmt: skip
    path = stored(tmp_path, nodes, [weight("zero", np.zeros((), np.float32))])
    assert counted(path) == (Work(400, 0), 40 + 400 + 1)


def by_size(axis: int, size: int, end: str = "", **branches: GraphProto) -> list[onnx.NodeProto]:
    """An If by whether a dimension of the input has a size; all names end alike."""
    at, wide, sizes, have, asked = (f"{name}{end}" for name in ("at", "size", "sizes", "have", "asked"))
    return [
        node("Constant", [], [at], value_int=axis), node("Constant", [], [wide], value_int=size),
        node("Shape", ["x"], [sizes]), node("Gather", [sizes, at], [have]), node("Equal", [have, wide], [asked]),
        node("If", [asked], [f"y{end}"], **branches),
    ]  # fmt: skip


@pytest.mark.parametrize(("size", "macs"), [(8, 40), (7, 400)])
def test_of_an_if_that_sizes_decide_the_branch_that_runs_counts(size: int, macs: int, tmp_path: Path) -> None:
    path = stored(tmp_path, by_size(1, size, then_branch=branch(W), else_branch=branch(WIDE)), [])
    assert counted(path) == (Work(macs, 0), 40 + 400 + 2)


def test_a_branch_that_runs_counts_in_a_branch_and_where_no_inference_tells_its_sizes(tmp_path: Path) -> None:
    shown = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", None])
    hidden = [  # the size that Reshape gives hangs on values, for all that inference knows
        node("Range", ["one", "ten", "one"], ["ones"]), node("ReduceMin", ["ones"], ["least"], keepdims=1),
        node("Mul", ["least", "eight"], ["width"]), node("Concat", ["open", "width"], ["to"], axis=0),
        node("Reshape", ["x", "to"], ["same"]), node("MatMul", ["same", "w"], ["out"]),
    ]  # fmt: skip
    innermost = helper.make_graph(hidden, "hidden", [], [shown])
    inside = by_size(0, 77, "/in", then_branch=branch(WIDE), else_branch=innermost)
    out = helper.make_tensor_value_info("y/in", TensorProto.FLOAT, ["batch", None])
    inner = helper.make_graph(inside, "outer", [], [out])
    tables = {"w": W, "one": np.array(1), "ten": np.array(10), "eight": np.array([8]), "open": np.array([-1])}
    path = stored(
        tmp_path,
        by_size(1, 8, then_branch=inner, else_branch=branch(WIDE)),
        [weight(name, values) for name, values in tables.items()],
    )
    assert counted(path)[0] == Work(40, 0)


def test_layers_in_a_loop_are_told_not_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def value(name: str, kind: int, shape: list[object] | None) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    body = helper.make_graph(
        [node("Identity", ["go"], ["on"]), node("MatMul", ["state", "w"], ["next"])], "body",
        [value("turn", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("state", TensorProto.FLOAT, ["batch", 8])],
        [value("on", TensorProto.BOOL, []), value("next", TensorProto.FLOAT, ["batch", 8])],
    )  # fmt: skip
    nodes = [node("Loop", ["turns", "", "x"], ["h"], body=body), node("MatMul", ["h", "w"], ["y"])]
    path = stored(tmp_path, nodes, [weight("w", np.eye(8, dtype=np.float32)), weight("turns", np.array(3))])
    assert counted(path)[0] == Work(64, 1)
    with pytest.raises(SystemExit):
        main(["inspect", str(path)])
    assert "MACs     64, without 1 layer in loops" in capsys.readouterr().out


def test_a_batch_that_is_fixed_is_said_to_be_what_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stored(tmp_path, [node("MatMul", ["x", "w"], ["y"])], [weight("w")], batch=4)
    with pytest.raises(SystemExit):
        main(["inspect", str(path)])
    assert "MACs     160 for the 4 samples of a call" in capsys.readouterr().out


class Pooled(nn.Module):
    """Attention by a query that is learnt, one for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.ones(1, 2, 8))
        self.to_q = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = self.to_q(self.query.expand(x.shape[0], -1, -1)) @ x[:, :, None]
        return given


def test_a_layer_that_takes_a_view_of_a_parameter_is_counted_and_still_trained() -> None:
    module = Pooled()
    signature = Signature((TensorSpec("x", "float32", ("batch", 8)),), (TensorSpec("y", "float32", ("batch", 2, 1)),))
    assert torch_macs(module, signature) == 2 * 8 * 8 + 2 * 8
    assert all(parameter.requires_grad for parameter in module.parameters())
