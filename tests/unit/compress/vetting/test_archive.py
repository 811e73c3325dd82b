"""An archive is read if there is one way to understand it."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.vetting.archive import Archive, ArchiveError

TEXT = b"some text that compresses, compresses, compresses"


def zipped(kind: int = zipfile.ZIP_STORED, **files: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", kind) as archive:
        for name, content in (files or {"a": TEXT, "b": TEXT[::-1]}).items():
            archive.writestr(name, content)
    return out.getvalue()


def contents(data: bytes) -> dict[str, bytes]:
    archive = Archive(io.BytesIO(data))
    return {name: archive.read(entry, 1 << 30) for name, entry in archive.entries.items()}


def by_torch() -> bytes:
    out = io.BytesIO()
    torch.save({"a": torch.arange(3)}, out)
    return out.getvalue()


def by_numpy() -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, x=np.zeros((1000, 1000)))
    return out.getvalue()


@pytest.mark.parametrize(
    "data",
    [zipped(), zipped(zipfile.ZIP_DEFLATED), by_torch(), by_numpy(), zipped(a=b"")],
    ids=["stored", "deflated", "torch", "numpy", "empty"],
)
def test_what_writers_write_is_read_as_python_reads_it(data: bytes) -> None:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert contents(data) == {name: archive.read(name) for name in archive.namelist()}


def edited(data: bytes, sign: bytes, at: int, value: bytes) -> bytes:
    """Other bytes in the first header of a kind."""
    start = data.index(sign) + at
    return data[:start] + value + data[start + len(value) :]


def twice() -> bytes:
    return zipped(a=TEXT, b=TEXT).replace(b"b", b"a")


def lying(size: int) -> bytes:
    data = edited(zipped(zipfile.ZIP_DEFLATED, a=bytes(5000)), b"PK\1\2", 24, struct.pack("<L", size))
    return edited(data, b"PK\3\4", 22, struct.pack("<L", size))


HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no archive": lambda: b"x" * 100,
    "cut": lambda: zipped()[:-10],
    "two entries of a name": twice,
    "data before it": lambda: b"#!/bin/sh\n" + zipped(),
    "data behind it": lambda: zipped() + b"x",
    "a comment": lambda: zipped()[:-2] + b"\1\0x",
    "another name in the local header": lambda: zipped().replace(b"a", b"c", 1),
    "another size in the local header": lambda: edited(zipped(), b"PK\3\4", 22, b"\1"),
    "another checksum in the local header": lambda: edited(zipped(), b"PK\3\4", 14, b"\1\2\3\4"),
    "another method in the local header": lambda: edited(zipped(), b"PK\3\4", 8, b"\10"),
    "encrypted": lambda: edited(edited(zipped(), b"PK\3\4", 6, b"\1"), b"PK\1\2", 8, b"\1"),
    "a method that few readers know": lambda: zipped(zipfile.ZIP_LZMA),
    "an offset of another entry": lambda: edited(zipped(a=TEXT, b=TEXT), b"PK\1\2", 42, b"\x50"),
    "a part of several archives": lambda: edited(zipped(), b"PK\5\6", 4, b"\1"),
    "fewer entries than there are": lambda: edited(zipped(), b"PK\5\6", 8, b"\1\0\1\0"),
    "more entries than there are": lambda: edited(zipped(), b"PK\5\6", 8, b"\3\0\3\0"),
    "saturated without a zip64 field": lambda: edited(zipped(), b"PK\1\2", 24, b"\xff" * 4),
    "a zip64 directory that says otherwise": lambda: edited(by_torch(), b"PK\6\6", 24, b"\x63"),
    "a zip64 directory elsewhere": lambda: edited(by_torch(), b"PK\6\7", 8, b"\7"),
    "a wrong checksum": lambda: zipped().replace(TEXT, TEXT.replace(b"text", b"lext")),
    "a ratio that deflate can't have": lambda: lying(2**31),
    "more than it declares": lambda: lying(100),
    "less than it declares": lambda: lying(20_000),
    "an absolute name": lambda: zipped(zipfile.ZIP_STORED, **{"/a": TEXT}),
    "a name that goes up": lambda: zipped(zipfile.ZIP_STORED, **{"a/../../b": TEXT}),
    "a folder": lambda: zipped(zipfile.ZIP_STORED, **{"a/": b""}),
    "a name with a control character": lambda: zipped(zipfile.ZIP_STORED, **{"a\x1b[2J": TEXT}),
    "a name of another system": lambda: zipped(zipfile.ZIP_STORED, **{"a\\b": TEXT}),
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
def test_what_readers_could_understand_differently_is_refused(make: Callable[[], bytes]) -> None:
    with pytest.raises(ArchiveError):
        contents(make())


def test_an_entry_larger_than_it_may_be_is_not_read() -> None:
    archive = Archive(io.BytesIO(zipped(a=bytes(100))))
    with pytest.raises(ArchiveError, match="never meant"):
        archive.read(archive.entries["a"], 99)


@given(kind=st.sampled_from(["zip", "deflated", "torch", "numpy"]), data=st.data())
def test_a_changed_archive_is_refused_or_read_as_python_reads_it(kind: str, data: st.DataObject) -> None:
    makers = {"zip": zipped, "deflated": lambda: zipped(zipfile.ZIP_DEFLATED), "torch": by_torch, "numpy": by_numpy}
    whole = bytearray(makers[kind]())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1) | st.integers(max(0, len(whole) - 200), len(whole) - 1))
        whole[at] = data.draw(st.sampled_from([0, 1, 0xFF, 0x80]) | st.integers(0, 255))
    try:
        found = contents(bytes(whole))
    except ArchiveError:
        return
    try:
        with zipfile.ZipFile(io.BytesIO(bytes(whole))) as archive:
            theirs = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError):
        return  # Python refuses versions and dates that mean nothing here
    assert found == theirs


def test_an_entry_behind_four_gigabytes_is_read_as_pytorch_writes_it() -> None:
    """Its local header has sizes of 0, which stand behind the data, and a zip64 field with the entry's place."""
    crc, size = zlib.crc32(TEXT), len(TEXT)
    wide = struct.pack("<2HQ", 1, 8, 1 << 33)
    local = struct.pack("<4s5H3L2H", b"PK\3\4", 0, 0x0808, 0, 0, 0, 0, 0, 0, 1, len(wide)) + b"a" + wide
    behind = struct.pack("<4s3L", b"PK\7\x08", crc, size, size)
    central = struct.pack("<4s6H3L5H2L", b"PK\1\2", 0, 0, 0x0808, 0, 0, 0, crc, size, size, 1, 0, 0, 0, 0, 0, 0) + b"a"
    start = len(local) + size + len(behind)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(central), start, 0)
    assert contents(local + TEXT + behind + central + end) == {"a": TEXT}
