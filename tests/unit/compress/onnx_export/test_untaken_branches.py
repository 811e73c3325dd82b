"""What stands in a branch that no sample takes does in the opset that is written what it did in the file's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from compress.errors import StageError
from compress.formats.onnx.load import load_onnx
from compress.formats.onnx.scope import inner_nodes
from compress.model import OnnxModel
from compress.onnx_export.from_torch import OPSET, OnnxFromTorch
from compress.onnx_export.torch_from_onnx import TorchFromOnnx
from tests.unit.compress.onnx_graphs import normal

node = helper.make_node
FAR = 1e4  # what an input has to be for the other branch: no sample is
WEIGHTS: dict[str, Any] = {
    "w1": normal(4, 16), "w2": normal(16, 8), "scale": normal(16, seed=1) + 1, "bias": normal(16, seed=2),
    "far": np.float32(FAR), "first": np.array([0]), "at0": np.array(0), "roi": np.array([[0, 0, 15, 4]], np.float32),
    "zero": np.array([0]), "twice": np.array([1, 1, 2], np.float32), "half": np.array([1, 1, 0.5], np.float32),
    "grid": np.linspace(-1, 1, 160, dtype=np.float32).reshape(1, 5, 16, 2), "axes3": np.array([3]),
}  # fmt: skip
PLANE = [node("Unsqueeze", ["m", "first"], ["plane"])]  # [1, batch, 5, 16]
OUT = node("Squeeze", ["drawn", "first"], ["out"])
BRANCHES: dict[str, tuple[int, list[NodeProto]]] = {
    "a normalization of groups, whose scales are of channels since opset 21": (
        21, [node("Transpose", ["m"], ["t"], perm=[0, 2, 1]),
             node("GroupNormalization", ["t", "scale", "bias"], ["n"], num_groups=4, epsilon=1e-3),
             node("Transpose", ["n"], ["out"], perm=[0, 2, 1])],
    ),
    "a mean whose axes are an attribute before opset 18": (
        17, [node("ReduceMean", ["m"], ["mean"], axes=[2]), node("Sub", ["m", "mean"], ["out"])],
    ),
    "a split without a number of parts, as before opset 18": (
        17, [node("Split", ["m"], ["one", "other"], axis=2), node("Concat", ["other", "one"], ["out"], axis=2)],
    ),
    "regions whose places are others since opset 16": (
        15, [*PLANE, node("RoiAlign", ["plane", "roi", "zero"], ["drawn"], output_height=5, output_width=16), OUT],
    ),
    "a spectrum of the first axis, as by default before opset 20": (
        19, [node("Unsqueeze", ["m", "axes3"], ["wide"]), node("DFT", ["wide"], ["pairs"]),
             node("Gather", ["pairs", "at0"], ["out"], axis=3)],
    ),
    "samples between pixels, whose mode has another name since opset 20": (
        19, [*PLANE, node("GridSample", ["plane", "grid"], ["drawn"], mode="bilinear"), OUT],
    ),
    "what is left out": (
        13, [node("Resize", ["m", "", "twice"], ["wide"]), node("Resize", ["wide", "", "half"], ["out"])],
    ),
    "a shape, which has a first and a last axis since opset 15": (
        13, [node("Shape", ["m"], ["sizes"]), node("Reshape", ["m", "sizes"], ["out"])],
    ),
    "in another branch": (
        17, [node("Greater", ["sum", "far"], ["larger"]),
             node("If", ["larger"], ["out"],
                  then_branch=helper.make_graph(
                      [node("ReduceL2", ["m"], ["norm"], axes=[2]), node("Div", ["m", "norm"], ["in_then"])], "then2", [],
                      [helper.make_tensor_value_info("in_then", TensorProto.FLOAT, None)]),
                  else_branch=helper.make_graph([node("Neg", ["m"], ["in_else"])], "else2", [],
                      [helper.make_tensor_value_info("in_else", TensorProto.FLOAT, None)]))],
    ),
}  # fmt: skip


def written(folder: Path, opset: int, branch: Sequence[NodeProto]) -> OnnxModel:
    """A product, of which a branch goes on where it sums to much; and another product."""
    outputs = [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)]
    other = [helper.make_tensor_value_info("same", TensorProto.FLOAT, None)]
    nodes = [
        node("MatMul", ["x", "w1"], ["m"]),
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        node("Greater", ["sum", "far"], ["large"]),
        node(
            "If", ["large"], ["p"], name="part",
            then_branch=helper.make_graph(branch, "then", [], outputs),
            else_branch=helper.make_graph([node("Neg", ["m"], ["same"])], "else", [], other),
        ),
        node("MatMul", ["p", "w2"], ["y"]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("batch", 5, 4))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(values), name) for name, values in WEIGHTS.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), folder / "m.onnx")
    return load_onnx(folder / "m.onnx")


def answer(path: Path, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    (found,) = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    return np.asarray(found)


@pytest.mark.parametrize("case", BRANCHES)
def test_a_branch_that_no_sample_takes_answers_as_in_the_file(case: str, tmp_path: Path) -> None:
    file = written(tmp_path, *BRANCHES[case])
    network = TorchFromOnnx().run(file, tmp_path, lambda *_: None).model
    (tmp_path / "out").mkdir()
    found = OnnxFromTorch().run(network, tmp_path / "out", lambda *_: None).model  # type: ignore[arg-type]
    assert isinstance(found, OnnxModel)
    made = onnx.load(found.path)
    assert made.opset_import[0].version == OPSET
    assert any(inner_nodes(made.graph))
    for x in (normal(3, 5, 4), normal(3, 5, 4) + FAR):
        np.testing.assert_allclose(answer(found.path, x), answer(file.path, x), rtol=1e-4, atol=1e-3 * np.abs(x).max())


MANY = 1000
REFUSED: dict[str, tuple[int, list[NodeProto], str]] = {
    "very many whose bodies are long": (
        23, [node("Attention", [f"a{at}" if at else "m", "m", "m"], [f"a{at + 1}" if at + 1 < MANY else "out"],
                  q_num_heads=2, kv_num_heads=2, softcap=2.0) for at in range(MANY)],
        "has no Attention as opset 23 has it, and what ONNX writes in place of",
    ),
    "of a type that nobody knows": (
        21, [node("FastGelu", ["m"], ["g"], domain="com.microsoft"),
             node("GroupNormalization", ["g", "five", "five"], ["out"], num_groups=5)],
        "has no GroupNormalization as opset 21 has it, and ONNX can't write it by others",
    ),
}  # fmt: skip
WEIGHTS["five"] = normal(5) + 1


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_written_so_is_refused_by_name(case: str, tmp_path: Path) -> None:
    opset, branch, why = REFUSED[case]
    with pytest.raises(StageError, match="can't take ") as caught:
        TorchFromOnnx().run(written(tmp_path, opset, branch), tmp_path, lambda *_: None)
    assert why in caught.value.why
