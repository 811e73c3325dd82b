"""Weights of a folder: safetensors, which hold nothing but numbers; pickles where they are trusted."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from compress.console.wording import AssumedWarning
from compress.errors import CheckpointError, MissingExtraError, first_line
from compress.formats.hub.folder import PICKLED, WHOLE, HubFolder
from compress.formats.keys import DATA_PARALLEL, unwrapped
from compress.vetting.files import open_file
from compress.vetting.texts import parse_json

__all__ = ["read_safetensors", "state_of"]


MOST_TENSORS = 100_000  # of a file; each costs a reader some microseconds and kilobytes, whatever it holds
LARGEST_HEADER = 100_000_000  # that safetensors' own reader takes


def state_of(folder: HubFolder, *, trust: bool) -> dict[str, torch.Tensor]:
    """All weights by their names.

    Raises:
        CheckpointError: a file is damaged, two hold one name, or they are pickles that nobody trusts.
    """
    if not folder.pickled:
        _refuse_many(folder)
        return _together(folder.weights, [read_safetensors(path) for path in folder.weights])
    if not trust:
        raise CheckpointError(
            f"won't load {folder.path}: its weights are pickles, which may hold code",
            why=f"there is {PICKLED} and no model.safetensors",
            mend="download model.safetensors; or, if you trust whoever made it, add --trust",
        )
    from compress.formats.pickles.read import unpickle

    found = [unpickle(path, trust=trust) for path in folder.weights]
    kept = [
        {key: value for key, value in each.items() if isinstance(value, torch.Tensor)} if isinstance(each, dict) else {}
        for each in found
    ]
    return _together(folder.weights, kept)


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file; where it declares others than it holds, safetensors' reader refuses it.

    Raises:
        CheckpointError: it is damaged.
        MissingExtraError: safetensors is not installed.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as err:
        raise MissingExtraError(f"read {path}", module="safetensors", extra="hf") from err
    try:
        _refuse_header(path)
        return load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError, AttributeError) as err:
        raise CheckpointError(
            f"can't read {path}", why=f"it is no whole safetensors file: {first_line(err)[:200]}", mend=WHOLE
        ) from err


def _refuse_many(folder: HubFolder) -> None:
    try:
        held = sum(_most_tensors(_header(path)) for path in folder.weights)
    except OSError:  # which its reader tells of
        return
    if held > MOST_TENSORS:
        raise CheckpointError(
            f"can't read the weights of {folder.path}",
            why=f"they are {held:,} tensors, and {MOST_TENSORS:,} are taken",
            mend=WHOLE,
        )


def _refuse_header(path: Path) -> None:
    """Look at a file's names before its reader does.

    Raises:
        ValueError: there are too many, or one stands there twice, of which a reader takes either.
        OSError: it can't be read.
    """
    header = _header(path)
    held = _most_tensors(header)
    if held > MOST_TENSORS:
        raise ValueError(f"it holds {held:,} tensors, and {MOST_TENSORS:,} are taken")
    if header:
        parse_json(header)


def _header(path: Path) -> bytes:
    """Empty where it is larger than its reader takes, which says so."""
    with open_file(path) as file:
        size = int.from_bytes(file.read(8), "little")
        return file.read(size) if size <= LARGEST_HEADER else b""


def _most_tensors(header: bytes) -> int:
    """Each is a table in the header's own; a name may be written in many ways, a bracket in one."""
    return max(0, header.count(b"{") - 1)


def _together(paths: Sequence[Path], parts: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    found: dict[str, torch.Tensor] = {}
    for path, part in zip(paths, parts, strict=True):
        if twice := found.keys() & part.keys():
            raise CheckpointError(f"can't read {path}", why=f"it holds {min(twice)[:80]!a} a second time", mend=WHOLE)
        found |= part
    if not found:
        raise CheckpointError(f"can't read {paths[0].parent}", why="its weights hold no tensors", mend=WHOLE)
    return _without_prefix(found, paths[0].parent)


def _without_prefix(found: Mapping[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """Without what PyTorch's wrappers add to names: compile and FSDP anywhere, DistributedDataParallel before all."""
    plain = unwrapped(found)
    if not all(isinstance(name, str) and name.startswith(DATA_PARALLEL) for name in plain):
        return plain
    told = f"All weights of {folder} are behind {DATA_PARALLEL!r}, as DistributedDataParallel names them: taken off."
    warnings.warn(told, AssumedWarning, stacklevel=2)
    return {name.removeprefix(DATA_PARALLEL): tensor for name, tensor in plain.items()}
