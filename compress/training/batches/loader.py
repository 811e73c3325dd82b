"""Batches for training: fetched, changed and laid out, beside the training where that pays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from compress.data.dataset import Dataset
from compress.errors import DatasetError, StageError
from compress.runtime.measure import cores
from compress.training.batches.augment import Augmentation

__all__ = ["Batch", "Loader", "example", "laid_out", "seed_of", "tensors_of", "workers_for"]

AHEAD = 4  # batches that each worker has ready


class Batch(NamedTuple):
    """Samples of a step, those of this process."""

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor | None
    places: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """On a device; from pinned memory without waiting."""
        if device.type == "cpu":
            return self
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}
        return Batch(inputs, None if self.labels is None else self.labels.to(device, non_blocking=True), self.places)

    def parts(self, count: int) -> list[Batch]:
        """So many parts, of nearly equal size."""
        if count <= 1:
            return [self]
        inputs = {name: tensor.tensor_split(count) for name, tensor in self.inputs.items()}
        labels = (None,) * count if self.labels is None else self.labels.tensor_split(count)
        return [
            Batch({name: chunks[n] for name, chunks in inputs.items()}, labels[n], part)
            for n, part in enumerate(self.places.tensor_split(count))
        ]


def tensors_of(data: Dataset, index: Any, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Samples and labels as tensors; what is random in those that a user's code makes follows from the seed."""
    arrays, labels = data.take(index, seed)
    writable = {name: array if array.flags.writeable else array.copy() for name, array in arrays.items()}
    tensors = {name: torch.from_numpy(array) for name, array in writable.items()}
    return tensors, None if labels is None else torch.from_numpy(np.array(labels))


def example(data: Dataset, size: int) -> Batch:
    """So many of the first samples, or as many more as fill the last call; again and again where they are too few."""
    places = np.arange(data.whole(size)) % len(data)
    return Batch(*tensors_of(data, places, 0), torch.from_numpy(places))


def workers_for(data: Dataset, device: torch.device, asked: int | None) -> int:
    """How many processes fetch samples, where it was not said.

    Arrays are read in no time, beside which handing them over costs more than it gains on a CPU; a user's own samples
    are code that runs for each.
    """
    if asked is not None:
        return asked
    made = data.fetcher is not None
    if device.type == "cpu":
        return min(4, cores() // 2) if made else 0
    return min(8 if made else 2, cores() - 1)


class _Failed(NamedTuple):
    """A batch that could not be had."""

    kind: type[DatasetError | StageError]
    what: str
    why: str
    mend: str


def _had(batch: Batch | _Failed) -> Batch:
    if isinstance(batch, _Failed):
        raise batch.kind(batch.what, why=batch.why, mend=batch.mend)
    return batch


class _Batches(TorchDataset["Batch | _Failed"]):
    def __init__(self, data: Dataset, augment: Augmentation | None, part: slice, channels_last: bool) -> None:
        self._data = data
        self._augment = augment
        self._part = part
        self._channels_last = channels_last

    def __getitem__(self, step: tuple[int, np.ndarray[Any, Any]]) -> Batch | _Failed:
        try:
            return self._batch(step)
        except (DatasetError, StageError) as err:  # from a worker process it would come as another error
            return _Failed(type(err), err.what, err.why, err.mend)

    def _batch(self, step: tuple[int, np.ndarray[Any, Any]]) -> Batch:
        seed, whole = step
        index = whole[self._part]
        inputs, labels = tensors_of(self._data, index, seed)
        if self._augment is not None:
            inputs = self._augment(inputs, torch.Generator().manual_seed(seed))
        if self._channels_last:
            inputs = laid_out(inputs)
        return Batch(inputs, labels, torch.from_numpy(index))


def laid_out(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Images channels-last, other tensors as they are."""
    return {
        name: tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
        for name, tensor in inputs.items()
    }  # fmt: skip


class _Order:
    """What the workers are to fetch, set anew for each epoch."""

    def __init__(self) -> None:
        self.steps: Sequence[tuple[int, np.ndarray[Any, Any]]] = ()

    def __iter__(self) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)


class Loader:
    """Gives the batches of an epoch; what is random in them follows from the seed and the step alone.

    Args:
        data: the samples.
        augment: changes them.
        seed: of the training.
        rank: of this process.
        world: processes that share each batch.
        workers: processes that fetch.
        pinned: whether batches go to a GPU.
        channels_last: whether images are laid out so.
    """

    def __init__(
        self,
        data: Dataset,
        augment: Augmentation | None,
        seed: int,
        *,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        pinned: bool = False,
        channels_last: bool = True,
    ) -> None:
        self._seed = seed
        self._rank = rank
        self._order = _Order()
        self._loader: DataLoader[Batch | _Failed] = DataLoader(
            _Batches(data, augment, slice(rank, None, world), channels_last),
            batch_size=None,
            sampler=self._order,
            num_workers=workers,
            prefetch_factor=AHEAD if workers else None,
            persistent_workers=workers > 0,
            pin_memory=pinned,
        )

    def batches(self, first_step: int, order: Sequence[np.ndarray[Any, Any]]) -> Iterator[Batch]:
        """The batches of these steps, of which the first has this number in the whole training."""
        self._order.steps = [
            (seed_of(self._seed, first_step + n, self._rank), index) for n, index in enumerate(order)
        ]  # fmt: skip
        return map(_had, self._loader)

    def close(self) -> None:
        """End the workers now.

        They are kept from epoch to epoch, and torch ends them when its iterator is collected: after an error that is
        much later, and takes five seconds for each. There is no public way.
        """
        if (running := getattr(self._loader, "_iterator", None)) is not None:
            running._shutdown_workers()


def seed_of(seed: int, step: int, rank: int = 0) -> int:
    """A seed for what is random in one step of one process."""
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0] >> np.uint64(1))
