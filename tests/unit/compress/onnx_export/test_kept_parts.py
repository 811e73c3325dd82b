"""What has no form in torch stays as it is in ONNX, by name: nothing is pruned through it, and it is written back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from compress.errors import StageError
from compress.formats.checkpoint import load, save
from compress.formats.native.onnx_part import OnnxPart
from compress.formats.onnx.load import load_onnx
from compress.formats.onnx.scope import bodies
from compress.model import OnnxModel, TorchModel
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.onnx_export.torch_from_onnx import TorchFromOnnx, taken_back
from compress.prune.prune_channels import PruneChannels
from compress.runtime.measure import torch_params
from compress.stage import Given
from tests.unit.compress.onnx_graphs import normal

IMAGE = ("batch", 4, 9, 10)
WEIGHTS: dict[str, Any] = {
    "w1": normal(16, 4, 3, 3), "w2": normal(6, 16, 3, 3), "w3": normal(16, 6, 3, 3), "w4": normal(16, 5),
    "axis": np.array(1), "two": np.float32(2), "at0": np.array(0), "one": np.array(1), "three": np.array(3),
    "yes": np.array(True), "k": np.array([4]), "row": normal(6, 1, 1), "axes": np.array([1]),
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
    "a branch that reads a size and a table around it": [
        *IF[:3],
        helper.make_node("Cast", ["n"], ["many"], to=1),
        helper.make_node(
            "If", ["alone"], ["p"], name="part",
            then_branch=body("then", [helper.make_node("Mul", ["m", "row"], ["out"])]),
            else_branch=body("else", [helper.make_node("Div", ["m", "many"], ["o"]), helper.make_node("Mul", ["o", "row"], ["out"])]),
        ),
    ],
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
    folder: Path,
    nodes: Sequence[NodeProto],
    shape: Sequence[int | str],
    outputs: Sequence[str],
    opset: int = 17,
    more: Sequence[Any] = (),
) -> OnnxModel:
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape), *more],
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
    return bytes(copy.SerializeToString(deterministic=True))


def pruned_by(share: float, given: Given, folder: Path) -> TorchModel:
    assert isinstance(given.model, TorchModel)
    found = PruneChannels(share).run(given.model, folder, lambda *_: None).model
    assert isinstance(found, TorchModel)
    return found


def back(model: TorchModel, folder: Path) -> list[NodeProto]:
    """The nodes of what it is written to, proven."""
    (folder / "out").mkdir()
    found = OnnxFromTorch().run(model, folder / "out", lambda *_: None).model
    assert isinstance(found, OnnxModel)
    return list(onnx.load(found.path).graph.node)


@pytest.mark.parametrize("case", PARTS)
def test_what_is_around_it_is_pruned_and_it_stands_there_as_it_was(case: str, tmp_path: Path) -> None:
    file = written(tmp_path, PARTS[case])
    given = TorchFromOnnx().run(file, tmp_path, lambda *_: None)  # which proves it
    (told,) = given.details["kept_as_they_are"]
    assert "'part'" in told
    assert told in given.warnings[0]
    pruned = pruned_by(0.4, given, tmp_path)
    sizes = {name: tuple(each.shape) for name, each in pruned.module.named_parameters()}
    assert sizes["w1.weight"][0] < 16
    assert sizes["w3.weight"][0] < 16
    assert (sizes["w2.weight"][0], sizes["w3.weight"][1]) == (6, 6)  # what goes into it, and what comes out
    nodes = back(pruned, tmp_path)
    (was,) = [node for node in onnx.load(file.path).graph.node if node.name == "part"]
    if case != "an operator that is another in a newer opset":
        assert without_names({node.op_type: node for node in nodes}[was.op_type]) == without_names(was)


LAST: dict[str, list[NodeProto]] = {
    "how many are not zero": [
        helper.make_node("Relu", ["y1"], ["r"]),
        helper.make_node("NonZero", ["r"], ["places"], name="part"),
        helper.make_node("Transpose", ["places"], ["n"], perm=[1, 0]),
    ],
    "a sequence": [
        helper.make_node("SplitToSequence", ["y1"], ["all"], name="part", axis=1),
        helper.make_node("SequenceLength", ["all"], ["n"]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", LAST)
def test_with_what_gives_as_much_as_values_say_all_behind_it_stays(case: str, tmp_path: Path) -> None:
    before = [
        helper.make_node("Conv", ["x", "w1"], ["a"]),
        helper.make_node("Relu", ["a"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["m"]),
        helper.make_node("GlobalAveragePool", ["m"], ["g"]),
        helper.make_node("Flatten", ["g"], ["y1"]),
    ]
    file = saved(tmp_path, [*before, *LAST[case]], IMAGE, ["y1", "n"])
    given = TorchFromOnnx().run(file, tmp_path, lambda *_: None)
    assert [each.partition(" at ")[2] for each in given.details["kept_as_they_are"]] == ["'part'"]
    pruned = pruned_by(0.3, given, tmp_path)
    kinds = [node.op_type for node in back(pruned, tmp_path)]
    assert kinds[-len(LAST[case]) + 1 :] == [node.op_type for node in LAST[case]][1:]


def test_of_an_if_whose_branch_is_known_the_branch_is_taken_back(tmp_path: Path) -> None:
    branch = body("then", [helper.make_node("Relu", ["m"], ["o"]), helper.make_node("Neg", ["o"], ["out"])])
    other = body("else", [helper.make_node("CumSum", ["m", "axis"], ["out"])])
    nodes = [
        helper.make_node("Equal", ["three", "one"], ["no"]),
        helper.make_node("Not", ["no"], ["known"]),
        helper.make_node("If", ["known"], ["p"], name="part", then_branch=branch, else_branch=other),
    ]
    given = TorchFromOnnx().run(written(tmp_path, nodes), tmp_path, lambda *_: None)
    assert given.details["kept_as_they_are"] == {}
    assert isinstance(given.model, TorchModel)
    assert not any(isinstance(layer, OnnxPart) for layer in given.model.module.modules())


def test_a_file_that_is_all_in_one_if_is_told_how_to_be_taken_back(tmp_path: Path) -> None:
    """As by a rate of samples: with a value for it in the file, the branch is known."""
    whole = [
        helper.make_node("Conv", ["x", "w1"], ["a"]),
        helper.make_node("Relu", ["a"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["out"]),
    ]
    branches = {
        "then_branch": body("then", whole),
        "else_branch": body("else", [helper.make_node("Conv", ["x", "w1"], ["out"])]),
    }
    nodes = [
        helper.make_node("Equal", ["rate", "three"], ["known"]),
        helper.make_node("If", ["known"], ["y"], name="part", **branches),
    ]
    rate = helper.make_tensor_value_info("rate", TensorProto.INT64, [])
    file = saved(tmp_path, nodes, IMAGE, ["y"], more=[rate])
    with pytest.raises(StageError, match="If at 'part'") as caught:
        taken_back(file)
    assert "give that input a value in the file" in caught.value.mend
    model = onnx.load(file.path)
    model.graph.initializer.append(numpy_helper.from_array(np.array(3), "rate"))
    onnx.save(model, file.path)
    layers = taken_back(load_onnx(file.path)).module.modules()
    assert sum(1 for layer in layers if isinstance(layer, torch.nn.Conv2d)) == 2


def test_a_model_file_holds_it(tmp_path: Path) -> None:
    model = taken_back(written(tmp_path, PARTS["a loop"]))
    save(model.module, tmp_path / "m.pt", inputs=model.signature.inputs)
    x = torch.from_numpy(normal(3, *IMAGE[1:]))
    torch.testing.assert_close(load(tmp_path / "m.pt").module(x), model.module(x))


def test_its_weights_are_counted(tmp_path: Path) -> None:
    given = taken_back(written(tmp_path, PARTS["a branch that reads a size and a table around it"]))
    plain = sum(each.numel() for each in given.module.parameters())
    assert torch_params(given.module) == plain + 6


def test_the_first_node_may_be_one(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("CumSum", ["x", "axis"], ["s"], name="part"),
        helper.make_node("Conv", ["s", "w1"], ["a"]),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Conv", ["r", "w2"], ["y"]),
    ]
    given = TorchFromOnnx().run(
        saved(tmp_path, nodes, ("batch", 4, "height", "width"), ["y"]), tmp_path, lambda *_: None
    )
    assert [node.op_type for node in back(pruned_by(0.3, given, tmp_path), tmp_path)] == [
        "CumSum",
        "Conv",
        "Relu",
        "Conv",
    ]


def test_what_draws_random_numbers_is_told_by_name(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["noise"], name="part"),
        helper.make_node("Add", ["x", "noise"], ["s"]),
        helper.make_node("Conv", ["s", "w1"], ["y"]),
    ]
    with pytest.raises(StageError, match="it draws random numbers"):
        taken_back(saved(tmp_path, nodes, IMAGE, ["y"]))


def test_bytes_that_are_no_model_are_not_run(tmp_path: Path) -> None:
    model = taken_back(written(tmp_path, PARTS["a loop"]))
    (part,) = [layer for layer in model.module.modules() if isinstance(layer, OnnxPart)]
    other = OnnxPart(part.size, part.digest, part.told, part.weights, part.inputs, part.outputs)
    with pytest.raises(StageError, match="in ONNX") as caught:
        other(torch.zeros(2, 6, 9, 10))
    assert "its bytes are others" in caught.value.why


def test_what_has_no_layers_besides_is_refused_by_that_name(tmp_path: Path) -> None:
    nodes = [helper.make_node("CumSum", ["x", "axis"], ["y"], name="sums")]
    with pytest.raises(StageError, match="CumSum at 'sums'") as caught:
        taken_back(saved(tmp_path, nodes, IMAGE, ["y"]))
    assert "nothing else of it has weights" in caught.value.why


def test_more_parts_than_can_be_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.formats.onnx_layers.graph.MOST_PARTS", 3)
    names = ["m", "s1", "s2", "s3", "p"]
    parts = [helper.make_node("CumSum", [one, "axis"], [other], name=f"into {other}") for one, other in pairwise(names)]
    taken_back(written(tmp_path, [*parts[:2], helper.make_node("CumSum", ["s2", "axis"], ["p"])]))
    with pytest.raises(StageError, match="CumSum at 'into p'") as caught:
        taken_back(written(tmp_path, parts))
    assert "over 3 nodes of it would stay in ONNX" in caught.value.why


def test_parameters_that_no_gradient_reaches_keep_their_values(tmp_path: Path) -> None:
    model = taken_back(written(tmp_path, PARTS["an operator without a layer"]))
    trained = {name for name, each in model.module.named_parameters() if each.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"w3", "w4"}
