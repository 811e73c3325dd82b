"""Calibration, evaluation and training data, checked against the model's inputs before any work starts."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from compress.artifact import Signature, TensorSpec
from compress.console.wording import AssumedWarning, counted
from compress.data.images import INDEX, Images
from compress.data.made import fitting, refuse_not_finite, refuse_unfit
from compress.data.seeds import seeded
from compress.data.sources import Converted, Fetched, Fetcher, Rows, open_shards
from compress.data.spread import spread_over
from compress.errors import DatasetError, SignatureError
from compress.model import Arrays
from compress.options.user_code import is_code, user_code
from compress.storage.hashing import digest_of_arrays, digest_of_samples
from compress.storage.steady import listed, seen
from compress.vetting.arrays import open_npy, open_npz
from compress.vetting.files import NoFileError, files_in
from compress.vetting.heard import listener
from compress.vetting.scratch import is_held
from compress.vetting.texts import read_text

__all__ = ["MADE_OF", "PAIRS", "SCRATCH", "Dataset"]

SCRATCH = "compress-"  # begins the names of folders that are made of data
LOOKED_AT = "samples looked at"
MADE_OF = ".made-of"  # in such a one: what the user called the data
PAIRS = ".pairs"  # in one whose rows are each two a pair

_LABELS = ("label", "labels", "target", "targets", "y")
_MEND = "save it with np.savez(path, input_name=array, label=array), the first dimension being the samples"


@dataclass(frozen=True)
class Dataset:
    """Arrays of samples by input name, and labels where there are some.

    Attributes:
        source: where it came from, as the user wrote it.
        inputs: arrays whose first dimension is the sample, or what behaves like them: memory-mapped where the source
            is .npy or uncompressed .npz shards, opened a few at a time where these are compressed, made when asked for
            where it is a torch Dataset.
        labels: integers [n] for classification, or None.
        digest: the SHA-256 of all of the data, or what computes it: that makes every sample of a torch Dataset once.
        starts: where each compressed shard begins: reading from many at once is slow.
        fetcher: makes the samples, of a torch Dataset.
        place: what another process of this machine opens the same data by: the source, or the folder that was made of
            it; empty of what is in this process's memory alone.
        pairs: whether each two samples, one after another, are a pair, and have one label.
        call: samples that the model takes at once, no more and no fewer, see `Signature.call`.
    """

    source: str
    inputs: dict[str, Any]
    labels: Any | None
    digest: str | Callable[[], str]
    starts: tuple[int, ...] = ()
    fetcher: Fetcher | None = None
    place: str = ""
    pairs: bool = False
    call: int = 1

    @classmethod
    def open(cls, source: str, signature: Signature) -> Self:
        """Read an .npz, a .npy, a folder of .npy files or .npz shards, or what `package.module:function` returns.

        That is a dict of arrays, or a map-style torch Dataset. An array belongs to the input of its name; a model with
        one input takes the only array that is not the labels, whatever its name: an AssumedWarning tells of another
        one, and of an array that nothing takes. Labels are called label, labels, target, targets or y, where no input
        is called so; of several, the first of these that is there, and an AssumedWarning tells of the others.

        A model whose calls take one sample, by a dimension that is fixed, takes any number of samples one by one.

        Raises:
            DatasetError: missing, empty, damaged, without an array for an input, of unequal lengths, or with NaN.
            SignatureError: an array of the wrong shape or dtype.
        """
        place, source = source, _called(source)
        arrays, digest, starts, fetcher = _read(place, source, signature)
        taken = {spec.name for spec in signature.inputs}  # a model may take a "target"
        labelled = {name: arrays.pop(name) for name in _LABELS if name in arrays and name not in taken}
        labels = next(iter(labelled.values()), None)
        given = not _is_made(Path(place))  # by the user, who has named the arrays
        if given and len(labelled) > 1:
            _tell_several([*labelled], source)
        if len(signature.inputs) == 1 and len(arrays) == 1:
            ((name, array),) = arrays.items()
            arrays = {signature.inputs[0].name: array}
            if given and name not in ("", signature.inputs[0].name):  # a bare .npy has none
                _tell_taken(name, signature.inputs[0].name, source)
        if given and labels is None and taken <= arrays.keys():
            beside = () if fetcher is None else fetcher.unused
            _tell_unused([*(name for name in arrays if name not in taken), *beside], source)
        _refuse_no_samples(arrays, signature, source)
        inputs: dict[str, Any] = {}
        for spec in signature.inputs:
            if spec.name not in arrays:
                have = ", ".join(arrays) or "no arrays"
                if not given:
                    raise DatasetError(
                        f"{source} lacks the input {spec.name!r}",
                        why=f"what is made of it is {have}, and the model takes more",
                        mend=f"give arrays of all of its inputs: {_MEND}",
                    )
                raise DatasetError(f"{source} lacks the input {spec.name!r}", why=f"it holds {have}", mend=_MEND)
            any_number = replace(spec, shape=("samples", *spec.shape[1:])) if signature.singly else spec
            inputs[spec.name] = _fitting(arrays[spec.name], any_number, source)
        if labels is not None and not labels.ndim:
            raise DatasetError(f"can't use the labels in {source}", why="they are a single number", mend=_MEND)
        lengths = {name: len(array) for name, array in inputs.items()} | (
            {} if labels is None else {"label": len(labels)}
        )
        if 0 in lengths.values():
            raise DatasetError(
                f"{source} is empty", why="it holds no samples", mend="give it some: 100 or more is usual"
            )
        if len(set(lengths.values())) > 1:
            why = ", ".join(f"{name} has {counted(length, 'samples')}" for name, length in lengths.items())
            raise DatasetError(f"the arrays in {source} are of unequal length", why=why, mend=_MEND)
        pairs = not given and (Path(place) / PAIRS).is_file()
        return cls(source, inputs, labels, digest, starts, fetcher, place, pairs, signature.call)

    @functools.cached_property
    def sha256(self) -> str:
        """Of all of the data; what is computed from it is kept under this key."""
        return self.digest if isinstance(self.digest, str) else self.digest()

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def batches(self, size: int) -> Iterator[tuple[Arrays, np.ndarray[Any, Any] | None]]:
        """Consecutive batches, in whole calls; the last may be smaller."""
        size = self.whole(size)
        for start in range(0, len(self), size):
            yield self.take(slice(start, start + size))

    def whole(self, count: int) -> int:
        """So many samples, or as many more as fill the last call."""
        return -(-count // self.call) * self.call

    def first(self, count: int) -> Arrays:
        """So many samples from the beginning, or as many more as fill the last call; fewer where there are no more."""
        return self.take(slice(0, self.whole(count)))[0]

    def places(self, count: int) -> np.ndarray[Any, Any]:
        """Where at most so many samples are, evenly over the data; pairs, and what goes into one call, stay together.

        There is one of these at least, whatever the count.
        """
        together = math.lcm(self.call, 2 if self.pairs else 1)
        firsts = together * spread_over(len(self) // together, max(1, count // together))
        return np.asarray((firsts[:, None] + np.arange(together)).reshape(-1))

    def take(
        self, index: slice | np.ndarray[Any, Any], seed: int | None = None
    ) -> tuple[Arrays, np.ndarray[Any, Any] | None]:
        """The samples at an index, and their labels.

        Args:
            index: where they are.
            seed: what is random in samples that a user's code makes follows from it, as a training wants; by default
                from each sample's number, so that they are the same whenever they are read.

        Raises:
            DatasetError: samples that a user's code makes can't be had, or hold what arrays are refused for.
        """
        if self.fetcher is None:
            chosen = {name: np.ascontiguousarray(array[index]) for name, array in self.inputs.items()}
            return chosen, None if self.labels is None else np.asarray(self.labels[index])
        places = np.arange(len(self))[index] if isinstance(index, slice) else index
        rows, numbers = self.fetcher.rows(places, seed), self.fetcher.numbers(places)
        chosen = {}
        for name, array in self.inputs.items():
            refuse_not_finite(rows[array.name], name, numbers, self.source)
            chosen[name] = np.ascontiguousarray(fitting(rows[array.name], array.dtype, array.name, self.source))
        if not isinstance(self.labels, Fetched):
            return chosen, _rows(self.labels, index)
        made = fitting(rows[self.labels.name], self.labels.dtype, self.labels.name, self.source)
        if self.labels.taught is not None:
            self.labels.taught.refuse(made, numbers, self.source)
        return chosen, self.labels.shaped(made)

    def part(self, index: np.ndarray[Any, Any]) -> Dataset:
        """These samples as a dataset of their own, taken when they are asked for."""
        places = index.astype(np.int64).tobytes()

        def digest() -> str:
            return hashlib.sha256(self.sha256.encode() + places).hexdigest()

        if self.fetcher is not None:
            fetcher = self.fetcher.part(index)
            views: dict[str, Any] = {name: array.by(fetcher) for name, array in self.inputs.items()}
            made = self.labels.by(fetcher) if isinstance(self.labels, Fetched) else _rows(self.labels, index)
            return replace(self, inputs=views, labels=made, digest=digest, fetcher=fetcher)
        inputs: dict[str, Any] = {
            name: _Part((len(index), *array.shape[1:]), array.dtype, array, index)
            for name, array in self.inputs.items()
        }  # fmt: skip
        labels = None if self.labels is None else np.asarray(self.labels[index])
        in_order = bool(self.starts) and bool((np.diff(index) > 0).all())
        starts = tuple(int(start) for start in np.searchsorted(index, self.starts)) if in_order else ()
        whole = self.pairs and not len(index) % 2 and not (index[::2] % 2).any()
        pairs = whole and bool((index[1::2] == index[::2] + 1).all())
        return replace(self, inputs=inputs, labels=labels, digest=digest, starts=starts, pairs=pairs)

    def whole_pairs(self, pairs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Where the samples of some pairs are [2 n], by the pairs' numbers [n]."""
        return np.asarray(np.stack([2 * pairs, 2 * pairs + 1], axis=1).reshape(-1))


def _rows(labels: Any | None, index: Any) -> np.ndarray[Any, Any] | None:
    """Labels that are read already, as class ids."""
    return None if labels is None else np.asarray(labels[index])


@dataclass(frozen=True)
class _Part(Converted):
    """Some of the rows of an array."""

    places: np.ndarray[Any, Any]

    def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
        return np.asarray(self.rows[self.places[index]], self.dtype)


def _tell_taken(name: str, wanted: str, source: str) -> None:
    told = f"{source} has no array named {wanted!r}: the model's input takes {name!r}, the only one that is no label"
    warnings.warn(told, AssumedWarning, stacklevel=3)


def _tell_several(names: Sequence[str], source: str) -> None:
    """Of arrays that may each be meant for the labels."""
    others = ", ".join(map(repr, names[1:]))
    told = f"the labels in {source} are {names[0]!r} (not used: {others}): save those that are meant alone, as 'label'"
    warnings.warn(told, AssumedWarning, stacklevel=3)


def _tell_unused(names: Sequence[str], source: str) -> None:
    """Of arrays that nothing takes, where somebody may have meant one for labels."""
    if not names:
        return
    told = f"no labels in {source} (not used: {', '.join(names)[:200]}): they go by the names {', '.join(_LABELS)}"
    warnings.warn(told, AssumedWarning, stacklevel=3)


def _refuse_no_samples(arrays: Mapping[str, Any], signature: Signature, source: str) -> None:
    """Refuse data for an input that a call takes one of, beside others that it takes for each sample."""
    samples = next(
        (len(arrays[s.name]) for s in signature.inputs if s.batched and s.name in arrays and arrays[s.name].ndim), None
    )
    for spec in () if samples is None else signature.inputs:
        if spec.shape[:1] != (samples,) and not spec.batched:
            raise DatasetError(
                f"can't use {source} for this model",
                why=f"a call takes one {spec} for all of its samples, and data is given by sample",
                mend=f"export the model with {spec.name!r} fixed at a value, or with a first dimension of samples "
                f"({spec.name}:{spec.dtype}[{', '.join(map(str, ('batch', *spec.shape)))}])",
            )


def _fitting(array: Any, spec: TensorSpec, source: str) -> Any:
    want, given = np.dtype(spec.dtype), array
    if array.dtype != want and array.dtype.kind == want.kind:  # float64 for float32 and the like: the same numbers
        in_memory = isinstance(array, np.ndarray) and not isinstance(array, np.memmap)
        if isinstance(array, Fetched):
            array = replace(array, dtype=want)
        else:
            with np.errstate(over="ignore"):  # looked for below
                array = array.astype(want) if in_memory else Converted(array.shape, want, array)
    try:
        spec.check(array, source=source)
    except SignatureError:
        if array.ndim and array.shape[1:] == tuple(spec.shape[1:]) and not len(array):
            raise DatasetError(f"{source} is empty", why="it holds no samples", mend=_MEND) from None
        raise
    looked_at = 0 if isinstance(array, Fetched) else len(array)  # what is made when asked for is, in training
    whole = range(0, looked_at, 1024)
    tell = listener()
    tell(0, looked_at, LOOKED_AT)
    for at in whole if given is not array or want.kind == "f" else ():
        if given is not array:
            refuse_unfit(given[at : at + 1024], want, spec.name, source)
        if want.kind == "f" and not np.isfinite(array[at : at + 1024]).all():
            raise DatasetError(
                f"{source} holds NaN or infinite values",
                why=f"in the array of the input {spec.name!r}",
                mend="find where they come from, or drop those samples",
            )
        tell(min(at + 1024, looked_at), looked_at, LOOKED_AT)
    return array


_Found = tuple[dict[str, Any], str | Callable[[], str], tuple[int, ...], Fetcher | None]


def _is_made(path: Path) -> bool:
    """Whether a folder was made by `reading.arrays_of`, in a process that lives. One that anybody else has brought may
    have the same files in it, which then say nothing: a folder of data holds numbers.
    """
    return is_held(path.parent.parent, SCRATCH)


def _called(source: str) -> str:
    """What the user calls a source: of a folder that was made of one, that one."""
    if not _is_made(Path(source)):
        return source
    try:
        return read_text(Path(source) / MADE_OF)
    except (OSError, ValueError):
        return source


def _read(place: str, source: str, signature: Signature) -> _Found:
    """What lies at a place, which the user calls `source`."""
    path = Path(place)
    if is_code(place):
        return _call(place, signature)
    try:
        if _is_made(path) and (path / INDEX).is_file():
            shape = signature.inputs[0].shape
            images = Images(path, channels=1 if len(shape) == 4 and shape[1] == 1 else 3)
            views, fetcher = _fetched(images, signature, source)
            return views, images.digest, (), fetcher
        # What it is known by comes before what is read of it: see `compress.storage.steady`.
        if path.is_dir():
            files = files_in(path, "*.npy") or files_in(path, "*.npz")
            listed(path, files)
            digest = _together(files)
            if files and files[0].suffix == ".npz":
                shards, starts = open_shards(path)
                return dict(shards), digest, starts, None
            return {file.stem: open_npy(file) for file in files}, digest, (), None
        if not path.is_file():
            raise DatasetError(f"can't read the data {source}", why="there is no such file", mend=_MEND)
        digest = seen(path, tell=listener())
        return {"": open_npy(path)} if path.suffix == ".npy" else dict(open_npz(path)), digest, (), None
    except NoFileError as err:
        mend = "take it away, or put the file itself in its place"
        raise DatasetError(f"can't read the data {source}", why=str(err), mend=mend) from err
    except (ValueError, OSError) as err:
        if isinstance(err, OSError) and err.errno:
            told = err.strerror or str(err)
            raise DatasetError(f"can't read the data {source}", why=told, mend=f"let it be read, or {_MEND}") from err
        why = f"it is not a whole .npz or .npy file ({err})"
        raise DatasetError(f"can't read the data {source}", why=why, mend=_MEND) from err


def _together(files: Sequence[Path]) -> str:
    """Of the names, which say whose input each is, and of what is in them."""
    told = json.dumps([[file.name, seen(file, tell=listener())] for file in files])
    return hashlib.sha256(told.encode()).hexdigest()


def _call(source: str, signature: Signature) -> _Found:
    mend = "it is to return a dict of arrays by input name, or a torch Dataset; run from the folder of its module"
    try:
        with user_code(source) as function, seeded(0):  # several processes must get the same
            given = function()
    except Exception as err:  # the user's function: anything may come out of it
        raise DatasetError(f"can't get data from {source}", why=f"{type(err).__name__}: {err}", mend=mend) from err
    if isinstance(given, Mapping):
        arrays = {str(name): np.asarray(array) for name, array in given.items()}
        return arrays, digest_of_arrays(arrays), (), None
    if not (hasattr(given, "__getitem__") and hasattr(given, "__len__")):
        raise DatasetError(f"can't get data from {source}", why=f"it gave a {type(given).__name__}", mend=mend)
    if not len(given):
        raise DatasetError(f"{source} is empty", why="it holds no samples", mend=mend)
    views, fetcher = _fetched(given, signature, source)
    return views, lambda: digest_of_samples(given, fetcher.made), (), fetcher


def _fetched(given: Any, signature: Signature, source: str) -> tuple[dict[str, Any], Fetcher]:
    """What stands for the arrays of a map-style dataset, and makes their samples."""
    with seeded(0):
        fetcher = Fetcher(given, [spec.name for spec in signature.inputs], source, _LABELS)
    views: dict[str, Rows] = {
        name: Fetched(shape, dtype, name, fetcher.rows) for name, (shape, dtype) in fetcher.specs.items()
    }
    return dict(views), fetcher
