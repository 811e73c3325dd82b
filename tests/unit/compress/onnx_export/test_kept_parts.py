"""What has no form in torch stays as it is in ONNX, by name: nothing is pruned through it, and it is written back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from compress.formats.onnx.load import load_onnx
from compress.formats.onnx.scope import bodies
from compress.model import OnnxModel
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.onnx_export.torch_from_onnx import TorchFromOnnx
from compress.prune.prune_channels import PruneChannels
from tests.unit.compress.onnx_graphs import normal

IMAGE = ("batch", 4, 9, 10)
WEIGHTS: dict[str, Any] = {
    "w1": normal(16, 4, 3, 3), "w2": normal(6, 16, 3, 3), "w3": normal(16, 6, 3, 3), "w4": normal(16, 5),
    "axis": np.array(1), "two": np.float32(2), "at0": np.array(0), "one": np.array(1), "three": np.array(3),
    "yes": np.array(True), "k": np.array([4]), "axes": np.array([1]),
}  # fmt: skip


def body(
    name: str, nodes: Sequence[NodeProto], inputs: Sequence[Any] = (), outputs: Sequence[str] = ("out",)
) -> GraphProto:
    kinds = {"go": TensorProto.BOOL, "i": TensorProto.INT64}
    made = [
        helper.make_tensor_value_info(each, kinds.get(each.rstrip("_"), TensorProto.FLOAT), None) for each in outputs
    ]
    given = [
        helper.make_tensor_value_info(each, kinds.get(each, TensorProto.FLOAT), [] if each in kinds else None)
        for each in inputs
    ]
    return helper.make_graph(nodes, name, given, made)


IF = [
    helper.make_node("Shape", ["m"], ["sizes"]),
    helper.make_node("Gather", ["sizes", "at0"], ["n"], axis=0),
    helper.make_node("Equal", ["n", "one"], ["alone"]),
    helper.make_node(
        "If", ["alone"], ["p"], name="part",
        then_branch=body("then", [helper.make_node("Mul", ["m", "two"], ["out"])]),
        else_branch=body("else", [helper.make_node("Mul", ["m", "two"], ["o"]), helper.make_node("Sin", ["o"], ["out"])]),
    ),
]  # fmt: skip
LOOP = helper.make_node(
    "Loop", ["three", "yes", "m"], ["p"], name="part",
    body=body("body", [helper.make_node("Identity", ["go"], ["go_"]), helper.make_node("Sin", ["v"], ["v_"])],
              ["i", "go", "v"], ["go_", "v_"]),
)  # fmt: skip
PARTS: dict[str, list[NodeProto]] = {
    "an operator without a layer": [helper.make_node("CumSum", ["m", "axis"], ["p"], name="part")],
    "another's operator": [helper.make_node("FastGelu", ["m"], ["p"], name="part", domain="com.microsoft")],
    "a branch by the size of the batch": IF,
    "a loop": [LOOP],
    "an operator that is another in a newer opset": [
        helper.make_node("ReduceL2", ["m"], ["norm"], name="part", axes=[1]),
        helper.make_node("Div", ["m", "norm"], ["p"]),
    ],
    "outputs of two types": [
        helper.make_node("TopK", ["m", "k"], ["v", "i"], name="part", axis=3),
        helper.make_node("Cast", ["i"], ["f"], to=1),
        helper.make_node("Add", ["v", "f"], ["p"]),
    ],
    "an output whose size hangs on the input's": [
        helper.make_node("MaxPool", ["m"], ["less", "where"], name="part", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Cast", ["where"], ["f"], to=1),
        helper.make_node("Max", ["less", "f"], ["p"]),
    ],
}  # fmt: skip


def written(
    folder: Path, part: Sequence[NodeProto], *, shape: Sequence[int | str] = IMAGE, opset: int = 17
) -> OnnxModel:
    """x through two convolutions, the part, another convolution, and a product."""
    behind = [
        helper.make_node("Conv", ["p", "w3"], ["c"]),
        helper.make_node("Relu", ["c"], ["r3"]),
        helper.make_node("GlobalAveragePool", ["r3"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f3"]),
        helper.make_node("Gemm", ["f3", "w4"], ["y"]),
    ]
    before = [
        helper.make_node("Conv", ["x", "w1"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["m"], pads=[1, 1, 1, 1]),
    ]
    return saved(folder, [*before, *part, *behind], shape, ["y"], opset)


def saved(
    folder: Path, nodes: Sequence[NodeProto], shape: Sequence[int | str], outputs: Sequence[str], opset: int = 17
) -> OnnxModel:
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT if name[0] == "y" else TensorProto.INT64, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(values), name) for name, values in WEIGHTS.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), folder / "m.onnx")
    return load_onnx(folder / "m.onnx")


def without_names(node: NodeProto) -> bytes:
    """What a node is, but for the names of tensors."""
    copy = NodeProto.FromString(node.SerializeToString())
    del copy.input[:], copy.output[:]
    for graph in bodies(copy):
        kinds = [without_names(inner) for inner in graph.node]
        graph.Clear()
        graph.doc_string = repr(kinds)
    return copy.SerializeToString(deterministic=True)


@pytest.mark.parametrize("case", PARTS)
def test_what_is_around_it_is_pruned_and_it_stands_there_as_it_was(case: str, tmp_path: Path) -> None:
    file = written(tmp_path, PARTS[case])
    given = TorchFromOnnx().run(file, tmp_path, lambda *_: None)  # which proves it
    (told,) = given.details["kept_as_they_are"]
    assert "'part'" in told
    assert told in given.warnings[0]
    pruned = PruneChannels(0.4).run(given.model, tmp_path, lambda *_: None).model
    sizes = {name: tuple(each.shape) for name, each in pruned.module.named_parameters()}
    assert sizes["w1.weight"][0] < 16
    assert sizes["w3.weight"][0] < 16
    assert (sizes["w2.weight"][0], sizes["w3.weight"][1]) == (6, 6)  # what goes into it, and what comes out
    (tmp_path / "out").mkdir()
    back = OnnxFromTorch().run(pruned, tmp_path / "out", lambda *_: None).model  # which proves it
    (was,) = [node for node in onnx.load(file.path).graph.node if node.name == "part"]
    nodes = {node.op_type: node for node in onnx.load(back.path).graph.node}
    if case != "an operator that is another in a newer opset":
        assert without_names(nodes[was.op_type]) == without_names(was)
