"""Inputs made for a signature, and a module run on them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from compress.errors import SignatureError, StageError, ToolkitError, first_line
from compress.model.ends import outputs_of
from compress.model.lookups import beyond_table
from compress.signature import Signature, TensorSpec
from compress.storage.shortages import lacks_memory
from compress.vetting.memory import memory_left

__all__ = [
    "Arrays", "as_bound", "call", "example_inputs", "in_calls", "in_order", "is_each", "run_on", "sample_inputs",
    "symbols_of", "telling",
]  # fmt: skip

Arrays = dict[str, np.ndarray[Any, Any]]
_Answer = TypeVar("_Answer")

# No data calls these forth: a name that there is not is a mistake in code, whose traceback is wanted.
BUGS = (NameError, AttributeError, ImportError, SyntaxError)

# A signature may come from a file of anybody's, and a size from a slip of the finger.
LARGEST_BYTES = 4 * 1024**3
DRAWN = 8
"""Bytes of a random number, whatever becomes of it."""


def example_inputs(specs: tuple[TensorSpec, ...], sizes: Mapping[str, int], seed: int = 0) -> Arrays:
    """Random inputs: standard normal floats; integers and booleans of 0 and 1, which every embedding has.

    A whole number for each sample is 1: it may be a length, and of nothing there is no last step. Boxes are as
    `in_order` has them.

    Args:
        specs: the inputs.
        sizes: a size for each symbolic dimension; `Signature.at` gives the representative ones.
        seed: the same seed gives the same arrays.

    Raises:
        SignatureError: one is text; or they would be larger than LARGEST_BYTES, all together, or than the memory that
            is left.
    """
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    _refuse(specs, sizes)
    for spec in specs:
        shape, dtype = spec.at(sizes), np.dtype(spec.dtype)
        values = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)
        values = np.ones(shape) if is_each(shape, dtype) else values
        arrays[spec.name] = in_order(spec.name, values.astype(dtype))
    return arrays


def is_each(shape: Sequence[int], dtype: np.dtype[Any]) -> bool:
    """Whether an input is one whole number for each sample, such as a length."""
    return dtype.kind in "iu" and len(shape) > 0 and math.prod(shape[1:]) == 1


def in_order(name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Random values; boxes (`bbox` [..., 4], as networks of documents call them) with their first corner first.

    Such a network looks a box's width up in a table, and fails on one below 0.
    """
    return np.sort(values, axis=-1) if name == "bbox" and values.ndim and values.shape[-1] == 4 else values


def _refuse(specs: tuple[TensorSpec, ...], sizes: Mapping[str, int]) -> None:
    """Before any is made: a signature of a few bytes can tell of as many as it likes, of any size."""
    total, left = 0, memory_left()
    for spec in specs:
        if spec.dtype == "string":
            raise SignatureError(
                f"can't make an input {spec.name!r}",
                why="it takes text, and no text is made up",
                mend="give inputs with --data where the command takes them, or a model of numbers",
            )
        shape, dtype = spec.at(sizes), np.dtype(spec.dtype)
        elements = math.prod(shape)
        total += elements * dtype.itemsize
        drawn = elements * DRAWN  # while this one is made, beside what stays
        if total > LARGEST_BYTES or total + drawn > left:
            there = "" if total > LARGEST_BYTES else f" of the {left / 1e9:,.1f} GB of memory that are left"
            raise SignatureError(
                f"can't make an input {spec.name!r} of {' × '.join(map(str, shape))}",
                why=f"it would take {(total + drawn * bool(there)) / 1e9:,.1f} GB{there}, with those before it",
                mend="give dimensions that vary a smaller size with --size, or a smaller batch",
            )


def sample_inputs(signature: Signature, batch: int, seed: int = 0) -> Arrays:
    """Random inputs (see `example_inputs`) at the signature's representative sizes, by input name."""
    return example_inputs(signature.inputs, signature.at(batch), seed)


def telling(arrays: Arrays, run: Callable[[Arrays], Iterable[np.ndarray[Any, Any]]]) -> Arrays:
    """The inputs, or their absolute values where only these give numbers: a logarithm's or a root's, say.

    Args:
        arrays: random inputs, by name.
        run: what a model gives for them.
    """
    positive = {
        name: (np.abs(array) + 0.1).astype(array.dtype) if array.dtype.kind == "f" else array
        for name, array in arrays.items()
    }
    for tried in (arrays, positive):
        if all(np.isfinite(values).any() for values in run(tried) if values.dtype.kind == "f" and values.size):
            return tried
    return arrays


def symbols_of(specs: tuple[TensorSpec, ...]) -> list[str]:
    """The names of the symbolic dimensions, sorted."""
    return sorted({dim for spec in specs for dim in spec.shape if isinstance(dim, str)})


def call(module: nn.Module, specs: tuple[TensorSpec, ...], arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Run a module on arrays or tensors by input name; outputs by name, see `outputs_of`."""
    tensors = [torch.as_tensor(arrays[spec.name]) for spec in specs]
    return outputs_of(module(*tensors))


def as_bound(module: nn.Module, each: Sequence[Any]) -> tuple[Any, ...]:
    """One thing for each input, as torch.export binds them to parameters: those of `*args` are one tuple."""
    parameters = [*inspect.signature(module.forward).parameters.values()]
    before = next((at for at, found in enumerate(parameters) if found.kind is found.VAR_POSITIONAL), len(each))
    return (*each[:before], tuple(each[before:])) if before < len(each) else tuple(each)


def in_calls(signature: Signature, inputs: Arrays, run: Callable[[Arrays], Arrays]) -> Arrays:
    """Outputs for inputs, in a call for each sample where the model takes no more.

    Args:
        signature: of the model.
        inputs: any number of samples.
        run: is one call.
    """
    samples = len(next(iter(inputs.values()))) if signature.singly else 1
    if samples == 1:
        return run(inputs)
    found = [run({name: values[at : at + 1] for name, values in inputs.items()}) for at in range(samples)]
    return {name: np.concatenate([each[name] for each in found]) for name in found[0]}


def run_on(inputs: Mapping[str, Any], run: Callable[[], _Answer]) -> _Answer:
    """What a model gives for inputs that fit its signature, which it may refuse nonetheless.

    A size that its layers can't halve, a token that its embedding lacks: no signature tells of these.

    Args:
        inputs: arrays or tensors by input name, for the error.
        run: runs the model on them.

    Raises:
        StageError: it does not run on them. A want of memory and a mistake in code are raised as they are.
    """
    try:
        return run()
    except (ToolkitError, *BUGS):
        raise
    except Exception as err:  # the user's forward and ONNX Runtime: anything may come out of them
        if lacks_memory(err) or isinstance(err, torch.OutOfMemoryError):
            raise  # no other inputs mend it: `compress.storage.shortages` tells it
        described = ", ".join(_described(name, values) for name, values in inputs.items())
        raise StageError(
            "the model does not run on the inputs that it is given",
            why=f"{described}: {beyond_table(err, inputs) or first_line(err)[:300]}",
            mend="give data (--eval, --calibration, --data) of sizes and, where they are integers, of values that the "
            "model takes, as in its training",
        ) from err


def _described(name: str, values: Any) -> str:
    shape = f"{name} {list(values.shape)}"
    array = np.asarray(values.cpu()) if isinstance(values, torch.Tensor) and not values.is_floating_point() else values
    if isinstance(array, np.ndarray) and array.dtype.kind in "iu" and array.size:
        return f"{shape} from {array.min()} to {array.max()}"
    return shape
