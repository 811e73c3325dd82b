"""AdamW as PyTorch fuses it, and LAMB for batches of thousands.

You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, ICLR 2020, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["Lamb", "optimizer_for"]

DECAY = 0.01


def optimizer_for(name: str, module: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Weights decay; biases, and what scales and shifts a normalization, don't."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if name == "lamb":
        return Lamb(groups, lr=rate)
    return torch.optim.AdamW(groups, lr=rate, fused=True)


class Lamb(torch.optim.Optimizer):
    """Adam whose step for each tensor is as long as the tensor times the rate.

    Args:
        groups: of parameters, with their `weight_decay`.
        lr: the length of a step, as a share of each tensor's.
        betas: of the moving averages of the gradient and of its square.
        eps: keeps the division finite.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of all parameters that have a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        first, second = group["betas"]
        gradient = parameter.grad
        assert gradient is not None  # noqa: S101  the caller looked
        mean = state["mean"].lerp_(gradient, 1 - first)
        square = state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        direction = mean / (1 - first ** state["step"])
        direction /= (square / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        direction.add_(parameter, alpha=group["weight_decay"])
        length, size = parameter.norm(), direction.norm()
        # A tensor or a direction of zeros takes Adam's own step.
        trust = torch.where((length > 0) & (size > 0), length / size, torch.ones_like(length))
        parameter.sub_(direction * (trust * group["lr"]))
