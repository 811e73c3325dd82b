"""Files of arrays declare no more than they hold, and are in memory once."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.data.sources import open_shards
from compress.errors import DatasetError
from compress.vetting import arrays
from compress.vetting.archive import Archive
from compress.vetting.arrays import ArrayFileError, open_npy, open_npz

X = np.arange(600, dtype=np.float32).reshape(200, 3)
ONE = Signature((TensorSpec("x", "float32", ("batch", 3)),), ())


def npy(array: np.ndarray[Any, Any], **header: Any) -> bytes:
    """An .npy whose header says something else."""
    file = io.BytesIO()
    told = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape} | header
    np.lib.format.write_array_header_1_0(file, told)
    return file.getvalue() + array.tobytes()


def npz(path: Path, kind: int = zipfile.ZIP_STORED, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def damaged(content: bytes) -> bytes:
    """One byte of the numbers is another one; the checksum is as it was."""
    at = content.index(X.tobytes()[400:440])
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@given(
    array=st_numpy.arrays(
        st.sampled_from([np.dtype(kind) for kind in ("f4", "i8", "u1", "?", "<U5", "f2")]),
        st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    ),
    packed=st.booleans(),
    fortran=st.booleans(),
)
def test_what_numpy_wrote_is_read(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray[Any, Any], packed: bool, fortran: bool
) -> None:
    path = tmp_path_factory.mktemp("arrays") / "a.npz"
    array = np.asfortranarray(array) if fortran else array
    (np.savez_compressed if packed else np.savez)(path, first=array, second=X)
    found = open_npz(path)
    assert list(found) == ["first", "second"]
    assert found["first"].dtype == array.dtype
    assert np.array_equal(found["first"], array, equal_nan=array.dtype.kind == "f")
    assert np.array_equal(found["second"], X)
    np.save(path.with_suffix(".npy"), array)
    assert np.array_equal(open_npy(path.with_suffix(".npy")), array, equal_nan=array.dtype.kind == "f")


def test_stored_arrays_are_mapped_and_can_be_written_to_without_changing_the_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X)
    mapped = open_npz(tmp_path / "a.npz")["x"]
    assert isinstance(mapped, np.memmap)
    mapped[:] = 0
    assert np.array_equal(open_npz(tmp_path / "a.npz")["x"], X)


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a petabyte": (lambda path: npz(path, x=npy(X, shape=(2**50, 3))), "declares"),
    "a petabyte, compressed": (lambda path: npz(path, zipfile.ZIP_DEFLATED, x=npy(X, shape=(2**50, 3))), "declares"),
    "an overflow of 64 bits": (lambda path: npz(path, x=npy(X, shape=(2**62, 8))), "declares"),
    "a negative size": (lambda path: npz(path, x=npy(X, shape=(-200, -3))), "shape"),
    "no integer as size": (lambda path: npz(path, x=npy(X, shape=(200.0, 3))), "header"),
    "true as size": (lambda path: npz(path, x=npy(X[:1], shape=(True, 3))), "shape"),
    "fewer bytes": (lambda path: npz(path, x=npy(X)[:-1]), "declares"),
    "more bytes": (lambda path: npz(path, x=npy(X) + b"0"), "declares"),
    "objects": (lambda path: npz(path, x=npy(X, descr="|O")), "not of numbers"),
    "records": (lambda path: npz(path, x=npy(X, descr=[("a", "<f4")])), "not of numbers"),
    "objects in records": (lambda path: npz(path, x=npy(X, descr=[("a", "|O")])), "not of numbers"),
    "raw bytes": (lambda path: npz(path, x=npy(X, descr="|V4")), "not of numbers"),
    "dates": (lambda path: npz(path, x=npy(X, descr="<M8[s]")), "not of numbers"),
    "long strings": (lambda path: npz(path, x=npy(X, descr="<U100000")), "not of numbers"),
    "code as header": (lambda path: npz(path, x=npy(X).replace(b"False", b"F()  ")), "header"),
    "a deep header": (lambda path: npz(path, x=b"\x93NUMPY\1\0" + b"\x10\x27" + b"(" * 10000), "header"),
    "a long header": (lambda path: npz(path, x=b"\x93NUMPY\2\0" + b"\xff\xff\xff\x7f" + b" " * 70000), "header"),
    "no array": (lambda path: npz(path, x=b"text"), "header"),
    "nothing in a member": (lambda path: npz(path, x=b""), "header"),
    "a wrong checksum": (lambda path: path.write_bytes(damaged(npz(path, x=npy(X)).read_bytes())), "checksum"),
    "a wrong checksum, compressed": (
        lambda path: path.write_bytes(
            npz(path, zipfile.ZIP_DEFLATED, x=npy(X)).read_bytes().replace((zip_crc := crc(path)), zip_crc[::-1])
        ),
        "checksum",
    ),
}  # fmt: skip


def crc(path: Path) -> bytes:
    return zipfile.ZipFile(path).infolist()[0].CRC.to_bytes(4, "little")


@pytest.mark.parametrize(("write", "says"), HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("folder", [False, True])
def test_what_can_not_be_is_refused_before_any_work(
    tmp_path: Path, write: Callable[[Path], Any], says: str, folder: bool
) -> None:
    write(tmp_path / "a.npz")
    with pytest.raises(DatasetError) as caught:
        Dataset.open(str(tmp_path if folder else tmp_path / "a.npz"), ONE)
    assert says in caught.value.why


@pytest.mark.parametrize("folder", [False, True])
def test_more_than_the_memory_that_is_left_is_refused(
    tmp_path: Path, folder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((100_000, 3), np.float32))
    monkeypatch.setattr("compress.vetting.arrays.memory_left", lambda: 1_000_000)
    with pytest.raises(DatasetError, match="GiB"):
        np.asarray(Dataset.open(str(tmp_path if folder else tmp_path / "a.npz"), ONE).inputs["x"][:])


@pytest.mark.parametrize("kind", ["<U0", "|S0"])
def test_values_without_a_size_are_refused_however_many(tmp_path: Path, kind: str) -> None:
    for shape in ((3,), (64, 2**40)):
        out = io.BytesIO()
        np.lib.format.write_array_header_1_0(out, {"descr": kind, "fortran_order": False, "shape": shape})
        path = tmp_path / "x.npz"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", out.getvalue())
        with pytest.raises(ArrayFileError, match="no size"):
            open_npz(path)


@pytest.mark.parametrize("number", [0xD800, 0xDFFF, 0x110000, 0x7FFFFFFF, 0xFFFFFFFF], ids=hex)
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("packed", [False, True])
def test_strings_are_made_of_letters(tmp_path: Path, number: int, order: str, packed: bool) -> None:
    """numpy makes a Python string of any numbers, and Python's own errors of those that are no letters are no ValueError."""
    bad = np.array([[97, number], [98, 99]], f"{order}u4").view(f"{order}U1")
    good = np.asfortranarray(np.array([["a", "é"], ["\U0010ffff", "\ue000"]], f"{order}U1"))
    for name, array in (("bad", bad), ("turned", np.asfortranarray(bad)), ("good", good)):
        path = tmp_path / f"{name}.npz"
        (np.savez_compressed if packed else np.savez)(path, label=array)
        np.save(tmp_path / f"{name}.npy", array)
        if name == "good":
            assert open_npz(path)["label"].tolist() == open_npy(path.with_suffix(".npy")).tolist() == good.tolist()
            continue
        for opened in (lambda path=path: open_npz(path), lambda path=path: open_npy(path.with_suffix(".npy"))):
            with pytest.raises(ArrayFileError, match="stands for no letter"):
                opened()


def test_the_directory_of_many_arrays_is_read_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each array made ten thousand of them, in a megabyte, take half an hour."""
    count = 300
    read = 0

    class Counted(Archive):
        def __init__(self, file: Any) -> None:
            nonlocal read
            read += 1
            super().__init__(file)

    monkeypatch.setattr(arrays, "Archive", Counted)
    path = tmp_path / "a.npz"
    np.savez(path, **{f"a{at}": np.full((2, 3), at, np.float32) for at in range(count)})  # type: ignore[arg-type]
    found = open_npz(path)
    assert [found[f"a{at}"][0, 0] for at in range(count)] == [*range(count)]
    (tmp_path / "folder").mkdir()
    path.rename(tmp_path / "folder" / "a.npz")
    assert len(open_shards(tmp_path / "folder")[0]) == count
    assert read < 6
