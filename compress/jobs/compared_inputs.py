"""The inputs on which two runtimes of one file are held against each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from compress.data.dataset import Dataset
from compress.data.sizes import typical_inputs
from compress.errors import ToolkitError
from compress.evaluate.judge import spread
from compress.evaluate.scoring import BATCH_BYTES, batch_for, bytes_of, rows_within
from compress.model import Arrays
from compress.runtime.backends import Backend
from compress.runtime.backends.openvino_cpu import OpenVinoBackend
from compress.signature import Signature
from compress.storage.shortages import lacks_memory
from compress.vetting.memory import memory_left

__all__ = ["MANY", "compared_inputs", "inputs_beyond", "joined", "sizes_of"]

COMPARED = 256  # samples
JOINED_BYTES = 160 << 20  # of the inputs and outputs of the largest batch: 32 samples of 5 MB
INSIDE = 40  # times as much memory a network may take in all, of which half of what is left may be taken
MANY = 64  # of what varies: as many as of rows


def compared_inputs(
    data: Dataset | None, signature: Signature, backend: Backend, other: Backend | None = None
) -> list[list[Arrays]]:
    """Batches of samples, one of them as large as a server may join of requests, whatever the data has.

    A kernel may be another from some number of rows on: OpenVINO's answers to 37 samples may be right, and to 38 not.
    Rows need not be samples: what else varies is many in one call, too.

    Args:
        data: fits the signature; None for random inputs.
        signature: of the file.
        backend: the file on the runtime that is believed.
        other: the file on the other one.

    Returns:
        Groups, of which each is to be told by itself: the batches of usual sizes, and each of others.
    """
    batches = _batches(data, signature, backend)
    return [batches, *([inputs] for inputs in inputs_beyond(data, signature, backend, other))]


def inputs_beyond(
    data: Dataset | None, signature: Signature, backend: Backend, other: Backend | None = None
) -> Iterator[Arrays]:
    """One sample with each dimension that varies at `MANY`, and at twice its usual size, as far as both take that.

    Args:
        data, signature, backend, other: see `compared_inputs`.
    """
    one, usual = typical_inputs(signature, data, 1), signature.at(1)
    for dim in signature.told:
        for size in sorted({MANY, 2 * usual[dim]}):
            inputs = _stretched(one, signature, dim, size)
            if size > usual[dim] and bytes_of(inputs) <= BATCH_BYTES and _taken(inputs, backend, other):
                yield inputs


def _taken(inputs: Arrays, backend: Backend, other: Backend | None) -> bool:
    try:
        backend.infer(inputs)
        if isinstance(other, OpenVinoBackend):  # to run it on what it can't do may end the process
            other.check_sizes(inputs)
    except Exception as err:  # ONNX Runtime's want of memory, at a size that nobody asked for
        if not (isinstance(err, ToolkitError) or lacks_memory(err)):
            raise
        return False
    return True


def _stretched(inputs: Arrays, signature: Signature, dim: str, size: int) -> Arrays:
    """A dimension at another size: what there is of it again, in another order each time."""
    found = dict(inputs)
    for spec in signature.inputs:
        for axis, name in enumerate(spec.shape):
            if name == dim:
                found[spec.name] = np.take(found[spec.name], _again(found[spec.name].shape[axis], size), axis)
    return found


def sizes_of(signature: Signature, groups: Sequence[Sequence[Arrays]]) -> dict[str, list[int]]:
    """By dimension that varies, the sizes that it has in some inputs."""
    found: dict[str, set[int]] = {}
    for inputs in itertools.chain.from_iterable(groups):
        for spec in signature.inputs:
            for name, size in zip(spec.shape, inputs[spec.name].shape, strict=True):
                if isinstance(name, str):
                    found.setdefault(name, set()).add(size)
    return {name: sorted(sizes) for name, sizes in found.items()}


def _batches(data: Dataset | None, signature: Signature, backend: Backend) -> list[Arrays]:
    if data is None:
        one = typical_inputs(signature, None, 1)
        rows = _joined(bytes_of(one, backend.infer(one))) if signature.batches else 1
        return [one] if rows == 1 else [one, typical_inputs(signature, None, rows)]
    some = spread(data, COMPARED)
    rows = batch_for(backend, some)
    batches = [inputs for inputs, _ in some.batches(rows)]
    if signature.batches:
        one = some.first(1)
        joined = max(rows, _joined(bytes_of(one, backend.infer(one))))
        if joined > max(len(next(iter(inputs.values()))) for inputs in batches):
            batches.append(_filled(some.first(joined), joined))
    return batches


def _joined(sample_bytes: int) -> int:
    """Samples, of so many bytes with their outputs, in the largest batch."""
    return rows_within(sample_bytes, max(BATCH_BYTES, min(JOINED_BYTES, memory_left() // (2 * INSIDE))))


def _filled(inputs: Arrays, rows: int) -> Arrays:
    """So many rows of samples again, in another order each time: what is taken from a wrong row is to be seen."""
    return {name: values[_again(len(values), rows)] for name, values in inputs.items()}


def _again(there: int, wanted: int) -> np.ndarray[Any, Any]:
    """Places of so many that there are, as many as are wanted."""
    each = np.arange(wanted)
    return np.asarray((each + each // there) % there)


def joined(signature: Signature) -> int:
    """How many rows the largest of these batches has, as far as the signature tells; 1 where that is not known."""
    sizes, specs = signature.at(1), (*signature.inputs, *signature.outputs)
    known = all(spec.dtype != "string" and {*filter(_named, spec.shape)} <= sizes.keys() for spec in specs)
    if not signature.batches or not known:
        return 1
    return _joined(sum(math.prod(spec.at(sizes)) * np.dtype(spec.dtype).itemsize for spec in specs))


def _named(dim: int | str) -> bool:
    return isinstance(dim, str)
