"""Layers that pruning leaves alone are told with what holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compress.formats.checkpoint import load
from compress.formats.hub.config import offline
from compress.prune.channels import Channels
from compress.prune.left_alone import keeps_size, multiplied
from tests.unit.compress.prune.test_prune_channels import wrapped

TOKENS = "x:float32[batch,6,16]"


class Attending(nn.Module):
    """One attention of torch's, and a layer behind it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(16, 4, batch_first=True, **options)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attend(x, x, x, need_weights=False)[0])  # type: ignore[no-any-return]


class Shown(Attending):
    """Its weights are an output."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        mixed, weights = self.attend(x, x, x, average_attn_weights=False)
        return self.head(mixed), weights


class Own(nn.MultiheadAttention):
    """Anybody's."""


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (Attending(add_bias_kv=True), "add_bias_kv"),
        (Attending(add_zero_attn=True), "add_zero_attn"),
        (Attending(bias=False), "bias=False"),
        (Shown(), "the outputs hang on them"),
    ],
    ids=["a learned key", "a key of zeros", "no bias", "weights that are shown"],
)
def test_an_attention_says_why_it_keeps_its_heads(module: nn.Module, why: str) -> None:
    assert why in Channels(wrapped(module, TOKENS)).left_alone["attend"]


def test_an_attention_of_anybodys_or_with_weights_of_others_says_so() -> None:
    twice = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "b": nn.MultiheadAttention(8, 2), "c": Own(8, 2)})
    twice["b"].out_proj = twice["a"].out_proj
    told = keeps_size(twice)
    assert "other layers have its weights" in told["a"]
    assert "other layers have its weights" in told["b"]
    assert "a Own may do otherwise" in told["c"]


def test_an_attention_whose_heads_can_go_is_not_named() -> None:
    assert "attend" not in Channels(wrapped(Attending(), TOKENS)).left_alone


class Multiplied(nn.Module):
    """Weights of its own in products, some of them turned, beside a table of positions and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 12), nn.Linear(16, 5)
        self.positions = nn.Parameter(torch.randn(6, 12))
        self.added, self.turned, self.inner = (nn.Parameter(torch.randn(12, 12)) for _ in range(3))
        self.wide = nn.Parameter(torch.randn(16, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(x)) + self.positions
        x = torch.matmul(x, self.added) @ self.inner.T @ self.turned.t()
        return self.last(F.linear(x, self.wide))  # type: ignore[no-any-return]


def test_weights_that_the_forward_multiplies_are_named() -> None:
    told = multiplied(torch.fx.symbolic_trace(Multiplied()), ())
    assert set(told) == {"added", "turned", "inner", "wide"}
    assert "(linear)" in told["wide"]
    assert all("(matmul)" in told[name] for name in ("added", "turned", "inner"))
    assert "added" not in multiplied(torch.fx.symbolic_trace(Multiplied()), {"added"})


def test_a_gpt_2_says_that_its_weights_are_no_linear_layers(tmp_path: Path) -> None:
    """transformers' Conv1D multiplies by itself: only its head was named, as if nothing else were there."""
    with offline() as transformers:
        config = transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=40, pad_token_id=0)
        network = transformers.GPT2ForSequenceClassification(config)
        network.save_pretrained(tmp_path)
    names = [f"transformer.h.0.{part}" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    told = Channels(load(tmp_path)).left_alone
    assert all("itself (addmm)" in told[name] and "nn.Linear" in told[name] for name in names)
    assert sorted(multiplied(network, ())) == sorted(names)
