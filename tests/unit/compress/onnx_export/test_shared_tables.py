"""A table of an ONNX file that several parts of it read is one: in the network, in its file and where it goes back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import NodeProto, helper

from compress.errors import StageError
from compress.formats.checkpoint import load, save
from compress.formats.native.onnx_part import OnnxPart
from compress.model import OnnxModel
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.onnx_export.torch_from_onnx import TorchFromOnnx, taken_back
from compress.runtime.measure import onnx_params, torch_params
from tests.unit.compress.onnx_export import test_kept_parts as parts
from tests.unit.compress.onnx_export.test_kept_parts import IF, IMAGE, body, pruned_by, saved, written

TABLE = np.random.default_rng(0).standard_normal((6, 9, 10)).astype(np.float32)
PARTS = 4


def reads(at: int) -> list[NodeProto]:
    """An If by the size of the batch, both of whose branches read the table."""
    read, made = f"p{at - 1}" if at else "m", "p" if at == PARTS - 1 else f"p{at}"
    then = body("then", [helper.make_node("Mul", [read, "table"], ["out"])])
    other = body("else", [helper.make_node("Add", [read, "table"], ["out"])])
    return [helper.make_node("If", ["alone"], [made], name=f"part{at}", then_branch=then, else_branch=other)]


NODES = [*IF[:3], *(node for at in range(PARTS) for node in reads(at))]


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parts.WEIGHTS, "table", TABLE)


def test_it_is_counted_once(tmp_path: Path) -> None:
    file = written(tmp_path, NODES)
    module = taken_back(file).module
    weights = sum(parts.WEIGHTS[name].size for name in ("table", "w1", "w2", "w3", "w4"))
    assert sum(1 for layer in module.modules() if isinstance(layer, OnnxPart)) == PARTS
    assert torch_params(module) == weights
    assert onnx_params(file.path) == weights + 2  # what the size of the batch is compared with


def test_a_model_file_and_an_onnx_file_hold_it_once(tmp_path: Path) -> None:
    given = TorchFromOnnx().run(written(tmp_path, NODES), tmp_path, lambda *_: None)
    pruned = pruned_by(0.4, given, tmp_path)
    assert pruned.module.get_parameter("w1.weight").shape[0] < 16
    save(pruned.module, tmp_path / "m.pt", inputs=pruned.signature.inputs)
    held = [each for each in load(tmp_path / "m.pt").module.state_dict().values() if each.shape == TABLE.shape]
    assert len(held) == 1
    assert all(TABLE.tobytes() not in layer.onnx() for layer in pruned.module.modules() if isinstance(layer, OnnxPart))
    (tmp_path / "out").mkdir()
    found = OnnxFromTorch().run(pruned, tmp_path / "out", lambda *_: None).model  # which proves it
    assert isinstance(found, OnnxModel)
    assert found.path.read_bytes().count(TABLE.tobytes()) == 1


def test_no_gradient_reaches_it_nor_is_it_pruned(tmp_path: Path) -> None:
    module = taken_back(written(tmp_path, NODES)).module
    (table,) = [each for each in module.parameters() if each.shape == TABLE.shape]
    assert not table.requires_grad
    assert torch.equal(table, torch.from_numpy(TABLE))


def test_tables_alone_are_nothing_to_prune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]), *IF[1:3],
        *(helper.make_node("If", ["alone"], [made], name=made,
                           then_branch=body("then", [helper.make_node("Mul", [read, "wide"], ["out"])]),
                           else_branch=body("else", [helper.make_node("Add", [read, "wide"], ["out"])]))
          for read, made in (("x", "a"), ("a", "y"))),
    ]  # fmt: skip
    monkeypatch.setitem(parts.WEIGHTS, "wide", np.ones((4, 9, 10), np.float32))
    with pytest.raises(StageError, match="If at") as caught:
        taken_back(saved(tmp_path, nodes, IMAGE, ["y"]))
    assert "nothing else of it has weights" in caught.value.why
