"""Which outputs are chances is read from the graph, in a time that grows with it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from compress.quantize.chances import chances_of


def file_of(path: Path, nodes: list[NodeProto], **weights: Any) -> Path:
    """From x to y, float32 [batch, 4]; weights are arrays, or tensors as they are."""
    held = [
        value if isinstance(value, TensorProto) else numpy_helper.from_array(np.asarray(value), name)
        for name, value in weights.items()
    ]
    given, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [given], [made], held)
    domains = [helper.make_opsetid("", 20), helper.make_opsetid("of.mine", 1)]
    onnx.save(helper.make_model(graph, opset_imports=domains, ir_version=10), path)
    return path


def chain(*kinds: str, by: str = "k") -> list[NodeProto]:
    """Nodes one after another, from x to y; those of two inputs read a constant, too."""
    names = ["x", *(f"t{at}" for at in range(1, len(kinds))), "y"]
    return [
        helper.make_node(kind, [names[at], by] if kind in ("Mul", "Div", "Add") else [names[at]], [names[at + 1]])
        for at, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(
    ("kinds", "k", "scale"),
    [
        (["Sigmoid"], 1.0, 1.0),
        (["Softmax", "Identity"], 1.0, 1.0),
        (["Sigmoid", "Mul"], 100.0, 100.0),
        (["Sigmoid", "Div"], 0.01, 100.0),
        (["Sigmoid", "Mul", "Mul"], 10.0, 100.0),
        (["Sigmoid", "Mul"], -1.0, None),
        (["Sigmoid", "Mul"], 0.0, None),
        (["Sigmoid", "Mul", "Add"], 2.0, None),
        (["Relu", "Mul"], 2.0, None),
        (["Sigmoid", *["Mul"] * 3], 1e10, 1e30),
        (["Sigmoid", *["Mul"] * 5], 1e10, None),
    ],
)
def test_what_a_sigmoid_or_a_softmax_gives_times_a_constant_is_chances(
    kinds: list[str], k: float, scale: float | None, tmp_path: Path
) -> None:
    found = chances_of(file_of(tmp_path / "m.onnx", chain(*kinds), k=np.float32(k)))
    assert found == ({} if scale is None else {"y": pytest.approx(scale, rel=1e-6)})


@pytest.mark.parametrize("place", ["initializer", "constant"])
@pytest.mark.parametrize("kind", [TensorProto.STRING, TensorProto.INT64, TensorProto.BOOL, TensorProto.COMPLEX64])
def test_constants_of_other_types_are_no_numbers(kind: int, place: str, tmp_path: Path) -> None:
    value = helper.make_tensor("w", kind, [], [b"abc"] if kind == TensorProto.STRING else [1])
    nodes = chain("Sigmoid")
    if place == "constant":
        nodes.append(helper.make_node("Constant", [], ["c"], value=value))
    weights = {"w": value} if place == "initializer" else {}
    assert chances_of(file_of(tmp_path / "m.onnx", nodes, **weights)) == {"y": 1.0}


def test_an_operator_of_another_domain_is_none_of_these(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Sigmoid", ["x"], ["s"], domain="of.mine"),
        helper.make_node("Mul", ["s", "k", "k"], ["y"], domain="of.mine"),
    ]
    assert chances_of(file_of(tmp_path / "m.onnx", nodes, k=np.float32(1))) == {}


@pytest.mark.parametrize("other", ["s", "x"])
def test_what_is_joined_is_chances_where_all_of_it_is(other: str, tmp_path: Path) -> None:
    nodes = [helper.make_node("Sigmoid", ["x"], ["s"]), helper.make_node("Concat", ["s", other], ["y"], axis=1)]
    assert chances_of(file_of(tmp_path / "m.onnx", nodes)) == ({"y": 1.0} if other == "s" else {})


def test_what_is_joined_with_itself_again_and_again_takes_no_longer(tmp_path: Path) -> None:
    pairs = 60
    nodes = [helper.make_node("Sigmoid", ["x"], ["t0"])]
    for at in range(pairs):
        nodes += [
            helper.make_node("Concat", [f"t{at}"] * 3, [f"c{at}"], axis=1),
            helper.make_node("Slice", [f"c{at}", "low", "high", "axis"], [f"t{at + 1}" if at + 1 < pairs else "y"]),
        ]
    path = file_of(tmp_path / "m.onnx", nodes, low=np.array([0]), high=np.array([4]), axis=np.array([1]))
    began = time.perf_counter()
    assert chances_of(path) == {"y": 1.0}
    assert time.perf_counter() - began < 1.0
