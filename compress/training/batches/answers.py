"""The original's answers, computed once: without random changes they are the same in every epoch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compress.storage.file_names import file_name
from compress.training.batches.loader import Batch, laid_out, tensors_of
from compress.training.machine.sharded import is_sharded
from compress.training.task import Task
from compress.training.trial import SECONDS
from compress.vetting.arrays import open_npy
from compress.vetting.replace import replace_file
from compress.vetting.texts import read_json

__all__ = ["Answers"]

LARGEST = 2 << 30  # bytes of answers, on disk and in the page cache
BATCH = 256
NOTED_EVERY = 5.0  # seconds
Answer = Callable[[Batch], Mapping[str, torch.Tensor]]
Progress = Callable[[int, int, str], None]
Shapes = Mapping[str, tuple[int, ...]]


class Answers:
    """A table of answers by output name, [samples, …] in float32.

    Args:
        task: says where it is kept; without a folder, in memory.
        shapes: of one sample's answers.
        answer: by the original, of a batch.
        fabric: each of its processes computes a part.
        progress: is told of samples.

    Attributes:
        seconds: that it took.
        share: of the answers that were to be computed, those that were; less than 1 in a trial alone.
    """

    def __init__(self, task: Task, shapes: Shapes, answer: Answer, fabric: Any, progress: Progress) -> None:
        start = time.perf_counter()
        self._count = len(task.data)
        folder = task.folder if task.among is None else task.among.folder
        self._folder = folder if fabric.world_size == 1 else None
        self._tables: dict[str, np.ndarray[Any, Any]] = {}
        noted = self._noted(shapes)
        for name, shape in shapes.items():
            self._tables[name] = self._table(name, shape, anew=noted == 0)
        told = time.monotonic()
        done = 0
        starts = range(noted, self._count, BATCH)
        for at in starts[fabric.global_rank :: fabric.world_size]:
            for name, tensor in answer(_batch(task, at, min(at + BATCH, self._count))).items():
                if name in self._tables:
                    self._tables[name][at : at + BATCH] = tensor.float().cpu().numpy()
            done += min(BATCH, self._count - at)
            progress(min(at + BATCH, self._count), self._count, "the original's answers")
            if task.trial and time.perf_counter() - start > SECONDS:  # what was not asked for stays 0
                break
            if self._folder is not None and time.monotonic() - told > NOTED_EVERY:
                told = time.monotonic()
                self._note(at + BATCH)
        if self._folder is not None:
            self._note(self._count)
        if fabric.world_size > 1:
            self._tables = {
                name: fabric.all_reduce(torch.from_numpy(table), reduce_op="sum").cpu().numpy()
                for name, table in self._tables.items()
            }
        self.seconds = time.perf_counter() - start
        self.share = min(1.0, done * fabric.world_size / max(1, self._count - noted))  # of what there was to ask for

    @classmethod
    def where_they_pay(cls, task: Task, answer: Answer, fabric: Any, progress: Progress) -> Answers | None:
        """Those of a training with a second epoch for which they are the same, and with room for them; else None."""
        options = task.options
        fetched = task.data.fetcher is not None
        if task.teacher is None or options.epochs < 2 or options.augment or options.feature_weight or fetched:
            return None
        if is_sharded(task.teacher):  # no process can ask it alone
            return None
        shapes = _shapes(task, answer)
        if not shapes or sum(4 * len(task.data) * int(np.prod(shape)) for shape in shapes.values()) > LARGEST:
            return None
        return cls(task, shapes, answer, fabric, progress)

    def of(self, index: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
        """Those to samples, by output name."""
        rows = index.numpy()
        return {name: torch.from_numpy(table[rows]).to(device) for name, table in self._tables.items()}

    def drop(self) -> None:
        """The training is through."""
        self._tables = {}
        if self._folder is not None:
            for path in self._folder.glob("answers.*"):
                path.unlink()

    def _table(self, name: str, shape: tuple[int, ...], *, anew: bool) -> np.ndarray[Any, Any]:
        if self._folder is None:
            return np.zeros((self._count, *shape), np.float32)
        mode: Any = "w+" if anew else "r+"
        path = self._file(name)
        if anew:
            path.unlink(missing_ok=True)  # it may be a link
        table: np.ndarray[Any, Any] = np.lib.format.open_memmap(path, mode, np.float32, (self._count, *shape))
        return table

    def _noted(self, shapes: Shapes) -> int:
        """How many samples an interrupted run had answered."""
        if self._folder is None:
            return 0
        try:
            noted = read_json(self._folder / "answers.json")
            whole = all(self._whole(self._file(name), (self._count, *shape)) for name, shape in shapes.items())
        except (OSError, ValueError):
            return 0
        return noted if whole and type(noted) is int and 0 <= noted <= self._count else 0

    def _file(self, name: str) -> Path:
        assert self._folder is not None  # noqa: S101  the caller looked
        return self._folder / f"answers.{file_name(name)}.npy"

    @staticmethod
    def _whole(path: Path, shape: tuple[int, ...]) -> bool:
        """Whether a table is one that was written here: its own file, of these numbers."""
        if path.is_symlink():
            return False
        table = open_npy(path)
        return table.shape == shape and table.dtype == np.float32 and bool(np.isfinite(table).all())

    def _note(self, done: int) -> None:
        assert self._folder is not None  # noqa: S101  the caller looked
        for table in self._tables.values():
            table.flush()  # type: ignore[attr-defined]
        replace_file(self._folder / "answers.json", str(done))


def _batch(task: Task, start: int, stop: int) -> Batch:
    inputs, _ = tensors_of(task.data, slice(start, stop), start)
    if task.options.channels_last:
        inputs = laid_out(inputs)
    return Batch(inputs, None, torch.arange(start, stop))


def _shapes(task: Task, answer: Answer) -> Shapes:
    """Of one sample, by output name; none where an output has no batch."""
    two = answer(_batch(task, 0, min(2, len(task.data))))
    floats = {name: tuple(tensor.shape) for name, tensor in two.items() if tensor.is_floating_point()}
    count = min(2, len(task.data))
    batched = all(shape[:1] == (count,) for shape in floats.values())
    return {name: shape[1:] for name, shape in floats.items()} if batched else {}
