"""Whether a module takes inputs of some sizes, found by shapes alone, where running it would take too much."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from compress.signature import TensorSpec

__all__ = ["refuses_at"]

Sizes = Mapping[str, int]


def refuses_at(module: nn.Module, inputs: tuple[TensorSpec, ...], usual: Sizes) -> Callable[[Sizes], bool]:
    """Gives whether a module is known to refuse inputs of some sizes.

    A forward that asks for values, or calls what knows no shapes alone, is not known to refuse any.

    Args:
        module: in eval mode.
        inputs: what its forward takes, by position.
        usual: sizes that it takes.
    """
    readable: bool | None = None

    def refuses(sizes: Sizes) -> bool:
        nonlocal readable
        if readable is None:
            readable = _runs(module, inputs, usual)
        return readable and not _runs(module, inputs, sizes)

    return refuses


def _runs(module: nn.Module, inputs: tuple[TensorSpec, ...], sizes: Sizes) -> bool:
    quiet = contextlib.redirect_stderr(io.StringIO())  # where torch.fx prints what fails
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), quiet:
            module(*(torch.zeros(spec.at(sizes), dtype=getattr(torch, spec.dtype)) for spec in inputs))
    except Exception:  # the user's forward: anything may come out of it
        return False
    return True
