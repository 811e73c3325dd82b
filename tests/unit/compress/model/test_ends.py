"""Forwards as users write them: keywords, dataclasses, tuples in tuples, None; each file gives their answers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import nn

from compress.console.wording import AssumedWarning
from compress.errors import CheckpointError
from compress.formats.checkpoint import load, save
from compress.formats.native.graph import to_data
from compress.model import call, sample_inputs
from compress.model.ends import outputs_of
from compress.onnx_export.from_torch import OnnxFromTorch


@dataclasses.dataclass
class Out:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    state: Any = None


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(5, 4)

    def both(self, left: torch.Tensor, right: torch.Tensor | None) -> torch.Tensor:
        found: torch.Tensor = self.a(left)
        return found if right is None else found - self.b(right).relu()


class KeywordOnly(Two):
    def forward(self, *, left: torch.Tensor, right: torch.Tensor | None = None, scale: float | None = None) -> Any:
        return self.both(left, right) if scale is None else None


class Mixed(Two):
    def forward(self, left: torch.Tensor, mask: torch.Tensor | None = None, *, right: torch.Tensor) -> Any:
        return self.both(left if mask is None else left * mask, right)


class Skips(Two):
    def forward(self, left: torch.Tensor, mask: torch.Tensor | None = None, right: torch.Tensor | None = None) -> Any:
        return self.both(left if mask is None else left * mask, right)


class AnyKeyword(Two):
    def forward(self, **given: torch.Tensor) -> Any:
        return self.both(given["left"], given["right"])


class Fields(Two):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Out:
        first = self.both(x, y)
        return Out(first, state=(first + 1, (first + 2, None)))


class KeywordFields(Two):
    def forward(self, *, left: torch.Tensor, right: torch.Tensor) -> Out:
        return Out(self.both(left, right))


class Tuple(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor | None
    state: Any


class TupleFields(Two):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Tuple:
        first = self.both(x, y)
        return Tuple(first, None, (first + 1, first + 2))


class PlainTuple(NamedTuple):
    scores: torch.Tensor
    boxes: torch.Tensor


class PlainTupleFields(Two):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> PlainTuple:
        return PlainTuple(self.both(x, y), self.a(x))


class WithNone(Two):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.both(x, y), None


class WithNumber(Two):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return {"logits": self.both(x, y), "loss": None, "scale": 3, "more": [self.a(x)]}


NAMED = ("left:float32[batch,8]", "right:float32[batch,5]")
PLACED = ("x:float32[batch,8]", "y:float32[batch,5]")
KINDS: list[tuple[type[Two], tuple[str, ...], list[str], str]] = [
    (KeywordOnly, NAMED, ["output"], ""),
    (KeywordOnly, NAMED[:1], ["output"], ""),
    (Mixed, NAMED, ["output"], ""),
    (Mixed, NAMED[::-1], ["output"], ""),
    (Skips, NAMED, ["output"], ""),
    (AnyKeyword, NAMED, ["output"], ""),
    (Fields, PLACED, ["logits", "state_0", "state_1_0"], "state_1_1 (None)"),
    (KeywordFields, NAMED, ["logits"], ""),
    (TupleFields, PLACED, ["logits", "state_0", "state_1"], ""),
    (PlainTupleFields, PLACED, ["scores", "boxes"], ""),
    (WithNone, PLACED, ["output_0"], "output_1 (None)"),
    (WithNumber, PLACED, ["logits", "more_0"], "scale (int)"),
]


def answers(module: nn.Module, inputs: tuple[str, ...], arrays: Any) -> dict[str, Any]:
    """By the user's own class, called as its signature says."""
    tensors = {name: torch.as_tensor(values) for name, values in arrays.items()}
    given = module(*tensors.values()) if inputs == PLACED else module(**tensors)
    return {name: tensor.detach().numpy() for name, tensor in outputs_of(given).items()}


@pytest.mark.parametrize(("kind", "inputs", "names", "told"), KINDS)
@pytest.mark.parametrize("way", ["loaded", "saved"])
def test_a_forward_as_users_write_it(
    kind: type[Two], inputs: tuple[str, ...], names: list[str], told: str, way: str, tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
) -> None:  # fmt: skip
    module = kind().eval()
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    if way == "saved":
        loaded = load(save(module, tmp_path / "model.pt", inputs=list(inputs)))
        assert type(module) is kind
    else:
        loaded = load(tmp_path / "weights.pt", inputs=inputs, model=f"{__name__}:{kind.__name__}")
        assert [name for name, _ in loaded.module.named_parameters()] == [n for n, _ in module.named_parameters()]
    said = [str(each.message) for each in recwarn if issubclass(each.category, AssumedWarning)]
    assert any(told in each for each in said) if told else not said
    assert [spec.name for spec in loaded.signature.outputs] == names

    arrays = sample_inputs(loaded.signature, 3)
    wanted = answers(module, inputs, arrays)
    found = call(loaded.module, loaded.signature.inputs, arrays)
    given = OnnxFromTorch().run(loaded, tmp_path, lambda *_: None).model
    session = ort.InferenceSession(given.path, providers=["CPUExecutionProvider"])  # type: ignore[union-attr]
    written = session.run(names, dict(arrays))
    for name, want, have in zip(names, wanted.values(), written, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)
        if way == "loaded":
            np.testing.assert_allclose(found[name].detach().numpy(), want, rtol=1e-5, atol=1e-6)
    to_data(loaded.module, inputs=len(inputs))  # torch.fx follows it: it can be pruned, and repaired


@pytest.mark.parametrize("given", [None, (None, 3), {"loss": None}, Out(None), object()])  # type: ignore[arg-type]
def test_a_forward_without_tensors_is_refused(given: Any) -> None:
    with pytest.raises(CheckpointError, match="output"):
        outputs_of(given)
