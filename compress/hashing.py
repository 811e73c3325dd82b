"""What identifies data: all of it that is used, since a result is kept under this key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

__all__ = ["digest_of_arrays", "digest_of_samples", "heard"]

CHUNK = 256
"""Samples in memory at a time."""
ROWS = 1 << 16

Array = np.ndarray[Any, Any]
Heard = Callable[[int, int], None]
# A hash is asked for deep inside, wherever something first needs it: who shows how it goes on is far from there.
_listener: ContextVar[Heard | None] = ContextVar("listener", default=None)


@contextmanager
def heard(listener: Heard) -> Iterator[None]:
    """Within it, a listener is told of samples hashed, and how many there are."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def digest_of_arrays(arrays: Mapping[str, Any]) -> str:
    """Of names, dtypes, shapes and all elements of arrays [n, …]."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        _add(digest.update, name, array.dtype, array.shape, _parts(array))
    return digest.hexdigest()


def digest_of_samples(samples: Any, rows: Callable[[Array], Mapping[str, Array]]) -> str:
    """Of all samples of a map-style torch Dataset.

    One that merely holds tensors is known by these; every sample of any other is made once.

    Args:
        samples: the dataset.
        rows: gives the samples at an index, by name.
    """
    digest = hashlib.sha256()
    if not _held(samples, digest.update):
        digest = hashlib.sha256()
        listener = _listener.get() or (lambda _done, _total: None)
        listener(0, len(samples))
        for start in range(0, len(samples), CHUNK):
            made = rows(np.arange(start, min(start + CHUNK, len(samples))))
            for name, array in sorted(made.items()):
                _add(digest.update, name, array.dtype, array.shape, [array])
            listener(min(start + CHUNK, len(samples)), len(samples))
    return digest.hexdigest()


def _held(samples: Any, update: Callable[[bytes], None]) -> bool:
    """Add what a dataset holds; not possible where it may compute something, as a class derived from these does."""
    kind = type(samples)
    if kind is TensorDataset:
        tensors: Sequence[torch.Tensor] = samples.tensors
        if any(type(tensor) is not torch.Tensor or tensor.layout is not torch.strided for tensor in tensors):
            return False
        update(f"tensors {len(tensors)};".encode())
        for tensor in tensors:
            plain = tensor.detach().cpu()
            pieces = (_bytes_of(plain[at : at + ROWS]) for at in range(0, len(plain), ROWS))
            _add(update, "", plain.dtype, tuple(plain.shape), pieces)
        return True
    if kind is Subset:
        index = np.asarray([int(place) for place in samples.indices], np.int64)
        _add(update, "subset", index.dtype, index.shape, [index])
        return _held(samples.dataset, update)
    if kind is ConcatDataset:
        update(f"concatenated {len(samples.datasets)};".encode())
        return all(_held(part, update) for part in samples.datasets)
    return False


def _bytes_of(tensor: torch.Tensor) -> Array:
    found: Array = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def _parts(array: Any) -> Iterable[Array]:
    if not array.ndim:
        return [np.asarray(array)]
    return (np.asarray(array[at : at + ROWS]) for at in range(0, len(array), ROWS))


def _add(
    update: Callable[[bytes], None], name: str, dtype: Any, shape: tuple[int, ...], parts: Iterable[Array]
) -> None:
    update(f"{name!r} {dtype} {list(shape)};".encode())
    for part in parts:
        if part.dtype.hasobject:  # its bytes are addresses
            update(repr(part.tolist()).encode())
        else:
            update(np.ascontiguousarray(part).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
