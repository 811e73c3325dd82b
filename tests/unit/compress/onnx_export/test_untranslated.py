"""Attention of any rank is exported; what torch.onnx can't write is told by its innermost cause, with what mends it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn

from compress.artifact import TensorSpec
from compress.errors import StageError
from compress.model import TorchModel
from compress.model.infer import infer_signature
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.stage import Given


class Attending(nn.Module):
    def __init__(self, axes: int, masked: str = "", **options: Any) -> None:
        super().__init__()
        self.key, self.value, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.axes, self.masked, self.options = axes, masked, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        mask = None
        if self.masked:
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            mask = mask.expand(x.shape[0], *(self.axes - 3) * [1], length, length) if self.masked == "each" else mask
        shape = (x.shape[0], *(self.axes - 3) * [1], length, 8)
        query, key, value = (each.reshape(shape) for each in (x, self.key(x), self.value(x)))
        found = functional.scaled_dot_product_attention(query, key, value, mask, **self.options)
        return self.out(found).reshape(x.shape[0], length, 4)  # type: ignore[no-any-return]


class Masked(nn.Module):
    """Of five axes, whose mask has fewer: of one for each of two groups of heads."""

    def __init__(self, *leading: int) -> None:
        super().__init__()
        self.key, self.leading = nn.Linear(8, 8), leading

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = (torch.stack([each, -each], 1).unsqueeze(2) for each in (x, self.key(x)))
        every = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        mask = torch.stack([every.tril(), every]).reshape(*self.leading, *every.shape)
        return functional.scaled_dot_product_attention(query, key, query, mask).flatten(1)


class Shared(nn.Module):
    """Keys of one sample for the queries of all."""

    def __init__(self, *heads: int) -> None:
        super().__init__()
        self.table, self.heads = nn.Parameter(torch.randn(1, *heads, 5, 8)), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = x.reshape(x.shape[0], *self.heads, x.shape[1], 8)
        return functional.scaled_dot_product_attention(query, self.table, self.table).flatten(1)


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 4, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.layer(packed)[1][0][0]  # type: ignore[no-any-return]


class Branching(nn.Module):
    """It holds a packed sequence, which is not what fails."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = rnn.pack_sequence([torch.zeros(2, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.packed
        return x + packed.data.sum() if x.sum() > 0 else x


class Special(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.i0e(x)  # type: ignore[no-any-return]


def exported(module: nn.Module, folder: Path, *inputs: str) -> Given:
    module = module.eval()
    model = TorchModel(module, infer_signature(module, tuple(map(TensorSpec.parse, inputs))))
    return OnnxFromTorch().run(model, folder, lambda *_: None)


@pytest.mark.parametrize("masked", ["", "one", "each"])
@pytest.mark.parametrize("axes", [3, 5], ids=["without heads", "with another axis"])
def test_attention_of_other_ranks_than_four_is_exported(axes: int, masked: str, tmp_path: Path) -> None:
    given = exported(Attending(axes, masked), tmp_path, "x:float32[batch,T,8]")  # which proves it
    assert given.details["parity"]


def test_so_is_one_that_looks_at_what_was_before(tmp_path: Path) -> None:
    assert exported(Attending(3, is_causal=True, scale=0.3), tmp_path, "x:float32[batch,T,8]").details["parity"]


def test_so_is_one_to_the_keys_of_another_batch(tmp_path: Path) -> None:
    assert exported(Shared(), tmp_path, "x:float32[batch,7,8]").details["parity"]


@pytest.mark.parametrize("leading", [(2, 1), (1, 2, 1)], ids=["four axes", "five axes"])
def test_so_is_one_of_five_axes_whose_mask_is_for_all_batches(leading: tuple[int, ...], tmp_path: Path) -> None:
    assert exported(Masked(*leading), tmp_path, "x:float32[batch,T,8]").details["parity"]


def test_a_packed_sequence_that_does_not_fail_is_not_blamed(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"torch\.onnx can't export this model") as caught:
        exported(Branching(), tmp_path, "x:float32[batch,8]")
    assert "packed" not in caught.value.why
    assert "branches on tensor values" in caught.value.mend


def test_a_long_trace_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.onnx_export.from_torch.TRACED_SECONDS", 0.01)
    told: list[tuple[int, int, str]] = []
    waited = threading.Event()

    class Long(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_exporting():
                waited.wait(10)
            return 2 * x

    def progress(done: int, total: int, note: str) -> None:
        told.append((done, total, note))
        if "Ctrl-C" in note:
            waited.set()

    module = Long().eval()
    model = TorchModel(module, infer_signature(module, (TensorSpec.parse("x:float32[batch,8]"),)))
    OnnxFromTorch().run(model, tmp_path, progress)
    assert waited.is_set()
    said = [note for _, _, note in told]
    assert any("Ctrl-C" in note and "so far" in note for note in said)
    assert not any("Ctrl-C" in note for note in said[said.index("checking the file") :])


REFUSED: dict[str, tuple[nn.Module, tuple[str, ...], str, str]] = {
    "attention of five axes to keys of another batch": (
        Shared(1, 1), ("x:float32[batch,7,8]",), "other leading axes than each other", "[batch, heads, length, size]",
    ),
    "packed sequences": (
        Packing(), ("x:float32[batch,T,8]", "lengths:int64[batch]"), "packed by their lengths", "padded sequences",
    ),
    "an operator that torch.onnx has none for": (Special(), ("x:float32[batch,8]",), "bessel_i0e", "bessel_i0e"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_written_is_told_by_its_innermost_cause(case: str, tmp_path: Path) -> None:
    module, inputs, why, mend = REFUSED[case]
    with pytest.raises(StageError, match=r"torch\.onnx can't export this model") as caught:
        exported(module, tmp_path, *inputs)
    assert why in caught.value.why
    assert "stack trace" not in caught.value.why
    assert mend in caught.value.mend
    assert "branches" not in caught.value.mend
