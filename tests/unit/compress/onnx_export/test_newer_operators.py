"""Operators that are newer than the opset that is written: layers of torch, or by the bodies that ONNX gives them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper
from torch import nn

from compress.formats.onnx.load import load_onnx
from compress.model import OnnxModel, TorchModel
from compress.onnx_export.from_torch import OPSET, OnnxFromTorch
from compress.onnx_export.torch_from_onnx import TorchFromOnnx
from compress.prune.prune_channels import PruneChannels
from tests.unit.compress.onnx_graphs import normal

node = helper.make_node
CHANNELS = 8
WEIGHTS: dict[str, Any] = {
    "w1": normal(16, 4), "q": normal(16, 16), "w2": normal(16, CHANNELS), "scale": normal(16, seed=1) + 1,
    "bias": normal(16, seed=2), "groups": normal(4, seed=3) + 1, "groups_bias": normal(4, seed=4), "axis": np.array([1]),
    "mask": np.tril(np.ones((5, 5), bool)), "table": normal(5, 2, seed=5), "heads": np.array([0, 0, 4, 4]),
    "flat": np.array([0, 0, 16]), "one": np.float32(1), "cap": normal(16, seed=6), "column": normal(5, 1, seed=7),
}  # fmt: skip
SPREAD = [node("Transpose", ["m"], ["t"], perm=[0, 2, 1])]  # [batch, channels, length]
BACK = [node("Transpose", ["n"], ["p"], perm=[0, 2, 1])]
TAKEN_BACK: dict[str, tuple[int, list[NodeProto]]] = {
    "a normalization of groups": (
        21, [*SPREAD, node("GroupNormalization", ["t", "scale", "bias"], ["n"], num_groups=4, epsilon=1e-3), *BACK],
    ),
    "a normalization of groups, with scales of these": (
        18, [*SPREAD, node("GroupNormalization", ["t", "groups", "groups_bias"], ["n"], num_groups=4), *BACK],
    ),
    "a root mean square": (23, [node("RMSNormalization", ["m", "scale"], ["p"], epsilon=1e-3)]),
    "swish": (24, [node("Swish", ["m"], ["p"])]),
    "swish of a multiple": (24, [node("Swish", ["m"], ["p"], alpha=1.7)]),
    "attention": (
        23, [node("MatMul", ["m", "q"], ["qs"]),
             node("Attention", ["qs", "m", "m"], ["p"], q_num_heads=4, kv_num_heads=4)],
    ),
    "attention of fewer keys, to what was before": (
        24, [node("MatMul", ["m", "q"], ["qs"]),
             node("Attention", ["qs", "m", "m"], ["p"], q_num_heads=4, kv_num_heads=4, is_causal=1, scale=0.3)],
    ),
    "attention with a mask": (
        23, [node("Attention", ["m", "m", "m", "mask"], ["p"], q_num_heads=2, kv_num_heads=2)],
    ),
    "attention with heads apart": (
        23, [node("Reshape", ["m", "heads"], ["h"]), node("Transpose", ["h"], ["ht"], perm=[0, 2, 1, 3]),
             node("Attention", ["ht", "ht", "ht"], ["n"]), node("Transpose", ["n"], ["nt"], perm=[0, 2, 1, 3]),
             node("Reshape", ["nt", "flat"], ["p"])],
    ),
}  # fmt: skip
SHAPES = {"out": TensorProto.FLOAT}
BY_BODIES: dict[str, tuple[int, list[NodeProto]]] = {
    "a normalization whose scale is computed": (
        21, [*SPREAD, node("ReduceMean", ["m"], ["mean"], keepdims=0), node("Mul", ["scale", "mean"], ["s"]),
             node("GroupNormalization", ["t", "s", "bias"], ["n"], num_groups=4), *BACK],
    ),
    "a root mean square of two axes": (23, [node("RMSNormalization", ["m", "column"], ["p"], axis=1)]),
    "attention whose scores are capped": (
        23, [node("Attention", ["m", "m", "m"], ["p"], q_num_heads=2, kv_num_heads=2, softcap=2.0)],
    ),
    "turned pairs": (
        23, [node("Reshape", ["m", "heads"], ["h"]), node("Transpose", ["h"], ["ht"], perm=[0, 2, 1, 3]),
             node("Unsqueeze", ["table", "at0"], ["u"]), node("Shape", ["m"], ["sizes"], end=1),
             node("Concat", ["sizes", "rest"], ["whole"], axis=0), node("Expand", ["u", "whole"], ["cos"]),
             node("RotaryEmbedding", ["ht", "cos", "cos"], ["n"]), node("Transpose", ["n"], ["nt"], perm=[0, 2, 1, 3]),
             node("Reshape", ["nt", "flat"], ["p"])],
    ),
    "swish in a branch": (
        24, [node("ReduceSum", ["m"], ["sum"], keepdims=0), node("Greater", ["sum", "one"], ["large"]),
             node("If", ["large"], ["p"],
                  then_branch=helper.make_graph([node("Swish", ["m"], ["out"], alpha=1.5)], "then", [],
                      [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)]),
                  else_branch=helper.make_graph([node("Neg", ["m"], ["out"])], "else", [],
                      [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)]))],
    ),
}  # fmt: skip
WEIGHTS |= {"at0": np.array([0]), "rest": np.array([5, 2])}


def written(folder: Path, opset: int, part: Sequence[NodeProto], more: Sequence[NodeProto] = ()) -> OnnxModel:
    """A product, the part, and another product."""
    nodes = [node("MatMul", ["x", "w1_t"], ["m"]), *part, node("MatMul", ["p", "w2"], ["y"]), *more]
    weights = WEIGHTS | {"w1_t": WEIGHTS["w1"].T}
    outputs = {"y": TensorProto.FLOAT} | ({"z": TensorProto.INT64} if more else {})
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("batch", 5, 4))],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [numpy_helper.from_array(np.ascontiguousarray(values), name) for name, values in weights.items()],
    )  # fmt: skip
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), folder / "m.onnx"
    )
    return load_onnx(folder / "m.onnx")


def round_trip(file: OnnxModel, folder: Path, share: float = 0.0) -> tuple[TorchModel, dict[str, str], onnx.ModelProto]:
    """The network, proven; what of it stays as it is; and what it is written to, proven, too."""
    given = TorchFromOnnx().run(file, folder, lambda *_: None)
    model = given.model
    assert isinstance(model, TorchModel)
    if share:
        model = PruneChannels(share).run(model, folder, lambda *_: None).model
    assert isinstance(model, TorchModel)
    (folder / "out").mkdir()
    found = OnnxFromTorch().run(model, folder / "out", lambda *_: None).model
    assert isinstance(found, OnnxModel)
    return model, given.details["kept_as_they_are"], onnx.load(found.path)


@pytest.mark.parametrize("case", TAKEN_BACK)
def test_newer_operators_that_torch_has_are_taken_back(case: str, tmp_path: Path) -> None:
    _, kept, back = round_trip(written(tmp_path, *TAKEN_BACK[case]), tmp_path)
    assert kept == {}
    assert back.opset_import[0].version == OPSET


@pytest.mark.parametrize("case", BY_BODIES)
def test_others_are_written_by_what_onnx_says_that_they_do(case: str, tmp_path: Path) -> None:
    model, _, back = round_trip(written(tmp_path, *BY_BODIES[case]), tmp_path)
    assert any(isinstance(layer, nn.Linear) for layer in model.module.modules())
    assert back.opset_import[0].version == OPSET


def test_they_are_written_so_behind_what_hangs_on_values(tmp_path: Path) -> None:
    more = [node("NonZero", ["y"], ["places"]), node("Cast", ["places"], ["f"], to=1), node("Swish", ["f"], ["s"]),
            node("Cast", ["s"], ["z"], to=7)]  # fmt: skip
    round_trip(written(tmp_path, 24, [node("Relu", ["m"], ["p"])], more), tmp_path)


def test_channels_are_pruned_through_a_normalization_of_groups(tmp_path: Path) -> None:
    part = TAKEN_BACK["a normalization of groups"][1]
    model, _, _ = round_trip(written(tmp_path, 21, part), tmp_path, share=0.5)
    (norm,) = (layer for layer in model.module.modules() if isinstance(layer, nn.GroupNorm))
    assert norm.num_channels < 16
