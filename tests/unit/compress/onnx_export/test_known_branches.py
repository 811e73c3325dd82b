"""Ifs whose branch is known stand in the graph as that branch: under names of its own, and in time that grows with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import NodeProto, helper

from compress.formats.onnx_layers import graph, parts
from compress.model.inputs import sample_inputs
from compress.onnx_export.torch_from_onnx import taken_back
from tests.unit.compress.onnx_export.test_kept_parts import IMAGE, body, saved

YES = helper.make_node("Equal", ["three", "three"], ["known"])


def if_(into: Sequence[str], then: Sequence[NodeProto], outputs: Sequence[str] = ("out",)) -> NodeProto:
    other = [helper.make_node("Identity", ["x"], [f"{name}_"]) for name in outputs]
    return helper.make_node(
        "If", ["known"], into, name=f"if_{into[-1]}", then_branch=body("then", then, outputs=outputs),
        else_branch=body("else", other, outputs=[f"{name}_" for name in outputs]),
    )  # fmt: skip


RELU, NEG = helper.make_node("Relu", ["x"], ["o"]), helper.make_node("Neg", ["o"], ["out"])
CONV = helper.make_node("Conv", ["p", "w1"], ["y"])
NESTED = if_(["out"], [helper.make_node("Sin", ["o"], ["o2"]), helper.make_node("Neg", ["o2"], ["inner"])], ["inner"])
CASES: dict[str, list[NodeProto]] = {
    "names that the graph has already": [
        YES, helper.make_node("Exp", ["x"], ["q/o"]), helper.make_node("Sin", ["q/o"], ["q/out"]), if_(["q"], [RELU, NEG]),
        helper.make_node("Add", ["q/o", "q/out"], ["s"]), helper.make_node("Add", ["q", "s"], ["p"]), CONV,
    ],
    "names that the graph makes later": [
        YES, if_(["q"], [RELU, NEG]), helper.make_node("Exp", ["q"], ["q/o"]), helper.make_node("Add", ["q", "q/o"], ["p"]), CONV,
    ],
    "one in another, with the same names": [YES, if_(["p"], [RELU, NESTED]), CONV],
    "a product that an addition and a branch read": [
        YES, helper.make_node("Conv", ["x", "w1"], ["c"]), helper.make_node("GlobalAveragePool", ["c"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]), helper.make_node("MatMul", ["f", "w4"], ["m"]),
        helper.make_node("Add", ["m", "five"], ["a"]), if_(["b"], [helper.make_node("Sin", ["m"], ["out"])]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_answers_as_the_file(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.compress.onnx_export import test_kept_parts

    monkeypatch.setitem(test_kept_parts.WEIGHTS, "five", np.arange(5, dtype=np.float32))
    file = saved(tmp_path, CASES[case], IMAGE, ["y"])
    module = taken_back(file).module  # which proves it
    inputs = sample_inputs(file.signature, 2)
    (want,) = ort.InferenceSession(file.path).run(None, dict(inputs))
    (found,) = module(*map(torch.from_numpy, inputs.values())).values()
    np.testing.assert_allclose(found.detach().numpy(), want, rtol=1e-4, atol=1e-4)


def chain(count: int) -> list[NodeProto]:
    nodes = [YES]
    for at in range(count):
        read = f"q{at}" if at else "x"
        nodes.append(if_([f"q{at + 1}"], [helper.make_node("Relu", [read], ["o"]), NEG]))
    return [*nodes, helper.make_node("Conv", [f"q{count}", "w1"], ["y"])]


def test_twice_as_many_are_twice_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    one = parts.read_by

    def counting(node: NodeProto) -> list[str]:
        nonlocal asked
        asked += 1
        return one(node)

    monkeypatch.setattr(graph, "read_by", counting)
    work: list[Any] = []
    for count in (20, 40):
        asked = 0
        taken_back(saved(tmp_path, chain(count), IMAGE, ["y"]))
        work.append(asked)
    assert work[1] < 2.2 * work[0]
