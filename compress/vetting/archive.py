"""Read a zip archive in which there is one way to understand it: for torch.save files, .pt2 and .npz from elsewhere.

Readers of zip files disagree where an archive contradicts itself (two entries of a name, a local header that differs
from the central directory, data before the first entry, saturated fields). Such archives are refused here, so that what
was checked is what a library reads. Nothing is decompressed on the word of a header: what an entry gives is bounded by
what it declares, and what it declares by what deflate can hold in its bytes.

Source: PKWARE APPNOTE 6.3.10, sections 4.3.7 (local header), 4.3.12 (central directory), 4.3.14 to 4.3.16 (its end).
"""

from __future__ import annotations

import io
import itertools
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

__all__ = ["Archive", "ArchiveError", "Entry"]

CHUNK = 1 << 20
# A model of 10,000 tensors has as many entries, and 1 MB of names; each entry takes 500 bytes of memory.
MAX_ENTRIES, MAX_DIRECTORY = 200_000, 64 << 20
# Deflate's longest match is 258 bytes, which takes two bits at least: 1032 bytes out of one.
MAX_RATIO = 1032
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_STORED, _DEFLATED = 0, 8
# Sizes behind the data, names in UTF-8, and the two bits that say how hard deflate tried.
_FLAGS = 0x0008 | 0x0800 | 0x0006


class ArchiveError(ValueError):
    """An archive that is damaged, or can be understood in more than one way."""


@dataclass(frozen=True)
class Entry:
    """One file of an archive.

    Attributes:
        name: with "/" between its parts; relative, without "..".
        offset: where its bytes begin in the archive.
        size: in bytes, unpacked.
        packed: in bytes, in the archive.
        crc: CRC-32 of the unpacked bytes.
        stored: whether it lies in the archive as it is.
    """

    name: str
    offset: int
    size: int
    packed: int
    crc: int
    stored: bool


class Archive:
    """The entries of an open file, by name, in the order of the directory.

    Raises:
        ArchiveError: the archive is damaged or ambiguous.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._length = file.seek(0, os.SEEK_END)
        count, start, size = self._directory()
        self.entries: dict[str, Entry] = {}
        taken: list[tuple[int, int]] = []
        directory = io.BytesIO(self._at(start, size))
        for _ in range(count):
            header, entry = self._entry(directory, start)
            if entry.name in self.entries:
                raise ArchiveError(f"it holds two entries named {entry.name!r}")
            self.entries[entry.name] = entry
            taken.append((header, entry.offset + entry.packed))
        if directory.read(1):
            raise ArchiveError("its directory holds more entries than it says")
        taken.sort()
        for (_, end), (begin, _) in itertools.pairwise([*taken, (start, 0)]):
            if end > begin:
                raise ArchiveError("its entries overlap")

    def chunks(self, entry: Entry) -> Iterator[bytes]:
        """The unpacked bytes of an entry, a mebibyte at a time; at the end its checksum is compared.

        Raises:
            ArchiveError: they are damaged, or more or fewer than declared.
        """
        left, given, crc = entry.packed, 0, 0
        inflate = None if entry.stored else zlib.decompressobj(-zlib.MAX_WBITS)
        at, waiting = entry.offset, b""
        while left or waiting:
            if not waiting:
                waiting = self._at(at, min(left, CHUNK))
                at, left = at + len(waiting), left - len(waiting)
            if inflate is None:
                chunk, waiting = waiting, b""
            else:
                try:
                    chunk = inflate.decompress(waiting, CHUNK)
                except zlib.error as err:
                    raise ArchiveError(f"{entry.name} is damaged: {err}") from err
                waiting = inflate.unconsumed_tail
                if inflate.eof and (left or waiting or inflate.unused_data):
                    raise ArchiveError(f"{entry.name} is damaged: bytes follow its end")
            given += len(chunk)
            if given > entry.size:
                raise ArchiveError(f"{entry.name} holds more than the {entry.size:,} bytes that it declares")
            crc = zlib.crc32(chunk, crc)
            if chunk:
                yield chunk
        if inflate is not None and not inflate.eof:
            for chunk in self._rest(inflate):
                given, crc = given + len(chunk), zlib.crc32(chunk, crc)
                if given > entry.size:
                    raise ArchiveError(f"{entry.name} holds more than the {entry.size:,} bytes that it declares")
                yield chunk
        if given != entry.size or (inflate is not None and not inflate.eof):
            raise ArchiveError(f"{entry.name} is truncated: {given:,} of {entry.size:,} bytes")
        if crc != entry.crc:
            raise ArchiveError(f"{entry.name} is damaged: its checksum (CRC-32) is another one")

    def read(self, entry: Entry, limit: int) -> bytes:
        """All bytes of an entry.

        Raises:
            ArchiveError: there are more than the limit, or they are damaged.
        """
        if entry.size > limit:
            raise ArchiveError(f"{entry.name} is {entry.size:,} bytes large; more than {limit:,} are never meant")
        return b"".join(self.chunks(entry))

    @staticmethod
    def _rest(inflate: zlib._Decompress) -> Iterator[bytes]:
        """What is unpacked already, but was not given for the bound on a chunk."""
        while chunk := inflate.decompress(b"", CHUNK):
            yield chunk

    def _at(self, offset: int, size: int) -> bytes:
        if offset < 0 or size < 0 or offset + size > self._length:
            raise ArchiveError("it is truncated, or a size in it is false")
        self._file.seek(offset)
        return self._file.read(size)

    def _directory(self) -> tuple[int, int, int]:
        """Entries, offset and size of the central directory."""
        end = self._length - _END.size
        if end < 0:
            raise ArchiveError("it is truncated: the archive's directory, at its end, is missing")
        sign, disk, first_disk, here, count, size, start, comment = _END.unpack(self._at(end, _END.size))
        if sign != b"PK\5\6" or comment:
            raise ArchiveError("it is truncated, or something follows the archive's directory")
        found = disk, first_disk, here, count, size, start
        locator = self._at(end - _LOCATOR64.size, _LOCATOR64.size) if end >= _LOCATOR64.size else b""
        if locator.startswith(b"PK\6\7"):  # PyTorch writes both directories' ends, also where one is enough
            end -= _LOCATOR64.size
            _, on, end64, disks = _LOCATOR64.unpack(locator)
            if on or disks != 1 or end64 + _END64.size != end:
                raise ArchiveError("its zip64 directory is not where it belongs")
            end = end64
            sign, length, _, _, *wide = _END64.unpack(self._at(end, _END64.size))
            full = (_FULL16, _FULL16, _FULL16, _FULL16, _FULL32, _FULL32)
            agree = all(small in (large, bound) for small, bound, large in zip(found, full, wide, strict=True))
            if sign != b"PK\6\6" or length != _END64.size - 12 or not agree:
                raise ArchiveError("its zip64 directory contradicts the other one")
            disk, first_disk, here, count, size, start = wide
        if disk or first_disk or here != count:
            raise ArchiveError("it is a part of an archive of several")
        if count > MAX_ENTRIES or size > MAX_DIRECTORY:
            raise ArchiveError(
                f"it says that it holds {count:,} of them: more than {MAX_ENTRIES:,} entries are never meant"
            )
        if start + size != end:
            raise ArchiveError("its directory is not where it says, or something stands before the archive")
        return count, start, size

    def _entry(self, directory: io.BytesIO, limit: int) -> tuple[int, Entry]:
        """The next entry of the directory, and where its local header begins."""
        head = directory.read(_CENTRAL.size)
        if len(head) != _CENTRAL.size:
            raise ArchiveError("its directory is truncated")
        sign, _, _, flags, method, _, _, crc, packed, size, names, extras, comments, disk, _, _, at = _CENTRAL.unpack(
            head
        )
        name, extra = directory.read(names), directory.read(extras)
        if sign != b"PK\1\2" or len(name) != names or len(extra) != extras:
            raise ArchiveError("its directory is damaged")
        size, packed, at = _wide(extra, size, packed, at)
        told = _plain(name)
        if comments or disk or flags & ~_FLAGS or method not in (_STORED, _DEFLATED):
            raise ArchiveError(f"{told} is encrypted, commented, or packed by another method than deflate")
        if (method == _STORED and size != packed) or size > MAX_RATIO * packed:
            raise ArchiveError(f"{told} declares {size:,} bytes, which its {packed:,} bytes can't hold")
        local = _LOCAL.unpack(self._at(at, _LOCAL.size))
        here_names, here_extras = local[9:]
        here_name = self._at(at + _LOCAL.size, here_names)
        here_extra = self._at(at + _LOCAL.size + here_names, here_extras)
        same = (local[0], local[2], local[3], here_name) == (b"PK\3\4", flags, method, name)
        # Where sizes stand behind the data, PyTorch leaves a zip64 field here that no size refers to.
        behind = flags & 8 and local[6:9] == (0, 0, 0)
        here_size, here_packed, _ = (0, 0, 0) if behind else _wide(here_extra, local[8], local[7], 0)
        if not same or not (behind or (local[6], here_packed, here_size) == (crc, packed, size)):
            raise ArchiveError(f"the header of {told} contradicts the archive's directory")
        offset = at + _LOCAL.size + here_names + here_extras
        if offset + packed > limit:
            raise ArchiveError(f"{told} reaches over the archive's directory")
        return at, Entry(told, offset, size, packed, crc, method == _STORED)


def _wide(extra: bytes, size: int, packed: int, at: int) -> tuple[int, int, int]:
    """The sizes and the offset, from the zip64 field where the header's own are saturated."""
    wanted = [value == _FULL32 for value in (size, packed, at)]
    fields, wide = io.BytesIO(extra), None
    while head := fields.read(4):
        # PyTorch pads with a field, whose length is its own; a field that is cut is no zip64 field.
        tag, length = struct.unpack("<2H", head) if len(head) == 4 else (0, 0)
        content = fields.read(length)
        if tag == 1:
            if wide is not None or len(content) != length:
                raise ArchiveError("it has an entry with two zip64 fields")
            wide = content
    if not any(wanted):
        if wide:
            raise ArchiveError("it has an entry with a zip64 field that nothing refers to")
        return size, packed, at
    if wide is None or len(wide) != 8 * sum(wanted):
        raise ArchiveError("it has an entry whose zip64 field is missing or of another length")
    values = iter(struct.unpack(f"<{sum(wanted)}Q", wide))
    size, packed, at = (next(values) if want else value for want, value in zip(wanted, (size, packed, at), strict=True))
    return size, packed, at


def _plain(name: bytes) -> str:
    try:
        told = name.decode("utf-8")
    except UnicodeDecodeError as err:
        raise ArchiveError("it holds an entry whose name is no text") from err
    parts = told.split("/")
    if not told.isprintable() or "\\" in told or any(part in ("", ".", "..") for part in parts):
        raise ArchiveError(f"it holds an entry named {told!r}: absolute, with '..', or no file")
    return told
