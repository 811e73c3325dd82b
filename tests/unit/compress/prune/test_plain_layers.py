"""torch's attention as plain layers answers as torch's own does, of rows that a mask hides whole, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compress.prune.heads.plain_layers import with_plain_layers

LENGTH, WIDTH = 4, 8
PADDED = torch.tensor([[False, False, False, True], [True] * LENGTH])  # the second is all padding
CAUSAL = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)
CAUSAL[1] = True  # sees nothing


class Encoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor, padding: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.layer(x, mask, padding)  # type: ignore[no-any-return]


class Attending(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: torch.Tensor, padding: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x, x, padding, need_weights=self.need_weights, attn_mask=mask)[0]  # type: ignore[no-any-return]


def as_numbers(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, float("-inf"))


@pytest.mark.parametrize("given", [lambda mask: mask, as_numbers], ids=["truths", "numbers"])
@pytest.mark.parametrize(
    "module", [Encoding(), Attending(False), Attending(True)], ids=["layer", "attention", "weights"]
)
def test_rows_that_are_hidden_whole_are_what_torch_makes_of_them(module: nn.Module, given: object) -> None:
    assert callable(given)
    x = torch.randn(2, LENGTH, WIDTH)
    inputs = (x, given(PADDED), given(CAUSAL))
    module = module.eval()
    plain = with_plain_layers(module, inputs)
    assert plain is not None
    # With gradients: torch's encoder layer takes a fast path without, which gives NaN.
    expected, got = module(*inputs), plain(*inputs)
    torch.testing.assert_close(got, expected, equal_nan=True)
    if isinstance(module, Attending) and module.need_weights:
        assert expected.isnan().any()
        return
    assert expected.isfinite().all()
    got.sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in plain.parameters())
