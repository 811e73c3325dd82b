"""A part that is in ONNX is anybody's, as the model file is that it came in: what it can't be put back by is refused."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import nn

from compress.errors import StageError
from compress.formats.checkpoint import save
from compress.formats.native.onnx_part import DOMAIN, ROOM, OnnxPart
from compress.formats.onnx.scope import rename
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.onnx_export.kept_parts import put_back
from compress.onnx_export.torch_from_onnx import TorchFromOnnx, taken_back
from tests.unit.compress.onnx_export.test_kept_parts import IF, IMAGE, PARTS, WEIGHTS, body, saved, written

SIZES = (6, 9, 10)


def with_bytes(part: OnnxPart, model: ModelProto) -> None:
    data = model.SerializeToString()
    part.size, part.digest = len(data), hashlib.sha256(data).hexdigest()
    part.model = torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def value_for_an_input(model: ModelProto) -> None:
    model.graph.initializer.append(
        numpy_helper.from_array(np.zeros((2, *SIZES), np.float32), model.graph.input[0].name)
    )


def value_for_what_is_computed(model: ModelProto) -> None:
    model.graph.initializer.append(
        numpy_helper.from_array(np.zeros((2, *SIZES), np.float32), model.graph.output[0].name)
    )


def output_that_is_an_input(model: ModelProto) -> None:
    model.graph.output[0].name = model.graph.input[0].name


def another_input(model: ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, [1]))


def two_outputs(model: ModelProto) -> None:
    model.graph.output.append(model.graph.output[0])


def function(model: ModelProto) -> None:
    nodes = [helper.make_node("Sin", ["a"], ["b"])]
    model.functions.append(helper.make_function("mine", "F", ["a"], ["b"], nodes, model.opset_import))


def room_for_another(model: ModelProto) -> None:
    model.graph.node.append(helper.make_node(ROOM, [model.graph.input[0].name], ["z"], domain=DOMAIN))


def sparse(model: ModelProto) -> None:
    values, indices = (
        numpy_helper.from_array(np.ones(1, np.float32), "s"),
        numpy_helper.from_array(np.zeros(1, np.int64)),
    )
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))


CHANGES: list[tuple[Callable[[ModelProto], None], str]] = [
    (value_for_an_input, "which it is given, or computes"),
    (value_for_what_is_computed, "which it is given, or computes"),
    (output_that_is_an_input, "have one name"),
    (another_input, "other inputs or outputs than it says"),
    (two_outputs, "other inputs or outputs than it says"),
    (function, "functions"),
    (room_for_another, "another part|a library would have to bring"),
    (sparse, "sparse"),
]


@pytest.mark.parametrize(("change", "says"), CHANGES, ids=lambda each: getattr(each, "__name__", ""))
def test_a_model_that_is_no_part_is_refused_in_words(change: Any, says: str, tmp_path: Path) -> None:
    given = taken_back(written(tmp_path, PARTS["an operator without a layer"]))
    module = copy.deepcopy(given.module)  # of which none has run
    (part,) = [layer for layer in module.modules() if isinstance(layer, OnnxPart)]
    model = ModelProto.FromString(part.onnx())
    change(model)
    with_bytes(part, model)
    with pytest.raises(StageError, match="in ONNX") as caught:
        part(torch.zeros(2, *SIZES))
    assert re.search(says, caught.value.why)
    with pytest.raises(StageError, match="in ONNX"):
        save(module, tmp_path / "m.pt", inputs=given.signature.inputs)
    assert not (tmp_path / "m.pt").exists()


GOOD: tuple[Any, ...] = (10, "0" * 64, "Sin", 0, (("float32", -1, 4),), (("float32", (0, 0, 1, 0, 1), 4),))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (4, ()), (4, ("float32",)), (4, (("float31", 4),)), (4, ((),)), (4, (("float32", -2),)), (4, (("float32", "4"),)), (4, 3),
        (4, (("float32", (0, 2), 4),)), (4, (("float32", (1, 0), 4),)), (4, (("float32", (0, 0.0), 4),)), (4, (("float32", (0,), 4),)),
        (5, ()), (5, (("float32", (0, 0, 1, 0, 0)),)), (5, (("float32", (1, 0, 1, 0, 1)),)), (5, (("float32", (0, 2, 1, 0, 1)),)),
        (5, (("float32", (0, 0, 0, 2)),)), (5, (("float32", (0, 0)),)), (5, (("float32", (0.0, 0, 1, 0, 1)),)), (1, 7), (2, None),
    ],
)  # fmt: skip
def test_sizes_that_are_described_otherwise_are_no_parts(place: int, value: Any) -> None:
    OnnxPart(*GOOD)
    with pytest.raises(ValueError, match="described"):
        OnnxPart(*(value if at == place else each for at, each in enumerate(GOOD)))


def test_behind_a_part_that_gives_one_axis_less_at_other_sizes_all_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another batch, it gives one axis less, and a mean over places would have none to go over."""
    monkeypatch.setitem(WEIGHTS, "pair", np.array(2))
    monkeypatch.setitem(WEIGHTS, "flat", np.array([0, 6, -1]))
    monkeypatch.setitem(WEIGHTS, "w6", np.ones((6, 5), np.float32))
    file = saved(tmp_path, [
        helper.make_node("Conv", ["x", "w1"], ["a"]), helper.make_node("Conv", ["a", "w2"], ["m"]), *IF[:2],
        helper.make_node("Equal", ["n", "pair"], ["is_pair"]),
        helper.make_node("If", ["is_pair"], ["p"], name="part",
                         then_branch=body("then", [helper.make_node("Sin", ["m"], ["out"])]),
                         else_branch=body("else", [helper.make_node("Reshape", ["m", "flat"], ["out"])])),
        helper.make_node("GlobalAveragePool", ["p"], ["g"]), helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "w6"], ["y"]),
    ], IMAGE, ["y"])  # fmt: skip
    given = TorchFromOnnx().run(file, tmp_path, lambda *_: None)
    (why,) = given.details["kept_as_they_are"].values()
    assert "how many axes" in why
    assert "all behind it stays, too" in why


OLDER = [
    helper.make_node("ReduceMean", ["m"], ["mean"], axes=[1]),
    helper.make_node("Sub", ["m", "mean"], ["p"]),
]


@pytest.mark.parametrize(
    ("opset", "nodes", "refused"),
    [(17, OLDER, ""), (26, [helper.make_node("CumProd", ["m", "axis"], ["p"])], "has no CumProd as opset 26 has it")],
    ids=["another form", "none"],
)  # fmt: skip
def test_a_part_of_another_opset_is_written_in_that_of_the_file(
    opset: int, nodes: list[NodeProto], refused: str, tmp_path: Path
) -> None:
    taken = taken_back(written(tmp_path, PARTS["an operator without a layer"]))
    taken = dataclasses.replace(taken, module=copy.deepcopy(taken.module))  # which has not run yet
    (part,) = [layer for layer in taken.module.modules() if isinstance(layer, OnnxPart)]
    model = ModelProto.FromString(part.onnx())
    inside, outside = model.graph.input[0].name, model.graph.output[0].name
    model.graph.ClearField("node")
    model.graph.ClearField("initializer")
    model.graph.initializer.append(numpy_helper.from_array(np.array(1), "axis"))
    model.graph.node.extend(nodes)
    rename(model.graph, {"m": inside, "p": outside})
    model.opset_import[0].version = opset
    with_bytes(part, model)
    if refused:
        with pytest.raises(StageError, match="which stays in ONNX") as caught:
            put_back(exported_around(part), nn.ModuleList([part]), taken.signature)
        assert refused in caught.value.why
        return
    OnnxFromTorch().run(taken, tmp_path, lambda *_: None)  # which proves it


def exported_around(part: OnnxPart) -> ModelProto:
    """What the exporter writes of a part alone."""
    node = helper.make_node(ROOM, ["x"], ["y"], domain=DOMAIN, digest=part.digest)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("batch", *SIZES)) for name in ("x", "y")]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)])
