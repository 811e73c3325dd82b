"""A model in parts: each of several processes keeps a share of every weight, its gradient and the optimizer's state.

A unit's weights are put together when it is called and let go after it (Zhao et al., PyTorch FSDP: Experiences on
Scaling Fully Sharded Data Parallel, VLDB 2023, section 3; `fully_shard` of PyTorch). What is kept on disk is whole, so
that any number of processes can go on from it, one among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["is_sharded", "local", "shard", "share", "shared_optimizer", "whole"]

UNITS = 64  # a unit has at least one part in so many of the weights: putting together few at a time takes long


def is_sharded(module: nn.Module) -> bool:
    """Whether processes have its weights in parts."""
    return any(isinstance(weight, DTensor) for weight in module.parameters())


def shard(module: nn.Module, mesh: Any, run: Callable[[], object]) -> nn.Module:
    """Leave each process its share of a module's weights, in place; the same in all of them.

    Args:
        module: whole; no process changes it meanwhile.
        mesh: of the processes, of one dimension.
        run: calls the module, as it will be called; only what is called puts its weights together.
    """
    for unit in [*_units(module, run), module]:
        fully_shard(unit, mesh=mesh)
    return module.to(mesh.device_type)  # buffers


def _units(module: nn.Module, run: Callable[[], object]) -> list[nn.Module]:
    """Layers, inner ones first, that are called once and use their weights alone; the rest is the module's own."""
    calls: Counter[nn.Module] = Counter()
    hooks = [each.register_forward_pre_hook(lambda layer, _: calls.update((layer,))) for each in module.modules()]
    mode = {each: each.training for each in module.modules()}
    try:
        with torch.no_grad():
            module.eval()
            run()
    finally:
        for hook in hooks:
            hook.remove()
        for each, training in mode.items():
            each.training = training
    users = Counter(
        id(weight) for each in module.modules() for weight in each.parameters(recurse=False)
    )  # of tied weights, several
    least = sum(weight.numel() for weight in module.parameters()) / UNITS
    taken: set[int] = set()
    found = []
    for each in reversed(list(module.modules())):  # what is inside comes before what is around it
        own = [weight for weight in each.parameters() if id(weight) not in taken]
        alone = all(users[id(weight)] == 1 for weight in own)
        if each is not module and calls[each] == 1 and alone and sum(map(torch.numel, own)) >= least > 0:
            found.append(each)
            taken.update(map(id, own))
    return found


def local(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What this process has of each."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def whole(value: Any, *, kept: bool) -> Any:
    """A state with every tensor put together, on the CPU; all processes have to ask for it.

    Args:
        value: of dicts, lists, tensors and plain values.
        kept: whether this process wants it; else it only gives its parts.
    """
    if isinstance(value, DTensor):
        full = value.full_tensor()
        return full.cpu() if kept else None
    if isinstance(value, dict):
        return {name: whole(each, kept=kept) for name, each in value.items()}
    if isinstance(value, list):
        return [whole(each, kept=kept) for each in value]
    return value


def share(state: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This process's part of each tensor of a whole state, as those of the same name are parted."""
    return {name: _as(tensor, like[name]) for name, tensor in state.items()}


def shared_optimizer(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The same of an optimizer's state, by the weights that it moves, and with their strides.

    AdamW, fused, takes a weight's numbers and its own in the order in which they lie in memory, whatever that is.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    parted = {
        number: {
            name: _as(value, weights[number]) if _of_shape(value, weights[number]) else value
            for name, value in kept.items()
        }
        for number, kept in state["state"].items()
    }
    return {**state, "state": parted}


def _of_shape(value: Any, weight: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == weight.shape


def _as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        laid_out = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device)
        return laid_out.copy_(tensor)
    given = tensor.to(like.device)
    return distribute_tensor(given, like.device_mesh, like.placements, src_data_rank=None)
