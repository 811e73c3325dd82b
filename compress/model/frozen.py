"""Which parameters of a network are not to be trained."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

__all__ = ["freeze", "frozen_names", "matching"]


def frozen_names(module: nn.Module) -> frozenset[str]:
    """The names of those whose `requires_grad` is False.

    None where it is False for all: so a network is made ready to infer, which says nothing of its training.
    """
    floating = {name: each for name, each in module.named_parameters() if each.is_floating_point()}
    found = frozenset(name for name, parameter in floating.items() if not parameter.requires_grad)
    return frozenset() if len(found) == len(floating) else found


def freeze(module: nn.Module, names: Collection[str]) -> None:
    """Let gradients be taken of all floating-point parameters but these."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.is_floating_point() and name not in names)


def matching(names: Iterable[str], patterns: Sequence[str]) -> tuple[frozenset[str], list[str]]:
    """Names that fit one of the patterns (`*`, `?`), and the patterns that nothing fits."""
    every = list(names)
    fit = {pattern: {name for name in every if fnmatchcase(name, pattern)} for pattern in patterns}
    return frozenset().union(*fit.values()), [pattern for pattern, found in fit.items() if not found]
