"""Open .npy and .npz files of anybody's: what a header declares is compared with the bytes before any are read.

Arrays that lie in a file as they are become memory maps; others are unpacked once, into the array that is returned.
No objects: they would be pickles.

Source: numpy, "NEP 1 - A simple file format for NumPy arrays".
"""

from __future__ import annotations

import io
import math
import os
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compress.vetting.archive import Archive, Entry
from compress.vetting.files import open_file
from compress.vetting.memory import memory_left

__all__ = ["ArrayFileError", "Member", "check_stored", "members_of", "open_npy", "open_npz", "read_member"]

Array = np.ndarray[Any, Any]
MAX_HEADER = 16_384
MAX_TEXT = 4096
"""Bytes of one string: labels can be words."""
MAX_NAMES = 10_000
MAX_EMPTY = 1 << 24
"""Rows without values: as many as a header likes take no bytes, and who counts them never ends."""


class ArrayFileError(ValueError):
    """A file of arrays that is damaged, or declares what it can't hold; says what."""


@dataclass(frozen=True)
class Member:
    """An array of an .npz, of which only the header was read.

    Attributes:
        name: without ".npy".
        entry: where it lies in the archive.
        header: bytes before the numbers.
        shape, dtype, fortran: of the array; whether its first index is the fastest.
    """

    name: str
    entry: Entry
    header: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool

    @property
    def nbytes(self) -> int:
        """Of the numbers, unpacked."""
        return self.entry.size - self.header


def members_of(path: Path, text: int = MAX_TEXT) -> dict[str, Member]:
    """The arrays of an .npz by name; nothing but their headers is read.

    Args:
        path: of the .npz.
        text: bytes that one string may take.

    Raises:
        ValueError: no archive, a damaged or an ambiguous one, or one that holds what are no arrays of numbers.
        OSError: it can't be read.
    """
    with open_file(path) as file:
        archive = Archive(file)
        if len(archive.entries) > MAX_NAMES:
            raise ArrayFileError(f"it holds more arrays than {MAX_NAMES:,}")
        found = {}
        for name, entry in archive.entries.items():
            if not name.endswith(".npy"):
                raise ArrayFileError(f"it holds {name}, which is no array")
            start = b""
            for chunk in archive.chunks(entry):
                start += chunk[:MAX_HEADER]
                if len(start) >= MAX_HEADER:
                    break
            header, shape, fortran, dtype = _header(start, name, text)
            _fits(name, shape, dtype, entry.size - header)
            found[name.removesuffix(".npy")] = Member(name.removesuffix(".npy"), entry, header, shape, dtype, fortran)
    return found


def open_npz(path: Path, text: int = MAX_TEXT) -> dict[str, Array]:
    """All arrays of an .npz by name; checksums are compared.

    Args:
        path: of the .npz.
        text: bytes that one string may take.

    Raises:
        ValueError, OSError: as for `members_of`; or what is compressed would not fit into the memory that is left.
    """
    members = members_of(path, text)
    packed = sum(member.nbytes for member in members.values() if not member.entry.stored)
    if packed > (left := memory_left()):
        raise ArrayFileError(
            f"it unpacks to {packed / 2**30:,.1f} GiB, and {left / 2**30:,.1f} GiB of memory are left; np.savez writes "
            "it uncompressed, which is read from the disk"
        )
    return dict(_read(path, members))


def read_member(path: Path, member: Member, *, check: bool = True) -> Array:
    """One array: a memory map where it is stored as it is.

    Args:
        path: of the .npz.
        member: of it.
        check: compare the checksum of one that is mapped, which reads all of it; of another it always is.

    Raises:
        ValueError, OSError: as for `members_of`.
    """
    return dict(_read(path, {member.name: member}, check=check))[member.name]


def check_stored(path: Path, members: Mapping[str, Member]) -> None:
    """Compare the checksums of arrays that are stored as they are.

    Raises:
        ValueError, OSError: as for `members_of`.
    """
    for _ in _read(path, {name: member for name, member in members.items() if member.entry.stored}):
        pass


def _read(path: Path, members: Mapping[str, Member], *, check: bool = True) -> Iterator[tuple[str, Array]]:
    """Arrays by name. The directory is read once for all: there may be ten thousand."""
    with open_file(path) as file:
        archive = Archive(file)
        for name, member in members.items():
            if archive.entries.get(f"{member.name}.npy") != member.entry:
                raise ArrayFileError(f"{member.name} is another one than before: the file was changed meanwhile")
            if member.entry.stored:
                if check:
                    for _ in archive.chunks(member.entry):
                        pass
                at = member.entry.offset + member.header
                yield name, _lettered(member.name, _mapped(path, at, member.shape, member.dtype, member.fortran))
            else:
                yield name, _lettered(member.name, _unpacked(archive, member))


def _unpacked(archive: Archive, member: Member) -> Array:
    if member.nbytes > memory_left():
        raise ArrayFileError(f"{member.name} unpacks to {member.nbytes / 2**30:,.1f} GiB: more than memory is left")
    flat = np.empty(member.nbytes, np.uint8)
    at = -member.header
    for chunk in archive.chunks(member.entry):
        part = np.frombuffer(chunk, np.uint8)[max(0, -at) :]
        flat[max(at, 0) : max(at, 0) + len(part)] = part
        at += len(chunk)
    found: Array = flat.view(member.dtype).reshape(member.shape, order="F" if member.fortran else "C")
    return found


def open_npy(path: Path) -> Array:
    """The array of an .npy as a memory map.

    Raises:
        ValueError, OSError: as for `members_of`.
    """
    with open_file(path) as file:
        header, shape, fortran, dtype = _header(file.read(MAX_HEADER), path.name)
        _fits(path.name, shape, dtype, file.seek(0, os.SEEK_END) - header)
    return _lettered(path.name, _mapped(path, header, shape, dtype, fortran))


def _mapped(path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any], fortran: bool) -> Array:
    if not math.prod(shape):  # there is nothing to map
        return np.empty(shape, dtype)
    # Copied when written to: libraries want arrays that can be, and the file stays as it is.
    return np.memmap(path, dtype, "c", offset, shape, "F" if fortran else "C")


def _lettered(name: str, array: Array) -> Array:
    """The array, if the letters of its strings are some: Python makes no string of other numbers.

    Raises:
        ArrayFileError: one is none, or half of one that is written in two.
    """
    if array.dtype.kind == "U" and array.size:
        letters = array.ravel("K").view(f"{array.dtype.byteorder}u4")  # a view: no order is changed
        if letters.max() > sys.maxunicode or ((letters >= 0xD800) & (letters <= 0xDFFF)).any():
            raise ArrayFileError(f"{name} holds a string with a number in it that stands for no letter")
    return array


def _header(start: bytes, name: str, text: int = MAX_TEXT) -> tuple[int, tuple[int, ...], bool, np.dtype[Any]]:
    """Bytes of the header, shape, order and dtype."""
    file = io.BytesIO(start)
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ArrayFileError(f"{name} is written in version {version} of the format")
        read: Any = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except ArrayFileError:
        raise
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, OverflowError, tokenize.TokenError) as err:
        told = next(iter(str(err).splitlines()), "")[:200]
        raise ArrayFileError(f"the header of {name} is damaged: {told}") from err
    if dtype.kind not in "biufUS" or dtype.names is not None or (dtype.kind in "US" and dtype.itemsize > text):
        raise ArrayFileError(f"{name} is an array of {str(dtype)[:80]}, not of numbers")
    if not dtype.itemsize:  # as many as it likes would fit into no bytes
        raise ArrayFileError(f"{name} is an array of {dtype.str}, whose values have no size")
    if any(type(size) is not int or size < 0 for size in shape) or len(shape) > 32:
        raise ArrayFileError(f"{name} declares the shape {str(list(shape))[:80]}")
    return file.tell(), shape, bool(fortran), dtype


def _fits(name: str, shape: tuple[int, ...], dtype: np.dtype[Any], there: int) -> None:
    declared = math.prod(shape) * dtype.itemsize
    if not declared and max(shape) > MAX_EMPTY:
        raise ArrayFileError(f"{name} declares the shape {list(shape)}, and holds no value")
    if declared != there:
        raise ArrayFileError(f"{name} declares {declared:,} bytes ({dtype}{list(shape)}) and holds {there:,}")
