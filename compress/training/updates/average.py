"""A moving average of the weights (Polyak & Juditsky, 1992; as in Tarvainen & Valpola, Mean Teachers, 2017)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from compress.training.machine.sharded import local

__all__ = ["Average"]


class Average:
    """Averages parameters and float buffers; others are the newest.

    Args:
        module: is followed.
        decay: of the average; in the first steps less, so that the beginning is soon forgotten.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module = module
        self._decay = decay
        self.state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Take in the weights after a step, counted from 1."""
        decay = min(self._decay, (1 + step) / (10 + step))
        now = self._module.state_dict()
        floats = [name for name, tensor in self.state.items() if tensor.is_floating_point()]
        mine, theirs = (local(state[name] for name in floats) for state in (self.state, now))
        torch._foreach_lerp_(mine, theirs, 1 - decay)
        for name in self.state.keys() - set(floats):
            self.state[name].copy_(now[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module has the average's weights inside, and its own again after."""
        own = {name: tensor.detach().clone() for name, tensor in self._module.state_dict().items()}
        self._module.load_state_dict(self.state)
        try:
            yield
        finally:
            self._module.load_state_dict(own)
