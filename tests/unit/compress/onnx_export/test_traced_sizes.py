"""What torch.onnx writes for the sizes traced alone is named where it is refused, with what mends it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from compress.errors import StageError
from compress.model import TorchModel
from compress.model.infer import infer_signature
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.signature import TensorSpec


def silent(_done: int, _total: int, _note: str) -> None:
    pass


def pooled(size: int, shape: str) -> TorchModel:
    layers = (nn.Conv2d(3, 4, 3, 2, 1), nn.AdaptiveAvgPool2d(size), nn.Flatten(), nn.Linear(4 * size * size, 5))
    module = nn.Sequential(*layers).eval()
    return TorchModel(module, infer_signature(module, (TensorSpec.parse(f"x:float32[batch,3,{shape}]"),)))


def test_a_pool_to_a_fixed_size_of_free_sizes_is_named_with_the_dimensions_to_fix(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="adaptive_avg_pool2d to 7 × 7 for the sizes traced alone") as caught:
        OnnxFromTorch().run(pooled(7, "h,w"), tmp_path, silent)
    assert "in place of h, w" in caught.value.mend


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.adaptive_avg_pool2d(self.layer(x), (x.shape[2] // 2, x.shape[3] // 2))


def test_a_pool_to_a_size_that_is_computed_is_named_too(tmp_path: Path) -> None:
    module = Halved().eval()
    model = TorchModel(module, infer_signature(module, (TensorSpec.parse("x:float32[batch,3,h,w]"),)))
    with pytest.raises(StageError, match="adaptive_avg_pool2d to a computed size × a computed size") as caught:
        OnnxFromTorch().run(model, tmp_path, silent)
    assert "in place of h, w" in caught.value.mend


@pytest.mark.parametrize(("size", "shape"), [(7, "56,64"), (1, "h,w")], ids=["fixed", "to one"])
def test_and_what_is_told_mends_it(size: int, shape: str, tmp_path: Path) -> None:
    given = OnnxFromTorch().run(pooled(size, shape), tmp_path, silent)
    assert given.details["parity"]
