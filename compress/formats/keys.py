"""Which of a state_dict's keys are a module's: as they are, or behind a common prefix that a trainer left."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch.nn.parameter import is_lazy

from compress.console.wording import AssumedWarning, counted
from compress.errors import CheckpointError

__all__ = ["BESIDES", "fitted"]

# Words of mappings that are no weights of the model, or a second set of them.
BESIDES = ("optim", "sched", "scaler", "rng", "metric", "loss", "ema", "average", "best")
# Words of a prefix that a trainer averages into, learns from or keeps for comparison: never what is meant.
COPIES = {
    *("ema", "average", "averaged", "avg", "swa", "polyak", "shadow", "momentum"),
    *("teacher", "target", "best", "old", "copy", "reference"),
}
# What PyTorch's own wrappers (compile, FSDP, activation checkpointing) put anywhere into a name.
WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
DATA_PARALLEL = "module."
SHOWN = 10  # keys of a kind in an error
LONGEST = 80  # characters of one


def fitted(
    state: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], path: Path, factory: str
) -> dict[str, torch.Tensor]:
    """The tensors that a module wants, by its own names.

    A prefix goes where all that the module wants is behind it, with the right shapes, and nothing else is; what is not
    behind it is left out. Names without a prefix may stand beside whole copies (an average, a teacher) alone. Whatever
    is taken off or left out is told by an AssumedWarning.

    Args:
        state: of the file.
        wanted: the module's own state_dict.
        path, factory: for messages.

    Raises:
        CheckpointError: they don't fit, several prefixes do, or only a copy does.
    """
    state = _unwrapped(state)
    if _fits(state, wanted):
        return dict(state)
    found = [prefix for prefix in _prefixes(state, wanted) if _fits(_behind(state, prefix), wanted)]
    if _fits({key: value for key, value in state.items() if key in wanted}, wanted):
        found.insert(0, "")
    meant = _distinct(state, [prefix for prefix in found if not _is_copy(prefix)])
    if len(meant) > 1:
        names = " and those ".join(f"behind {prefix!a}" if prefix else "without a prefix" for prefix in meant[:5])
        raise CheckpointError(
            f"can't tell which weights of {path} are meant",
            why=f"those {names} fit {factory} alike",
            mend="save the ones that you mean by themselves, without the prefix",
        )
    if not meant and len(found) == 1 and all(key.startswith(found[0]) for key in state):
        meant = found  # nothing but the copy was saved: it is meant
    copies = tuple(prefix for prefix in found if prefix and prefix not in meant)
    if meant == [""] and not all(key in wanted or key.startswith(copies) for key in state):
        meant, copies = [], ()
    if not meant:
        raise CheckpointError(
            f"the weights of {path} don't fit {factory}",
            why=f"only the copy behind {copies[0]!a} does" if copies else _differences(state, wanted),
            mend="name the factory that made them; for a part of them, save that part's state_dict by itself",
        )
    (prefix,) = meant
    taken = _behind(state, prefix) if prefix else {key: value for key, value in state.items() if key in wanted}
    left = [key for key in state if not key.startswith(prefix) or (not prefix and key not in wanted)]
    told = [f"the weights are behind {prefix!a}, which is taken off"] if prefix not in ("", DATA_PARALLEL) else []
    if left:
        told.append(f"left out, since {factory} has no place for it: {_some(left)}")
    if told:
        warnings.warn(f"{path}: {'; '.join(told)}", AssumedWarning, stacklevel=2)
    return taken


def _unwrapped(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the names of PyTorch's wrappers, as long as no two names become one."""
    found = {WRAPPERS.sub("", key): value for key, value in state.items()}
    return found if len(found) == len(state) else dict(state)


def _prefixes(state: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """What may stand before all of a module's names, as one of them says: up to a dot."""
    longest = max((key for key in wanted if not _is_count(key)), key=len, default="")
    ends = (key[: len(key) - len(longest)] for key in state if longest and key.endswith(longest))
    return [prefix for prefix in dict.fromkeys(ends) if prefix.endswith(".")]


def _is_copy(prefix: str) -> bool:
    return any(word in COPIES for word in re.split("[^a-z]+", prefix.lower()))


def _distinct(state: Mapping[str, torch.Tensor], prefixes: list[str]) -> list[str]:
    """One prefix of those behind which the very same numbers are: a module that hangs in two places."""
    found: list[str] = []
    for prefix in prefixes:
        values = _behind(state, prefix)
        if not any(
            all(key in state and torch.equal(state[key], value) for key, value in _named(values, other))
            for other in found
        ):
            found.append(prefix)
    return found


def _named(values: Mapping[str, torch.Tensor], prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    return ((prefix + key, value) for key, value in values.items())


def _behind(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def _is_count(key: str) -> bool:
    """Files of before PyTorch 0.4.1 lack these."""
    return key.endswith("num_batches_tracked")


def _fits(state: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    return (
        state.keys() <= wanted.keys()
        and all(key in state or _is_count(key) for key in wanted)
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
