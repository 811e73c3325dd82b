"""What stands around the exporter: a second export costs less, and is the same to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.onnx._internal.exporter import _registration

from compress.onnx_export import exporter
from tests.unit.compress.onnx_export import test_stages
from tests.unit.compress.prune.test_prune_channels import loaded


def exported(name: str, folder: Path) -> bytes:
    return test_stages.exported(loaded(name), folder).path.read_bytes()


def test_the_table_of_operators_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "_TABLES", {})
    made: list[int] = []
    make = _registration.ONNXRegistry.from_torchlib

    def counted(cls: Any, opset_version: int = 18) -> Any:
        made.append(opset_version)
        return make(opset_version)

    monkeypatch.setattr(_registration.ONNXRegistry, "from_torchlib", classmethod(counted))
    first = exported("residual", tmp_path / "first")
    exported("encoder", tmp_path / "other")
    again = exported("residual", tmp_path / "again")
    assert len(made) == len(set(made)) == 1
    assert first == again


def test_no_export_changes_the_table_of_the_next() -> None:
    with exporter.around():
        one = _registration.ONNXRegistry.from_torchlib(20)
        one.register_op(torch.ops.aten.add.Tensor, lambda x, y: x)
        two = _registration.ONNXRegistry.from_torchlib(20)
    assert len(one.functions["aten::add.Tensor"]) == len(two.functions["aten::add.Tensor"]) + 1


@pytest.mark.parametrize("within", [True, False])
def test_torch_is_as_it_was_afterwards(within: bool) -> None:
    before = vars(_registration.ONNXRegistry)["from_torchlib"]
    if within:
        with exporter.around():
            assert vars(_registration.ONNXRegistry)["from_torchlib"] is not before
    else:
        with pytest.raises(ZeroDivisionError), exporter.around():
            raise ZeroDivisionError
    assert vars(_registration.ONNXRegistry)["from_torchlib"] is before


def test_another_torch_goes_on_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_table = exported("residual", tmp_path / "with")
    monkeypatch.delattr(_registration.ONNXRegistry, "from_torchlib")
    with exporter.around():
        pass
    monkeypatch.undo()
    monkeypatch.setattr(exporter, "_table_kept", exporter._quiet)
    assert exported("residual", tmp_path / "without") == with_table
