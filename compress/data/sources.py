"""Samples that need not fit into memory: shards of .npz files, and a user's own map-style Dataset.

Both behave as arrays of samples do: a shape, a dtype, a length, and rows by slice or by index.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from compress.console.wording import counted
from compress.data.made import Taught, fitting
from compress.data.seeds import seed_all, seeded
from compress.errors import DatasetError
from compress.storage.file_names import file_name
from compress.vetting.arrays import Member, check_stored, members_of, read_member
from compress.vetting.files import files_in

__all__ = ["Converted", "Fetched", "Fetcher", "Rows", "Shards", "open_shards"]

Array = np.ndarray[Any, Any]
KEPT = 2  # decompressed shards in memory at a time


class Rows(Protocol):
    """An array whose first dimension is the sample, or what behaves like one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Samples first."""

    @property
    def ndim(self) -> int:
        """Of the shape."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the rows."""

    def __len__(self) -> int:
        """Samples."""

    def __getitem__(self, index: Any) -> Any:
        """The rows at a slice or at an array of indices."""


@dataclass(frozen=True)
class _View:
    """What stands for an array [n, …] without being one."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[:], dtype)

    def __getitem__(self, index: Any) -> Array:
        raise NotImplementedError

    def _places(self, index: Any) -> Array:
        return np.arange(len(self))[index] if isinstance(index, slice) else np.asarray(index)


@dataclass(frozen=True)
class Converted(_View):
    """Rows that become another width when they are taken."""

    rows: Rows

    def __getitem__(self, index: Any) -> Array:
        return np.asarray(self.rows[index], self.dtype)


class _Files:
    """The .npz files of a folder: arrays stored as they are become memory maps, others are kept for a while."""

    def __init__(self, paths: Sequence[Path], members: Sequence[Mapping[str, Member]]) -> None:
        self._paths = paths
        self._members = members
        self._names = list(members[0])
        self._maps: dict[tuple[int, str], Array] = {}
        self._kept: OrderedDict[tuple[int, str], Array] = OrderedDict()

    def array(self, shard: int, name: str) -> Array:
        at = shard, name
        if at in self._maps:
            return self._maps[at]
        if at in self._kept:
            self._kept.move_to_end(at)
            return self._kept[at]
        path, member = self._paths[shard], self._members[shard][name]
        try:
            if member.entry.stored:  # its checksum was compared when the folder was opened
                self._maps[at] = read_member(path, member, check=False)
                return self._maps[at]
            while len(self._kept) >= KEPT * len(self._names):
                self._kept.popitem(last=False)
            self._kept[at] = read_member(path, member)
        except (OSError, ValueError) as err:
            raise DatasetError(
                f"can't read {name!r} of {path}",
                why=f"{type(err).__name__}: {err}",
                mend="write this shard again, or take it away",
            ) from err
        return self._kept[at]


@dataclass(frozen=True)
class Shards(_View):
    """One array over all files of a folder."""

    name: str
    starts: tuple[int, ...]
    files: _Files

    def __getitem__(self, index: Any) -> Array:
        places = self._places(index)
        shards = np.searchsorted(self.starts, places, side="right") - 1
        found = np.empty((len(places), *self.shape[1:]), self.dtype)
        for shard in np.unique(shards):
            here = shards == shard
            found[here] = self.files.array(int(shard), self.name)[places[here] - self.starts[shard]]
        return found


def open_shards(folder: Path) -> tuple[dict[str, Shards], tuple[int, ...]]:
    """The arrays of a folder of .npz files, by name; and where each file begins, if they are compressed.

    Raises:
        DatasetError: files of unlike arrays.
        ValueError, OSError: damaged ones.
    """
    paths = files_in(folder, "*.npz")
    members = [_samples_of(path) for path in paths]
    headers = [{name: (member.shape, member.dtype) for name, member in shard.items()} for shard in members]
    first = headers[0]
    for path, header in zip(paths, headers, strict=True):
        unlike = {name: (shape[1:], dtype) for name, (shape, dtype) in header.items()} != {
            name: (shape[1:], dtype) for name, (shape, dtype) in first.items()
        }
        if unlike or len({shape[0] for shape, _ in header.values()}) != 1:
            raise DatasetError(
                f"the shards in {folder} don't fit each other",
                why=f"{path.name} holds {_told(header)}; {paths[0].name} holds {_told(first)}",
                mend="give each .npz the same arrays, of the same dtype and shape but for the number of samples",
            )
    lengths = [next(iter(header.values()))[0][0] for header in headers]
    starts = tuple(int(start) for start in np.cumsum([0, *lengths])[:-1])
    for path, shard in zip(paths, members, strict=True):
        check_stored(path, shard)
    files = _Files(paths, members)
    total = sum(lengths)
    arrays = {name: Shards((total, *shape[1:]), dtype, name, starts, files) for name, (shape, dtype) in first.items()}
    stored = all(member.entry.stored for shard in members for member in shard.values())
    return arrays, () if stored else starts


def _told(header: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> str:
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (shape, dtype) in header.items())


def _samples_of(path: Path) -> dict[str, Member]:
    members = members_of(path)
    for name, member in members.items():
        if not member.shape:
            raise ValueError(f"{name} in {path.name} is no array of samples")
    if not members:
        raise ValueError(f"{path.name} holds no array")
    return members


class Fetcher:
    """A user's map-style dataset, whose samples are made when they are asked for.

    Args:
        samples: has `__len__` and `__getitem__`, which gives an input, inputs and a label as a tuple, or a dict.
        inputs: the names of the model's inputs, in order.
        source: where they came from, as the user wrote it.
        labels: what labels may be called; behind the inputs of a tuple, they have the first of these names that no
            input has.

    Attributes:
        specs: shape [n, …] and dtype of each array that is made. Of samples that have all of the model's inputs by
            name, these are the inputs and the labels.
        unused: names of what else such samples hold, as a time or a file's name: that may be anything, is never looked
            at, and may be another one each time.

    Raises:
        DatasetError: samples that are none of these.
    """

    def __init__(self, samples: Any, inputs: Sequence[str], source: str, labels: Sequence[str] = ("label",)) -> None:
        self._samples = samples
        self._inputs = inputs
        self._labels = labels
        self._source = source
        self._cached: dict[str, Array] = {}
        self._seen: Array | None = None  # which samples are in the cache
        self.unused: tuple[str, ...] = ()
        first = self._sample(0)
        self.specs = {name: ((len(samples), *value.shape), value.dtype) for name, value in first.items()}

    def __len__(self) -> int:
        return len(self._samples)

    def part(self, index: Array) -> Fetcher:
        """These samples alone."""
        return Fetcher(_Chosen(self._samples, index), self._inputs, self._source, self._labels)

    def numbers(self, index: Array) -> Array:
        """What the user's dataset calls the samples at an index."""
        samples = self._samples
        while isinstance(samples, _Chosen):
            samples, index = samples.samples, np.asarray(samples.index)[index]
        return index

    def unsteady(self, index: Array) -> list[int]:
        """What the user's dataset calls those that are made otherwise each time, as by a generator of its own."""
        first, again = self.made(index), self.made(index)
        unlike = np.zeros(len(index), np.bool_)
        for name, values in first.items():
            same = np.equal(values, again[name]) | ((values != values) & (again[name] != again[name]))
            unlike |= ~same.reshape(len(index), -1).all(axis=1)
        return [int(number) for number in self.numbers(index)[unlike]]

    def keep_in(self, folder: Path) -> None:
        """Write each sample to a folder when it is first made, and read it from there later."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, (shape, dtype) in self.specs.items():
            self._cached[name] = _kept(folder / f"{file_name(name)}.rows.npy", dtype, shape)
        self._seen = _kept(folder / "seen.npy", np.dtype(np.bool_), (len(self),))

    def rows(self, index: Array, seed: int | None = None) -> dict[str, Array]:
        """Samples at an index, by the names of inputs and `label`; of the seed, see `made`."""
        if self._seen is None:
            return self.made(index, seed)
        missing = np.unique(index[~self._seen[index]])
        if len(missing):
            for name, value in self.made(missing, seed).items():
                self._cached[name][missing] = fitting(value, self._cached[name].dtype, name, self._source)
            self._seen[missing] = True
        return {name: cached[index] for name, cached in self._cached.items()}

    def made(self, index: Array, seed: int | None = None) -> dict[str, Array]:
        """Samples at an index, made anew.

        Args:
            index: where they are.
            seed: what is random in them follows from it; None: in each from its number, whenever and beside whatever
                it is made.
        """
        numbers, samples = self.numbers(index).tolist(), []
        with seeded(0 if seed is None else seed):
            for place, number in zip(index.tolist(), numbers, strict=True):
                if seed is None:
                    seed_all(number)
                samples.append(self._sample(place))
        try:
            for name in {name for sample in samples for name in sample if name in self._labels} - self.specs.keys():
                raise ValueError(f"the first sample has no {name!r}, and others have one")
            return {name: np.stack([sample[name] for sample in samples]) for name in self.specs}
        except (KeyError, ValueError) as err:
            raise DatasetError(
                f"the samples of {self._source} are unlike each other",
                why=str(err),
                mend="give each sample the same arrays, of the same shape",
            ) from err

    def _sample(self, place: int) -> dict[str, Array]:
        try:
            given = self._samples[place]
            named = self._named(given)
            return {name: np.asarray(value) for name, value in named.items()}
        except DatasetError:
            raise
        except Exception as err:  # the user's dataset: anything may come out of it
            raise DatasetError(
                f"can't get sample {self.numbers(np.array([place]))[0]} of {self._source}",
                why=f"{type(err).__name__}: {err}",
                mend="mend its __getitem__",
            ) from err

    def _named(self, given: Any) -> dict[str, Any]:
        if isinstance(given, Mapping):
            named = {str(name): value for name, value in given.items()}
            if named.keys() >= set(self._inputs):
                used = {*self._inputs, *self._labels}
                self.unused = tuple(name for name in named if name not in used)
                return {name: value for name, value in named.items() if name in used}
            return named
        parts = list(given) if isinstance(given, tuple | list) else [given]
        if len(parts) not in (len(self._inputs), len(self._inputs) + 1):
            raise DatasetError(
                f"can't use the samples of {self._source}",
                why=f"one has {counted(len(parts), 'parts')}, the model {counted(len(self._inputs), 'inputs')}",
                mend="give (input, …, label), the inputs alone, or a dict by name",
            )
        name = next((name for name in self._labels if name not in self._inputs), None)
        if name is None and len(parts) > len(self._inputs):
            raise DatasetError(
                f"can't use the samples of {self._source}",
                why=f"one has a label, and the model's inputs have all names of labels: {', '.join(self._labels)}",
                mend="call one of the model's inputs otherwise",
            )
        return dict(zip([*self._inputs, name or ""], parts, strict=False))


def _kept(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    mode: Any = "r+" if path.exists() else "w+"
    mapped: Array = np.lib.format.open_memmap(path, mode, dtype, shape)
    return mapped


@dataclass(frozen=True)
class _Chosen:
    samples: Any
    index: Array

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, place: int) -> Any:
        return self.samples[int(self.index[place])]


@dataclass(frozen=True)
class Fetched(_View):
    """One of the arrays that a fetcher's samples make; of another shape, where that holds as many values.

    Attributes:
        name: of the array.
        fetch: makes the samples at an index.
        taught: what labels may be, where they are trained on.
    """

    name: str
    fetch: Callable[[Array], Mapping[str, Array]]
    taught: Taught | None = None

    def by(self, fetcher: Fetcher) -> Fetched:
        """The same array, of another fetcher's samples."""
        return replace(self, shape=(len(fetcher), *self.shape[1:]), fetch=fetcher.rows)

    def __getitem__(self, index: Any) -> Array:
        places = self._places(index)
        if len(places) == 0:
            return np.empty((0, *self.shape[1:]), self.dtype)
        parts = [self.fetch(part)[self.name] for part in np.array_split(places, -(-len(places) // 1024))]
        return self.shaped(np.concatenate(parts).astype(self.dtype, copy=False))

    def shaped(self, rows: Array) -> Array:
        """Rows of the fetcher in this array's shape."""
        return rows.reshape(len(rows), *self.shape[1:])
