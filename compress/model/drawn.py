"""Inputs as a model may be given them: indices over the whole of their tables, masks that leave something."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from compress.model.inputs import Arrays, call, example_inputs, in_order, is_each, sample_inputs
from compress.signature import Signature
from compress.storage.shortages import raise_shortage

__all__ = ["drawn_inputs", "drawn_taken", "draws", "indices_of"]

# What no vocabulary reaches: an input that takes this takes anything.
LARGEST_INDEX = 2**19
WIDTH = {"uint8": 256, "int8": 128}
INDEX = ("int8", "uint8", "int16", "uint16", "int32", "int64")


def indices_of(module: nn.Module, signature: Signature) -> dict[str, int]:
    """How many values each whole-numbered input takes, from 0, where it is bounded.

    An input that goes to an nn.Embedding as it is takes as many as that has rows. What another looks up, in tables
    that are no layers, is told by trying: it takes what the module runs on. One that takes anything has no entry.

    Args:
        module: runs at the signature's representative sizes.
        signature: its inputs.
    """
    wanted = [spec.name for spec in signature.inputs if spec.dtype in INDEX]
    if not wanted:
        return {}
    arrays = sample_inputs(signature, 1)
    found = _rows(module, signature, arrays, wanted)
    for name in wanted:
        if name not in found:
            width = WIDTH.get(str(arrays[name].dtype), LARGEST_INDEX)
            bound = _first_refused(module, signature, arrays, name, width)
            if bound is not None:
                found[name] = bound
    return found


def _rows(module: nn.Module, signature: Signature, arrays: Arrays, names: list[str]) -> dict[str, int]:
    """Rows of the smallest table that takes an input as it is."""
    tensors = {name: torch.as_tensor(values) for name, values in arrays.items()}
    found: dict[str, int] = {}

    def seen(table: Any, given: tuple[Any, ...]) -> None:
        for name in names:
            if given and isinstance(given[0], torch.Tensor) and given[0].data_ptr() == tensors[name].data_ptr():
                found[name] = min(found.get(name, table.num_embeddings), table.num_embeddings)

    tables = [layer for layer in module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    handles = [table.register_forward_pre_hook(seen) for table in tables]
    try:
        with torch.no_grad():
            call(module, signature.inputs, tensors)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _first_refused(module: nn.Module, signature: Signature, arrays: Arrays, name: str, width: int) -> int | None:
    """The least number that the module does not take for an input, by doubling and halving; None if it takes all."""

    def takes(value: int) -> bool:
        try:
            with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):  # where torch.fx prints what fails
                call(module, signature.inputs, arrays | {name: np.full_like(arrays[name], value)})
        except Exception:  # the user's forward: anything may come out of it
            return False
        return True

    if takes(width - 1) or not takes(1):  # not by its size, then
        return None
    taken, refused = 1, 2
    while refused < width - 1 and takes(refused):
        taken, refused = refused, 2 * refused
    refused = min(refused, width - 1)
    while refused - taken > 1:
        middle = (taken + refused) // 2
        taken, refused = (middle, refused) if takes(middle) else (taken, middle)
    return refused


def drawn_inputs(
    signature: Signature, sizes: Mapping[str, int], indices: Mapping[str, int], seed: int, *, lengths: bool = False
) -> Arrays:
    """Random inputs: standard normal floats, indices over all that they may be, masks that leave a beginning.

    Args:
        signature: of the model.
        sizes: of each symbolic dimension.
        indices: how many values each whole-numbered input takes, see `indices_of`. Others are taken for flags, where
            there is one for each sample, else for masks, of 1 and then 0, with at least one 1 for each sample; bytes
            for pixels.
        seed: the same seed gives the same arrays.
        lengths: whether what is one whole number for each sample is a length: 1 or more, and within all sizes.
    """
    rng = np.random.default_rng(seed)
    values: np.ndarray[Any, Any]
    arrays = example_inputs(signature.inputs, sizes, seed)
    for spec in signature.inputs:
        shape, dtype = arrays[spec.name].shape, arrays[spec.name].dtype
        if spec.name in indices:
            least, count = 0, indices[spec.name]
            if lengths and is_each(shape, dtype) and count > 1:
                least, count = 1, min(count, 1 + min((sizes[dim] for dim in signature.told), default=count))
            values = np.asarray(rng.integers(least, count, shape))
            if values.size:
                values.flat[rng.integers(values.size)] = count - 1  # the last one, too
        elif is_each(shape, dtype) and len(shape) == 1:
            values = np.ones(shape, np.int64) if lengths else np.asarray(rng.integers(0, 2, shape))
        elif dtype == np.uint8 and len(shape) > 2:
            values = np.asarray(rng.integers(0, 256, shape))
        elif dtype.kind in "iub" and len(shape) > 1:
            ends = rng.integers(1, shape[-1] + 1, (*shape[:-1], 1))
            values = np.arange(shape[-1]) < ends
        else:
            continue
        arrays[spec.name] = in_order(spec.name, values.astype(dtype))
    return arrays


def draws(signature: Signature, sizes: Mapping[str, int], indices: Mapping[str, int], seed: int) -> Iterator[Arrays]:
    """As `drawn_inputs`, and then, where an input may hold lengths, with such: of nothing there is no last step."""
    first = drawn_inputs(signature, sizes, indices, seed)
    yield first
    if any(is_each(values.shape, values.dtype) for values in first.values()):
        yield drawn_inputs(signature, sizes, indices, seed, lengths=True)


def drawn_taken(
    taken: Callable[[Arrays], Arrays], signature: Signature, sizes: Mapping[str, int], indices: Mapping[str, int],
    seed: int,
) -> Arrays:  # fmt: skip
    """The first of `draws` that a model does not refuse.

    Args:
        taken: gives inputs that are taken, or raises.
        signature, sizes, indices, seed: see `drawn_inputs`.
    """
    given, *others = draws(signature, sizes, indices, seed)
    try:
        return taken(given)
    except Exception as err:  # the model's: anything may come out of it
        raise_shortage(err)
        if not others:
            raise
        return taken(others[0])
