"""Files of samples, for calibration, evaluation and training."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.hostile.build import attack
from tests.hostile.pickles import Runs

X = np.zeros((64, 4), np.float32)


def npy(array: np.ndarray[Any, Any] = X, body: bytes | None = None, **header: Any) -> bytes:
    out = io.BytesIO()
    told = {"descr": "<f4", "fortran_order": False, "shape": array.shape} | header
    np.lib.format.write_array_header_1_0(out, told)
    return out.getvalue() + (array.tobytes() if body is None else body)


def npz(path: Path, x: bytes, kind: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("x.npy", x)


@attack(".npz", "data")
def data_that_is_a_pickle(path: Path, canary: Path) -> None:
    npz(path, npy(descr="|O", shape=(1,), body=pickle.dumps([Runs(canary)])))


@attack(".npy", "data")
def array_that_is_a_pickle(path: Path, canary: Path) -> None:
    path.write_bytes(npy(descr="|O", shape=(1,), body=pickle.dumps([Runs(canary)])))


@attack(".npy", "data")
def bare_pickle_as_array(path: Path, canary: Path) -> None:
    path.write_bytes(pickle.dumps(Runs(canary)))


@attack(".npz", "data")
def bare_pickle_as_data(path: Path, canary: Path) -> None:
    path.write_bytes(pickle.dumps(Runs(canary)))


@attack(".npz", "data")
def data_with_a_pickle_beside(path: Path, canary: Path) -> None:
    npz(path, npy())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("label", pickle.dumps(Runs(canary)))


@attack(".npz", "data")
def data_of_a_petabyte(path: Path, canary: Path) -> None:
    del canary
    npz(path, npy(shape=(2**46, 4)))


@attack(".npz", "data")
def data_of_a_petabyte_compressed(path: Path, canary: Path) -> None:
    del canary
    npz(path, npy(shape=(2**46, 4)), zipfile.ZIP_DEFLATED)


@attack(".npy", "data")
def array_of_a_petabyte(path: Path, canary: Path) -> None:
    del canary
    path.write_bytes(npy(shape=(2**46, 4)))


@attack(".npz", "data")
def data_whose_labels_have_no_size(path: Path, canary: Path) -> None:
    """Seventy trillion of them fit into no bytes."""
    del canary
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", npy())
        archive.writestr("label.npy", npy(descr="<U0", shape=(64, 2**40), body=b""))


@attack(".npz", "data")
def data_that_overflows(path: Path, canary: Path) -> None:
    del canary
    npz(path, npy(shape=(2**62, 4)))


@attack(".npz", "data")
def data_with_negative_sizes(path: Path, canary: Path) -> None:
    del canary
    npz(path, npy(shape=(-64, -4)))


@attack(".npz", "data")
def data_with_a_deep_header(path: Path, canary: Path) -> None:
    del canary
    npz(path, b"\x93NUMPY\1\0\x10\x27" + b"(" * 10_000)


@attack(".npz", "data")
def data_with_a_header_of_four_gigabytes(path: Path, canary: Path) -> None:
    del canary
    npz(path, b"\x93NUMPY\2\0\xff\xff\xff\xff" + b" " * 100_000)


@attack(".npz", "data")
def data_with_a_header_that_is_code(path: Path, canary: Path) -> None:
    npz(path, npy().replace(b"False", b"f()  "))
    del canary


@attack(".npz", "data")
def data_that_is_a_bomb(path: Path, canary: Path) -> None:
    """A gigabyte of zeros in a megabyte, where the header speaks of a few."""
    del canary
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w") as member:
        member.write(npy(body=b""))
        for _ in range(256):
            member.write(bytes(1 << 20))


@attack(".npz", "data")
def data_with_a_wrong_checksum(path: Path, canary: Path) -> None:
    del canary
    npz(path, npy(np.ones((64, 4), np.float32)))
    content = bytearray(path.read_bytes())
    content[content.index(b"\x80\x3f") + 1] ^= 1
    path.write_bytes(content)


@attack(".npz", "data")
def data_that_is_cut(path: Path, canary: Path) -> None:
    del canary
    npz(path, npy())
    path.write_bytes(path.read_bytes()[:-30])


@attack(".npz", "data")
def data_of_records(path: Path, canary: Path) -> None:
    del canary
    npz(path, npy(descr=[("a", "|O")], shape=(64, 4)))


@attack("", "data")
def folder_of_a_petabyte(path: Path, canary: Path) -> None:
    del canary
    path.mkdir()
    npz(path / "0.npz", npy())
    npz(path / "1.npz", npy(shape=(2**46, 4)))
