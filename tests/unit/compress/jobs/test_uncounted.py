"""What a count of multiply-accumulates leaves out is told; of two files that leave out other layers, as a warning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.console.wording import Note
from compress.formats.onnx.read import signature_of_onnx
from compress.jobs.evidence import _uncounted_told
from compress.model import OnnxModel


def looped(path: Path, loops: int) -> OnnxModel:
    """A product, and as many more in Loops."""

    def value(name: str, kind: int, shape: list[object]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    nodes = [helper.make_node("MatMul", ["x", "w"], ["h0"])]
    for at in range(loops):
        body = helper.make_graph(
            [
                helper.make_node("Identity", [f"go{at}"], [f"on{at}"]),
                helper.make_node("MatMul", [f"state{at}", "w"], [f"next{at}"]),
            ], "body",
            [
                value(f"turn{at}", TensorProto.INT64, []), value(f"go{at}", TensorProto.BOOL, []),
                value(f"state{at}", TensorProto.FLOAT, ["batch", 8]),
            ],
            [value(f"on{at}", TensorProto.BOOL, []), value(f"next{at}", TensorProto.FLOAT, ["batch", 8])],
        )  # fmt: skip
        nodes.append(helper.make_node("Loop", ["turns", "", f"h{at}"], [f"h{at + 1}"], body=body))
    weights = [numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")]
    weights += [numpy_helper.from_array(np.array(3), "turns")] if loops else []
    x, y = value("x", TensorProto.FLOAT, ["batch", 8]), value(f"h{loops}", TensorProto.FLOAT, ["batch", 8])
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, path)
    return OnnxModel(path, signature_of_onnx(path))


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (0, 0, []),
        (1, 1, ["MACs are without 1 layer of the original in loops"]),
        (2, 1, ["2 layers of the original and 1 layer of the result"]),
        (0, 1, ["0 layers of the original and 1 layer of the result"]),
    ],
)
def test_other_layers_left_out_before_and_after_are_a_warning(
    before: int, after: int, told: list[str], tmp_path: Path
) -> None:
    found = _uncounted_told(looped(tmp_path / "a.onnx", before), looped(tmp_path / "b.onnx", after))
    assert len(found) == len(told)
    for words, want in zip(found, told, strict=True):
        assert want in words
        assert isinstance(words, Note) == (before == after)
