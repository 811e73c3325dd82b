"""Weight norms and other parametrizations become the plain weights that they stand for in evaluation.

A weight norm (Salimans and Kingma, 2016, section 2) and a spectral norm (Miyato et al., 2018, section 2.1) shape
training; what is deployed is the weight that they give.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

__all__ = ["fold_norms", "folded"]


def folded(module: nn.Module) -> nn.Module:
    """The module, or, where it has any such norm, a copy without, in eval mode."""
    if not any(parametrize.is_parametrized(layer) or _hooks(layer) for layer in module.modules()):
        return module
    # An old-style norm leaves the weight that it computed as an attribute, which can't be copied with its gradient.
    computed: dict[int, Any] = {
        id(value): value.detach().clone()
        for layer in module.modules()
        for value in vars(layer).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }
    own = copy.deepcopy(module, computed).eval()
    fold_norms(own)
    return own


def fold_norms(module: nn.Module) -> None:
    """The same in place, on a module in eval mode."""
    for layer in module.modules():
        for hook in _hooks(layer):
            (remove_weight_norm if isinstance(hook, WeightNorm) else remove_spectral_norm)(layer, hook.name)
        if parametrize.is_parametrized(layer):
            _unparametrize(layer)


def _unparametrize(layer: nn.Module) -> None:
    """As torch's remove_parametrizations, which edits a class that the copy shares with the original."""
    parametrizations: Any = layer.parametrizations
    values = {name: getattr(layer, name).detach().clone() for name in parametrizations}
    trained = {name for name in values if any(True for _ in parametrizations[name].parameters(recurse=False))}
    layer.__class__ = parametrize.type_before_parametrizations(layer)
    del layer._modules["parametrizations"]
    for name, value in values.items():
        if name in trained:
            layer.register_parameter(name, nn.Parameter(value))
        else:
            layer.register_buffer(name, value)


def _hooks(layer: nn.Module) -> list[WeightNorm | SpectralNorm]:
    return [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, WeightNorm | SpectralNorm)]
