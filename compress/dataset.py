"""Calibration, evaluation and training data, checked against the model's inputs before any work starts."""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from compress.artifact import Signature, TensorSpec, sha256_of
from compress.errors import DatasetError, SignatureError
from compress.model import Arrays

__all__ = ["Dataset"]

_LABELS = ("label", "labels", "target", "targets", "y")
_MEND = "save it with np.savez(path, input_name=array, label=array), the first dimension being the samples"


@dataclass(frozen=True)
class Dataset:
    """Arrays of samples by input name, and labels where there are some.

    Attributes:
        source: where it came from, as the user wrote it.
        inputs: arrays whose first dimension is the sample; memory-mapped where the source is .npy.
        labels: integers [n] for classification, or None.
        sha256: of the data.
    """

    source: str
    inputs: Arrays
    labels: np.ndarray[Any, Any] | None
    sha256: str

    @classmethod
    def open(cls, source: str, signature: Signature) -> Self:
        """Read an .npz, a .npy, a folder of .npy files, or what `package.module:function` returns.

        An array belongs to the input of its name; a model with one input takes the only array that is not the
        labels, whatever its name. Labels are called label, labels, target, targets or y.

        Raises:
            DatasetError: missing, empty, damaged, without an array for an input, of unequal lengths, or with NaN.
            SignatureError: an array of the wrong shape or dtype.
        """
        arrays, digest = _read(source)
        labels = next((arrays.pop(name) for name in _LABELS if name in arrays), None)
        if len(signature.inputs) == 1 and len(arrays) == 1:
            arrays = {signature.inputs[0].name: next(iter(arrays.values()))}
        inputs: Arrays = {}
        for spec in signature.inputs:
            if spec.name not in arrays:
                have = ", ".join(arrays) or "no arrays"
                raise DatasetError(f"{source} lacks the input {spec.name!r}", why=f"it holds {have}", mend=_MEND)
            inputs[spec.name] = _fitting(arrays[spec.name], spec, source)
        lengths = {name: len(array) for name, array in inputs.items()} | (
            {} if labels is None else {"label": len(labels)}
        )
        if 0 in lengths.values():
            raise DatasetError(
                f"{source} is empty", why="it holds no samples", mend="give it some: 100 or more is usual"
            )
        if len(set(lengths.values())) > 1:
            why = ", ".join(f"{name} has {length} samples" for name, length in lengths.items())
            raise DatasetError(f"the arrays in {source} are of unequal length", why=why, mend=_MEND)
        return cls(source, inputs, labels, digest)

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def batches(self, size: int) -> Iterator[tuple[Arrays, np.ndarray[Any, Any] | None]]:
        """Consecutive batches; the last may be smaller."""
        for start in range(0, len(self), size):
            yield self.take(slice(start, start + size))

    def take(self, index: slice | np.ndarray[Any, Any]) -> tuple[Arrays, np.ndarray[Any, Any] | None]:
        """The samples at an index, and their labels."""
        chosen = {name: np.ascontiguousarray(array[index]) for name, array in self.inputs.items()}
        return chosen, None if self.labels is None else np.asarray(self.labels[index])


def _fitting(array: np.ndarray[Any, Any], spec: TensorSpec, source: str) -> np.ndarray[Any, Any]:
    want = np.dtype(spec.dtype)
    if array.dtype != want and array.dtype.kind == want.kind:
        array = array.astype(want)  # float64 for float32 and the like: the same numbers, another width
    try:
        spec.check(array, source=source)
    except SignatureError:
        if array.ndim and array.shape[1:] == tuple(spec.shape[1:]) and not len(array):
            raise DatasetError(f"{source} is empty", why="it holds no samples", mend=_MEND) from None
        raise
    if want.kind == "f" and not all(np.isfinite(array[i : i + 1024]).all() for i in range(0, len(array), 1024)):
        raise DatasetError(
            f"{source} holds NaN or infinite values",
            why=f"in the array of the input {spec.name!r}",
            mend="find where they come from, or drop those samples",
        )
    return array


def _read(source: str) -> tuple[Arrays, str]:
    path = Path(source)
    if re.fullmatch(r"[\w.]+:\w+", source) and not path.exists():
        return _call(source)
    try:
        if path.is_dir():
            files = sorted(path.glob("*.npy"))
            digest = hashlib.sha256("".join(sha256_of(file) for file in files).encode()).hexdigest()
            return {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in files}, digest
        if not path.is_file():
            raise DatasetError(f"can't read the data {source}", why="there is no such file", mend=_MEND)
        if path.suffix == ".npy":
            return {"": np.load(path, mmap_mode="r", allow_pickle=False)}, sha256_of(path)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}, sha256_of(path)
    except (ValueError, EOFError, OSError, TypeError, zipfile.BadZipFile) as err:
        why = f"it is not a whole .npz or .npy file ({err})"
        raise DatasetError(f"can't read the data {source}", why=why, mend=_MEND) from err


def _call(source: str) -> tuple[Arrays, str]:
    module, _, function = source.partition(":")
    mend = "it is to return a dict of arrays by input name; run from the folder that holds its module"
    sys.path.insert(0, "")
    try:
        given = getattr(importlib.import_module(module), function)()
    except Exception as err:  # the user's function: anything may come out of it
        raise DatasetError(f"can't get data from {source}", why=f"{type(err).__name__}: {err}", mend=mend) from err
    finally:
        sys.path.remove("")
    if not isinstance(given, Mapping):
        raise DatasetError(f"can't get data from {source}", why=f"it gave a {type(given).__name__}", mend=mend)
    arrays = {str(name): np.asarray(array) for name, array in given.items()}
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return arrays, digest.hexdigest()
