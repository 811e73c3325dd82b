"""Which of a state_dict's keys are a module's: as they are, or behind a common prefix that a trainer left."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch.nn.parameter import is_lazy

from compress.console.wording import AssumedWarning, counted
from compress.errors import CheckpointError

__all__ = ["BESIDES", "fitted"]

# Words of mappings that are no weights of the model, or a second set of them.
BESIDES = ("optim", "sched", "scaler", "rng", "metric", "loss", "ema", "average", "best")
COPIES = (*BESIDES, "teacher", "target", "momentum", "shadow", "swa", "old")
SHOWN = 10  # keys of a kind in an error
LONGEST = 80  # characters of one


def fitted(
    state: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], path: Path, factory: str
) -> dict[str, torch.Tensor]:
    """The tensors that a module wants, by its own names.

    A prefix goes where all that the module wants is behind it, with the right shapes, and nothing else is; what is not
    behind it is left out. Both are told by a AssumedWarning.

    Args:
        state: of the file.
        wanted: the module's own state_dict.
        path, factory: for messages.

    Raises:
        CheckpointError: they don't fit, or several prefixes do.
    """
    if _fits(state, wanted):
        return dict(state)
    found = [prefix for prefix in _prefixes(state, wanted) if _fits(_behind(state, prefix), wanted)]
    if len(found) > 1:  # a copy that a trainer averages or learns from is not what is meant
        found = [prefix for prefix in found if not any(word in prefix.lower() for word in COPIES)] or found
    if len(found) > 1:
        raise CheckpointError(
            f"can't tell which weights of {path} are meant",
            why=f"those behind {' and those behind '.join(ascii(prefix) for prefix in found[:5])} fit {factory} alike",
            mend="save the ones that you mean by themselves, without the prefix",
        )
    if not found:
        raise CheckpointError(
            f"the weights of {path} don't fit {factory}",
            why=_differences(state, wanted),
            mend="name the factory that made them; for a part of them, save that part's state_dict by itself",
        )
    (prefix,) = found
    left = [key for key in state if not key.startswith(prefix)]
    told = f"{path}: the weights are behind {prefix!a}, which is taken off"
    if left:
        told += f"; left out, since {factory} has no place for it: {_some(left)}"
    warnings.warn(told, AssumedWarning, stacklevel=2)
    return _behind(state, prefix)


def _prefixes(state: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """What may stand before all of a module's names, as one of them says: up to a dot."""
    longest = max(wanted, key=len, default="")
    ends = (key[: len(key) - len(longest)] for key in state if longest and key.endswith(longest))
    return [prefix for prefix in dict.fromkeys(ends) if prefix.endswith(".")]


def _behind(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _fits(state: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    counts = {key for key in wanted if key.endswith("num_batches_tracked")}  # files of before PyTorch 0.4.1 lack them
    return (
        state.keys() <= wanted.keys()
        and wanted.keys() - counts <= state.keys()
        and all(is_lazy(wanted[key]) or tensor.shape == wanted[key].shape for key, tensor in state.items())
    )


def _differences(state: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> str:
    missing = [key for key in wanted if key not in state]
    unexpected = [key for key in state if key not in wanted]
    shapes = [
        f"{key} {list(state[key].shape)} for {list(wanted[key].shape)}"
        for key in wanted
        if key in state and not is_lazy(wanted[key]) and state[key].shape != wanted[key].shape
    ]
    parts = [
        f"{counted(len(keys), what)}: {_some(keys)}"
        for keys, what in ((missing, "missing keys"), (unexpected, "unexpected keys"), (shapes, "other shapes"))
        if keys
    ]
    return "; ".join(parts)


def _some(keys: Iterable[str]) -> str:
    keys = list(keys)
    names = [ascii(key)[1:-1][:LONGEST] for key in keys[:SHOWN]]  # they are the file's
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return ", ".join(names) + more
