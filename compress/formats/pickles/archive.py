"""The bytes of a torch.save file: its pickle, and its storages mapped from the disk.

A zip is looked through before anything of it is used (`compress.vetting.archive`), and every entry is stored plain and
has the checksum that the directory says. So no declared size is larger than the bytes that are there, and memory that
is read is memory that the file holds.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, BinaryIO

import torch

from compress.console.wording import counted
from compress.vetting.archive import Archive, ArchiveError

__all__ = ["DamagedError", "LegacyStorages", "OtherTensorError", "ZipStorages", "view_of"]

LARGEST_PICKLE = 16 << 20
"""Bytes: a state_dict of 10,000 tensors has 2 MB; each byte can become 70 bytes of Python objects."""

_DIMENSIONS = 64
_EXPANDED = 1 << 20  # numbers that one number may stand for


class DamagedError(Exception):
    """The file is not what torch.save writes."""


class OtherTensorError(DamagedError):
    """A tensor of it is sparse, quantized, or of another kind that is not plain."""


class ZipStorages:
    """A torch.save zip.

    Args:
        path: the file; it has to stay as it is while its tensors are used, which are mapped copy-on-write.

    Attributes:
        pickle: the bytes of data.pkl.
        size: bytes of the file.

    Raises:
        DamagedError: anything of it is not as torch.save writes it.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            try:
                self._spans = _spans(file)
            except ArchiveError as err:
                raise DamagedError(str(err)) from err
        self.size = len(self._bytes)
        if self._spans.get("byteorder") is not None and self._read("byteorder", 16) != b"little":
            raise DamagedError("its numbers are big-endian")
        if "data.pkl" not in self._spans:
            raise DamagedError("it is a zip archive without a data.pkl")
        self.pickle = self._read("data.pkl", LARGEST_PICKLE)
        self._made: dict[str, torch.Tensor] = {}

    def _read(self, name: str, limit: int) -> bytes:
        start, size = self._spans[name]
        if size > limit:
            raise DamagedError(f"its {name} has {size:,} bytes, more than {limit:,}")
        return self._bytes[start : start + size]

    def __call__(self, key: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """A storage as a tensor [numel]; the same key gives the same memory."""
        start, size = self._spans.get(f"data/{key}", (0, -1))
        if numel * dtype.itemsize > size:
            raise DamagedError(f"its storage {key!r} is said to have {numel:,} numbers and has {max(size, 0):,} bytes")
        if key not in self._made:
            self._made[key] = _numbers(self._bytes, start, size)
        return self._made[key][: numel * dtype.itemsize].view(dtype)


class LegacyStorages:
    """A file from before PyTorch 1.6: pickles, then storages one after the other.

    Args:
        size: bytes of the file, more than which no storages can have together.
    """

    def __init__(self, size: int) -> None:
        self.size = self._left = size
        self._made: dict[str, torch.Tensor] = {}

    def __call__(self, key: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """A storage as a tensor [numel], whose bytes `fill` reads later."""
        if key not in self._made:
            self._left -= numel * dtype.itemsize
            if self._left < 0:
                raise DamagedError("its storages are said to be larger than the file")
            self._made[key] = torch.zeros(numel, dtype=dtype)
        if self._made[key].dtype != dtype or self._made[key].numel() != numel:
            raise DamagedError(f"its storage {key!r} is described in two ways")
        return self._made[key]

    def fill(self, keys: Any, file: BinaryIO) -> None:
        """Read each storage, in the order that the file names them."""
        if type(keys) is not list or sorted(map(str, keys)) != sorted(self._made):
            raise DamagedError("its list of storages is not that of its tensors")
        for key in keys:
            numbers = self._made[key].view(torch.uint8).numpy()
            count, size = file.read(8), file.readinto(numbers) if len(numbers) else 0  # type: ignore[attr-defined]
            if count != struct.pack("<q", self._made[key].numel()) or size != len(numbers):
                raise DamagedError("it is truncated, or its storages are of other sizes than its tensors say")


def view_of(memory: torch.Tensor, offset: Any, size: Any, stride: Any) -> torch.Tensor:
    """A tensor of these sizes and strides (in numbers) in a storage [numel].

    Raises:
        DamagedError: they reach beyond the storage, or show far more than it holds.
    """
    numbers = [offset, *size, *stride]
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
        raise DamagedError("a tensor of it has sizes that can't be")
    if not len(size) == len(stride) <= _DIMENSIONS:
        raise DamagedError(
            f"a tensor of it has {counted(len(size), 'dimensions')} and {counted(len(stride), 'strides')}"
        )
    numel = math.prod(size)
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True)) if numel else offset
    if last >= memory.numel() + (numel == 0) or numel > max(memory.numel(), _EXPANDED):
        raise DamagedError(f"a tensor of the sizes {list(size)[:8]} is beyond its storage of {memory.numel():,}")
    return memory.as_strided(size, stride, offset)


def _numbers(buffer: mmap.mmap, start: int, size: int) -> torch.Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    if start % 16:  # written by another tool: torch aligns
        return torch.frombuffer(bytearray(buffer[start : start + size]), dtype=torch.uint8)
    return torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=start)


def _spans(file: BinaryIO) -> dict[str, tuple[int, int]]:
    """Where each entry's bytes are, (start, size), by its name without the archive's own folder."""
    archive = Archive(file)
    if len({name.partition("/")[0] for name in archive.entries}) > 1:
        raise DamagedError("its entries are in several folders, where torch.save writes one")
    spans: dict[str, tuple[int, int]] = {}
    for name, entry in archive.entries.items():
        if not entry.stored:
            raise DamagedError(f"its entry {name[:80]!r} is compressed: torch.save stores it plain")
        for _ in archive.chunks(entry):  # compares the checksum
            pass
        spans[name.partition("/")[2]] = entry.offset, entry.size
    return spans
