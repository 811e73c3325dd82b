"""Whether a module takes inputs of some sizes, found by shapes alone, where running it would take too much."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Mapping

import torch
from torch import fx, nn
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
        here = _with_own_attributes(module)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), quiet:
            here(*(torch.zeros(spec.at(sizes), dtype=getattr(torch, spec.dtype)) for spec in inputs))
    except Exception:  # the user's forward: anything may come out of it
        return False
    return True


def _with_own_attributes(module: nn.Module) -> nn.Module:
    """The module, whose forward may keep tensors that have shapes alone (a table of positions, which grows): not in it.

    Its weights are shared.
    """
    if isinstance(module, fx.GraphModule):  # which keeps nothing, and is compiled anew for each copy
        return module
    shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, dict(shared))
