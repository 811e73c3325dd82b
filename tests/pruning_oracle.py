"""What a pruned network has to compute, found without a word from what pruned it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

__all__ = ["distinct", "embedded"]

NORMALIZING = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def distinct(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module in double precision, each weight a number that no other weight has, none of them near zero."""
    random = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    for parameter in module.parameters():
        size = 1.0 if parameter.ndim == 1 else (2 / parameter[0].numel()) ** 0.5
        drawn = torch.rand(parameter.shape, generator=random, dtype=torch.float64)
        sign = torch.randint(0, 2, parameter.shape, generator=random) * 2 - 1 if parameter.ndim > 1 else 1
        parameter.data = (0.3 + drawn) * size * sign
    for name, buffer in module.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=random, dtype=torch.float64))
    return module


def embedded(whole: nn.Module, pruned: nn.Module) -> nn.Module:
    """The whole network with the values of the pruned one at the places that they come from, and zeros elsewhere.

    Places are found by value (see `distinct`). A normalization over channels sees those alone that are still there.
    """
    module = copy.deepcopy(whole)
    done: set[int] = set()
    for (name, tensor), (_, small) in zip(_tensors(module), _tensors(pruned), strict=True):
        if name.endswith("running_var") or id(tensor) in done:
            continue
        done.add(id(tensor))
        values, order = tensor.detach().flatten().sort()
        at = order[torch.searchsorted(values, small.detach().flatten()).clamp(max=len(values) - 1)]
        assert torch.equal(tensor.detach().flatten()[at], small.detach().flatten()), f"{name} holds new numbers"
        silent = torch.zeros_like(tensor).flatten()
        silent[at] = small.detach().flatten()
        tensor.data = silent.view_as(tensor)
    for name, layer in module.named_modules():
        if isinstance(layer, NORMALIZING):
            there = layer.weight != 0
            if not bool(there.all()):
                layer.register_forward_hook(_only(there.nonzero().flatten(), pruned.get_submodule(name)))
    return module


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    buffers = [(name, buffer) for name, buffer in module.named_buffers() if "running" in name]
    return [*module.named_parameters(remove_duplicate=False), *buffers]


def _only(there: torch.Tensor, small: nn.Module) -> Any:
    def hook(layer: nn.Module, given: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        axis = 1 if isinstance(layer, nn.GroupNorm) else output.ndim - 1
        return torch.zeros_like(output).index_copy(axis, there, small(given[0].index_select(axis, there)))

    return hook
