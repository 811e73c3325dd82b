"""The inputs on which two runtimes of one file are held against each other."""

from __future__ import annotations

import math

import numpy as np

from compress.data.dataset import Dataset
from compress.data.sizes import typical_inputs
from compress.evaluate.judge import spread
from compress.evaluate.scoring import batch_for, bytes_of, rows_within
from compress.model import Arrays
from compress.runtime.backends import Backend
from compress.signature import Signature

__all__ = ["compared_inputs", "joined"]

COMPARED = 256  # samples


def compared_inputs(data: Dataset | None, signature: Signature, backend: Backend) -> list[Arrays]:
    """Batches of samples, one of them as large as a server may join of requests, whatever the data has.

    A kernel may be another from some number of rows on: OpenVINO's answers to 37 samples may be right, and to 38 not.

    Args:
        data: fits the signature; None for random inputs.
        signature: of the file.
        backend: the file on the runtime that is believed.
    """
    if data is None:
        one = typical_inputs(signature, None, 1)
        rows = rows_within(bytes_of(one, backend.infer(one))) if signature.batches else 1
        return [one] if rows == 1 else [one, typical_inputs(signature, None, rows)]
    some = spread(data, COMPARED)
    rows = batch_for(backend, some)
    batches = [inputs for inputs, _ in some.batches(rows)]
    if signature.batches and len(some) < rows:
        batches.append(_filled(batches[0], rows))
    return batches


def _filled(inputs: Arrays, rows: int) -> Arrays:
    """So many rows of samples again, in another order each time: what is taken from a wrong row is to be seen."""
    each = np.arange(rows)
    return {name: values[(each + each // len(values)) % len(values)] for name, values in inputs.items()}


def joined(signature: Signature) -> int:
    """How many rows the largest of these batches has, as far as the signature tells; 1 where that is not known."""
    sizes, specs = signature.at(1), (*signature.inputs, *signature.outputs)
    known = all(spec.dtype != "string" and {*filter(_named, spec.shape)} <= sizes.keys() for spec in specs)
    if not signature.batches or not known:
        return 1
    return rows_within(sum(math.prod(spec.at(sizes)) * np.dtype(spec.dtype).itemsize for spec in specs))


def _named(dim: int | str) -> bool:
    return isinstance(dim, str)
