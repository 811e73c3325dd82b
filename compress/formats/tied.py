"""Names that a file of weights may lack, because the module has the same numbers under another name.

safetensors hold each number once: `safetensors.torch.save_model` keeps one name of several that share memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.nn.parameter import is_lazy

__all__ = ["with_tied"]

State = Mapping[str, torch.Tensor]


def with_tied(sets: Mapping[str, State], wanted: State) -> dict[str, State]:
    """Sets of weights with what they lack and hold under another name, as `safetensors.torch.load_model` takes it.

    Args:
        sets: of a file, by their names.
        wanted: the module's own state_dict, whose tensors share memory where its layers do.
    """
    groups = list(_groups(wanted))
    return {name: _filled(state, wanted, groups) for name, state in sets.items()} if groups else {}


def _groups(wanted: State) -> Iterator[tuple[str, list[str]]]:
    """Names that share memory: one of them that has all of it, and the others."""
    sharing: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        if not is_lazy(tensor) and tensor.device.type == "cpu" and tensor.numel():
            sharing.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    for names in sharing.values():
        yield from ((whole, [name for name in names if name != whole]) for whole in names if _is_whole(wanted[whole]))


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _filled(state: State, wanted: State, groups: list[tuple[str, list[str]]]) -> State:
    found = dict(state)
    for whole, others in groups:
        for key, tensor in state.items():
            prefix = key.removesuffix(whole)
            if not key.endswith(whole) or (prefix and not prefix.endswith(".")) or tensor.shape != wanted[whole].shape:
                continue
            for name in others:
                own = wanted[name]
                if own.dtype == wanted[whole].dtype:
                    view = tensor.contiguous().as_strided(own.shape, own.stride(), own.storage_offset())
                    found.setdefault(f"{prefix}{name}", view)
    return found
