"""What torch.export refuses is told by input and dimension, with what mends it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from compress.artifact import TensorSpec
from compress.errors import StageError
from compress.model import TorchModel
from compress.model.infer import infer_signature
from compress.onnx_export.from_torch import OnnxFromTorch


def silent(_done: int, _total: int, _note: str) -> None:
    pass


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.RNN(8, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0][:, -1]  # type: ignore[no-any-return]


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] / 2 > 200:
            x = x[:, -50:]
        return self.layer(x).mean(1)  # type: ignore[no-any-return]


class ByValue(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Counted(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y * len(list(x.unbind(1)))


class Any2(nn.Module):
    """Takes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return self.layer(first + sum(others)).mean(1)  # type: ignore[no-any-return]


def modeled(module: nn.Module, *inputs: str) -> TorchModel:
    module = module.eval()
    return TorchModel(module, infer_signature(module, tuple(map(TensorSpec.parse, inputs))))


@pytest.mark.parametrize(
    ("module", "inputs", "why", "mend"),
    [
        (Recurrent(), ["x:float32[batch,T,8]"], "T of 'x' became 32", "in place of T .*; or take nn.GRU"),
        (Counted(), ["a:float32[batch,T]", "b:float32[batch,1]"], "32", "write the size .* in place of"),
        (Divided(), ["x:float32[batch,T,8]"], "control flow", "sizes divided by `/`"),
        (ByValue(), ["x:float32[batch,8]"], "data-dependent", "branches on tensor values"),
    ],
    ids=["recurrent", "counted", "divided", "by a value"],
)
def test_a_refusal_of_torch_export_names_the_dimension_and_what_mends_it(
    module: nn.Module, inputs: list[str], why: str, mend: str, tmp_path: Path
) -> None:
    with pytest.raises(StageError, match=r"torch\.onnx can't export this model") as caught:
        OnnxFromTorch().run(modeled(module, *inputs), tmp_path, silent)
    assert caught.match(why)
    assert caught.match(f"mend: .*{mend}")


def test_inputs_that_a_forward_takes_by_its_star_are_exported(tmp_path: Path) -> None:
    model = modeled(Any2(), *(f"{name}:float32[batch,T,8]" for name in "abc"))
    given = OnnxFromTorch().run(model, tmp_path, silent)
    assert [spec.name for spec in given.model.signature.inputs] == ["a", "b", "c"]
    assert given.details["equal_at_sizes"]["T"]
    assert not any("torch.export" in told for told in given.warnings)


class Reversed2(Any2):
    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        total = sum(given) if given[1].shape[1] % 512 else -sum(given)
        return self.layer(total).mean(1)  # type: ignore[no-any-return]


def test_what_a_size_of_an_input_behind_a_star_decides_is_found(tmp_path: Path) -> None:
    model = modeled(Reversed2(), *(f"{name}:float32[batch,T,8]" for name in "abc"))
    with pytest.raises(StageError, match="at T = 512, where"):
        OnnxFromTorch().run(model, tmp_path, silent)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_of_torchscript_the_module_that_it_was_made_of_is_asked_for(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad():
        traced = torch.jit.trace(layer, torch.randn(2, 5, 8), check_trace=False)  # type: ignore[no-untyped-call]
    with pytest.raises(StageError, match="can't export this model") as caught:
        OnnxFromTorch().run(modeled(traced, "x:float32[batch,seq,8]"), tmp_path, silent)
    assert "save the module that this TorchScript was made of" in caught.value.mend
