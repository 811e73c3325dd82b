"""A network that takes lengths beside a sequence is saved and exported: a size that can't be tried ends nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import compress
from compress.errors import StageError
from compress.formats.checkpoint import load
from compress.model import TorchModel
from compress.model.inputs import example_inputs
from compress.model.lookups import beyond_table
from compress.onnx_export.equal import Wording
from compress.onnx_export.equal_elsewhere import equal_elsewhere
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.runtime.backends import TorchBackend
from compress.signature import Signature, TensorSpec
from tests.unit.compress.prune.test_prune_channels import quiet


class LastStep(nn.Module):
    """What stands at the last step that there is, by tables of ids and of positions."""

    def __init__(self, least: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ids, self.places, self.head = nn.Embedding(100, 16), nn.Embedding(32, 16), nn.Linear(16, 3)
        self.least = least

    def forward(self, ids: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.ids(ids) + self.places(torch.arange(ids.shape[1]))[None])
        last = length - 1 if self.least is None else (length - 1).clamp(min=self.least)
        return self.head(h.gather(1, last[:, None, None].expand(-1, 1, 16))[:, 0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("least", [None, 0])
@pytest.mark.parametrize("seq", [16, 32])
def test_it_is_saved_and_exported(seq: int, least: int | None, tmp_path: Path) -> None:
    inputs = ["ids:int64[batch,seq]", "length:int64[batch]"]
    compress.save(LastStep(least).eval(), tmp_path / "model.pt", inputs=inputs, outputs=["y"], sizes={"seq": seq})
    model = load(tmp_path / "model.pt")
    assert isinstance(model, TorchModel)
    given = OnnxFromTorch().run(model, tmp_path, quiet)
    assert given.details["parity"].keys() >= {"1", "2", "5"}
    assert given.details["parity"]["2"]["shapes"]["ids"] != [2, seq], "another size was tried, with lengths that fit"


@pytest.mark.parametrize(
    ("spec", "least"),
    [("n:int64[batch]", 1), ("n:int32[batch,1]", 1), ("n:int64[batch,seq]", 0), ("n:bool[batch]", 0)],
)
def test_one_whole_number_for_each_sample_is_never_drawn_as_none(spec: str, least: int) -> None:
    made = example_inputs((TensorSpec.parse(spec),), {"batch": 64, "seq": 8})["n"]
    assert (made.min(), made.max()) == (least, 1)


def test_a_place_beyond_a_sequence_is_no_row_that_a_table_lacks() -> None:
    inputs = {"ids": torch.ones(2, 8, dtype=torch.int64), "length": torch.tensor([4, 16])}
    with pytest.raises(RuntimeError) as raised:
        LastStep(0)(**inputs)
    assert beyond_table(raised.value, inputs) == ""
    with pytest.raises(IndexError) as raised:  # type: ignore[assignment]
        LastStep(0)(ids=torch.full((2, 8), 100), length=inputs["length"])
    assert "row 100" in beyond_table(raised.value, {"ids": torch.full((2, 8), 100)})


class OfLengths(nn.Module):
    """The last step of each; another answers otherwise where the sequence is short."""

    def __init__(self, *, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        found = torch.gather(x, 1, (n - 1).reshape(-1, 1, 1).expand(-1, 1, 8))[:, 0]
        return 2 * found if self.wrong and x.shape[1] < 20 else found


class OfFlags(nn.Module):
    """Another answers otherwise where a flag is 0."""

    def __init__(self, *, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return torch.where(n[:, None, None] == 0, x * (5.0 if self.wrong else 1.0), 2 * x)[:, 0]


@pytest.mark.parametrize("kind", [OfLengths, OfFlags])
def test_an_answer_that_differs_at_short_sequences_or_flags_of_0_is_found(kind: type[OfLengths | OfFlags]) -> None:
    signature = Signature(
        (TensorSpec.parse("x:float32[batch,seq,8]"), TensorSpec.parse("n:int64[batch]")),
        (TensorSpec.parse("y:float32[batch,8]"),),
        {"seq": 32},
    )
    module = kind(wrong=False).eval()
    first, same, wrong = (
        TorchBackend(TorchModel(kind(wrong=wrong).eval(), signature), 1) for wrong in (False, False, True)
    )
    equal = equal_elsewhere(module, first, same, signature, quiet, Wording(), done=(1, 1)).equal
    assert {1, 2, 17} <= set(equal["seq"])
    with pytest.raises(StageError):
        equal_elsewhere(module, first, wrong, signature, quiet, Wording(), done=(1, 1))
