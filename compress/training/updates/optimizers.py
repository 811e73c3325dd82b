"""AdamW as PyTorch fuses it."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["optimizer_for"]

DECAY = 0.01


def optimizer_for(module: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Weights decay; biases, and what scales and shifts a normalization, don't."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=rate, fused=True)
