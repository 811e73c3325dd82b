"""Which of the sets of weights in a checkpoint are a module's: under a name or behind a prefix that a trainer left."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.parameter import is_lazy

from compress.console.wording import AssumedWarning, counted
from compress.errors import CheckpointError

__all__ = ["State", "best_of", "by_other_names", "fitted", "misfit", "unwrapped", "words_of"]

# Words of what a trainer averages into or learns from: never what is meant where there is another.
COPIES = {"ema", "avg", "swa", "swag", "polyak", "shadow", "momentum", "teacher", "target"}
# What PyTorch's own wrappers (compile, FSDP, activation checkpointing) put anywhere into a name.
WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
DATA_PARALLEL = "module."
USUAL = ("state_dict", "model_state_dict", "model", "module", "net", "weights")
SHOWN = 10  # keys of a kind in an error
LONGEST = 80  # characters of one
MOST_OF_ENDS = 4  # tensors of a head, and of one beside it
State = Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class _Fit:
    """Tensors that have a module's names and shapes.

    Attributes:
        name: of the set that they are in; "" for the file itself.
        prefix: that they are behind.
        taken: they, by the module's names.
        left: keys of the set that have no place.
        whole: whether beside them, behind the same prefix, there is nothing but copies.
    """

    name: str
    prefix: str
    taken: dict[str, torch.Tensor]
    left: list[str]
    whole: bool

    @property
    def copy(self) -> bool:
        return is_copy(self.name) or is_copy(self.prefix)

    def __str__(self) -> str:
        where = f"behind {self.prefix!a}" if self.prefix else "without a prefix"
        if not self.name:
            return where
        return f"under {self.name[:LONGEST]!a}" + (f" {where}" if self.prefix else "")


def fitted(
    sets: Mapping[str, State], wanted: State, path: Path, factory: str
) -> tuple[dict[str, torch.Tensor], str] | None:
    """The tensors that a module wants, by its own names.

    Whole sets count: all that the module wants, with the right shapes and kinds of numbers, under one name and behind
    one prefix, with nothing else there but copies (an average, a teacher). Of several with other numbers that which is
    no copy is meant, and two of these are an error. What is taken off, or left out, is told by an AssumedWarning.

    Args:
        sets: of the file, by their names.
        wanted: the module's own state_dict.
        path, factory: for messages.

    Returns:
        The tensors, and what was taken off or left out, in words ("" for nothing); None where no set fits.

    Raises:
        CheckpointError: several fit, or only a copy does, beside others.
    """
    fits = [fit for name, state in sets.items() for fit in _fits_of(name, unwrapped(state), wanted)]
    found = [fit for fit in fits if fit.whole]
    meant = _distinct([fit for fit in found if not fit.copy])
    if meant:  # there may be doubt about one that has more than the module wants, too
        meant = _distinct([*meant, *(fit for fit in fits if not (fit.whole or fit.copy))])
    elif found:
        meant = _distinct(found)
        others = [name for name, state in sets.items() if not is_copy(name) and not all(map(is_copy, state))]
        if len(meant) == 1 and others:
            raise CheckpointError(
                f"the weights of {path} don't fit {factory}",
                why=f"only the copy {meant[0]} does; elsewhere: {_differences(sets[others[0]], wanted)}",
                mend="name the factory that made them; for the copy, save it by itself",
            )
    if len(meant) > 1:
        raise CheckpointError(
            f"can't tell which weights of {path} are meant",
            why=f"those {' and those '.join(map(str, meant[:5]))} fit {factory} alike",
            mend="save the ones that you mean by themselves: torch.save(checkpoint['generator'], path)",
        )
    if meant:
        assumed = _assumed(meant[0], [fit for fit in found if fit is not meant[0]], path, factory)
        if assumed:
            warnings.warn(assumed, AssumedWarning, stacklevel=2)
        return meant[0].taken, assumed
    return None


def best_of(sets: Mapping[str, State], wanted: State | None = None) -> tuple[str, State]:
    """The set that is probably meant, for a message: the one with most of the names wanted, or under a usual name."""

    def rank(name: str) -> tuple[bool, int, int, int]:
        last = name.rpartition(".")[2]
        usual = len(USUAL) - USUAL.index(last) if last in USUAL else 0
        shared = 0 if wanted is None else sum(key in wanted for key in sets[name])
        return not is_copy(name), shared, usual, len(sets[name])

    name = max(sets, key=rank)
    return name, sets[name]


def by_other_names(sets: Mapping[str, State], wanted: State) -> State | None:
    """The set that is probably meant, where its names are not the module's: hooks of the module may know them."""
    _, state = best_of(sets, wanted)
    alike = all(_kind(tensor) == _kind(wanted[key]) for key, tensor in state.items() if key in wanted)
    return state if alike and state.keys() != wanted.keys() else None


def misfit(sets: Mapping[str, State], wanted: State, path: Path, factory: str) -> CheckpointError:
    """The error of weights that don't fit, with what they lack and have too much."""
    name, state = best_of(sets, wanted)
    where = f"under {name[:LONGEST]!a}: " if name else ""
    return CheckpointError(
        f"the weights of {path} don't fit {factory}",
        why=where + _differences(unwrapped(state), wanted),
        mend=_sized(unwrapped(state), wanted, factory)
        or "name the factory that made them; for a part of them, save that part's state_dict by itself",
    )


def _sized(state: State, wanted: State, factory: str) -> str:
    """What mends a network that was trained with another number of classes; "" where more than its end differs."""
    other = [key for key in wanted if key in state and state[key].shape != wanted[key].shape]
    rows = {(state[key].shape[0], state[key].shape[1:] == wanted[key].shape[1:]) for key in other if state[key].dim()}
    if state.keys() != wanted.keys() or len(rows) != 1 or not 0 < len(other) <= MOST_OF_ENDS or not min(rows)[1]:
        return ""
    name = factory.rpartition(":")[2]
    return (
        f"write a function that gives it with {min(rows)[0]} classes, such as def network(): return "
        f"{name}(num_classes={min(rows)[0]}) in mine.py, and --model mine:network"
    )


def is_copy(name: str) -> bool:
    """Whether a name says that it is a second set of weights."""
    return any(word in COPIES or word.startswith("averag") for word in words_of(name))


def words_of(name: str) -> list[str]:
    """Words of a name, in small letters: modelEma, model_ema and MODEL.EMA are of the same two."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def _assumed(taken: _Fit, others: list[_Fit], path: Path, factory: str) -> str:
    told = []
    if taken.copy:
        told.append(f"the weights are a copy, {taken}; there are no others")
    elif taken.prefix not in ("", DATA_PARALLEL):
        told.append(f"the weights are behind {taken.prefix!a}, which is taken off")
    if taken.left:
        told.append(f"left out, since {factory} has no place for it: {_some(taken.left)}")
    apart = [fit.name for fit in others if fit.name != taken.name]
    if apart:
        told.append(f"left out, another set of weights: {_some(apart)}")
    return f"{path}: {'; '.join(told)}" if told else ""


def _fits_of(name: str, state: State, wanted: State) -> list[_Fit]:
    found = []
    for prefix in ("", *_prefixes(state, wanted)):
        inside = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        taken = {key: value for key, value in inside.items() if key in wanted}
        if _fits(taken, wanted):
            left = [key for key in state if not key.startswith(prefix) or key.removeprefix(prefix) not in wanted]
            whole = all(key in wanted or is_copy(key) for key in inside)
            found.append(_Fit(name, prefix, taken, left, whole))
    return found


def unwrapped(state: State) -> dict[str, torch.Tensor]:
    """Without the names of PyTorch's wrappers, as long as no two names become one."""
    found = {WRAPPERS.sub("", key) if isinstance(key, str) else key: value for key, value in state.items()}
    return found if len(found) == len(state) else dict(state)


def _prefixes(state: State, wanted: State) -> list[str]:
    """What may stand before all of a module's names, as one of them says: up to a dot."""
    longest = max((key for key in wanted if not _is_count(key)), key=len, default="")
    ends = (key[: len(key) - len(longest)] for key in state if longest and key.endswith(longest))
    return [prefix for prefix in dict.fromkeys(ends) if prefix.endswith(".")]


def _distinct(fits: list[_Fit]) -> list[_Fit]:
    """One of those with the very same numbers: a module that hangs in two places."""
    found: list[_Fit] = []
    for fit in fits:
        if not any(_same(fit.taken, other.taken) for other in found):
            found.append(fit)
    return found


def _same(one: State, other: State) -> bool:
    return all(
        one[key].dtype == other[key].dtype and torch.equal(one[key], other[key])
        for key in one.keys() | other.keys()
        if key in one and key in other
    )


def _is_count(key: str) -> bool:
    """Files of before PyTorch 0.4.1 lack these."""
    return key.endswith("num_batches_tracked")


def _fits(state: State, wanted: State) -> bool:
    return all(key in state or _is_count(key) for key in wanted) and all(
        _kind(tensor) == _kind(wanted[key]) and (is_lazy(wanted[key]) or tensor.shape == wanted[key].shape)
        for key, tensor in state.items()
    )


def _kind(tensor: torch.Tensor) -> str:
    """Of its numbers: INT8 weights mean nothing to a layer of floats without their scales."""
    return "complex" if tensor.is_complex() else "float" if tensor.is_floating_point() else "whole"


def _differences(state: State, wanted: State) -> str:
    both = [key for key in wanted if key in state]
    missing = [key for key in wanted if key not in state]
    unexpected = [key for key in state if key not in wanted]
    shapes = [
        f"{key} {list(state[key].shape)} for {list(wanted[key].shape)}"
        for key in both
        if not is_lazy(wanted[key]) and state[key].shape != wanted[key].shape
    ]
    dtypes = [
        f"{key} {str(state[key].dtype)[6:]} for {str(wanted[key].dtype)[6:]}"
        for key in both
        if _kind(state[key]) != _kind(wanted[key])
    ]
    kinds = (
        (missing, "missing keys"),
        (unexpected, "unexpected keys"),
        (shapes, "other shapes"),
        (dtypes, "other dtypes"),
    )
    return "; ".join(f"{counted(len(keys), what)}: {_some(keys)}" for keys, what in kinds if keys)


def _some(keys: Iterable[str]) -> str:
    keys = list(keys)
    names = [ascii(key)[1:-1][:LONGEST] for key in keys[:SHOWN]]  # they are the file's
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return ", ".join(names) + more
