"""Files of arrays that declare more than they hold are refused where a server is checked or measured."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.errors import RepositoryError, ServerError
from serve.verify.samples import samples_of
from tests.unit.serve.load.test_inputs import target_of


def declaring(path: Path, *shape: int) -> Path:
    """An .npz whose arrays `x` and `label` have a header of that shape, and no values."""
    header = io.BytesIO()
    told = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, told)
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("x", "label"):
            archive.writestr(f"{name}.npy", header.getvalue())
    return path


def unlike(path: Path) -> Path:
    """One array alone, under the name of many."""
    with path.open("wb") as file:
        np.save(file, np.zeros((3, 4), np.float32))
    return path


def given(kind: str, folder: Path) -> Path:
    path = folder / "data.npz"
    match kind:
        case "petabyte":
            return declaring(path, 1 << 50)
        case "rows without values":
            return declaring(path, 1 << 40, 0)
        case "one array":
            return unlike(path)
    np.savez_compressed(path, x=np.zeros((500_000, 4), np.float32), label=np.zeros(500_000))
    return path


KINDS = pytest.mark.parametrize("kind", ["petabyte", "rows without values", "one array", "unpacks to more"])


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.vetting.arrays.memory_left", lambda: 1_000_000)


@KINDS
@pytest.mark.usefixtures("little_memory")
def test_no_sample_is_read_of_them(tmp_path: Path, kind: str) -> None:
    with pytest.raises(RepositoryError, match="can't verify with") as caught:
        list(samples_of(given(kind, tmp_path)))
    assert "no sample" not in caught.value.why


@KINDS
@pytest.mark.parametrize("of", ["data", "expect"])
@pytest.mark.usefixtures("little_memory")
def test_no_request_is_made_of_them(tmp_path: Path, kind: str, of: str) -> None:
    bad = given(kind, tmp_path)
    np.savez(tmp_path / "right.npz", x=np.zeros((5, 4), np.float32))
    changes: dict[str, Any] = {"data": bad} if of == "data" else {"data": tmp_path / "right.npz", "expect": str(bad)}
    with pytest.raises(ServerError, match="can't send" if of == "data" else "can't expect"):
        target_of(**changes)


def test_long_texts_are_data(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", text=np.array(["word " * 2000]), label=np.array(["a"]))
    (sample,) = samples_of(tmp_path / "data.npz")
    assert len(sample.content) > 9000


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 2)], ids=str)
def test_bytes_in_utf_8_are_sent_as_text(tmp_path: Path, shape: tuple[int, ...]) -> None:
    words = np.full(shape, "é".encode(), "S2")
    np.savez(tmp_path / "a.npz", x=words, label=words.reshape(3, -1)[:, 0])
    for sample in samples_of(tmp_path / "a.npz"):
        assert sample.label == "é"
        assert np.all(np.asarray(json.loads(sample.content)["x"]) == "é")


@pytest.mark.parametrize("name", ["x", "label"])
@pytest.mark.parametrize(
    "bad", [np.full(3, b"\xff\xfe", "S2"), np.full((3, 2), b"\xff", "S1"), np.full(3, 0x7FFFFFFF, np.int32).view("<U1")]
)
def test_texts_that_are_none_are_refused(tmp_path: Path, name: str, bad: np.ndarray[Any, Any]) -> None:
    arrays = {"x": np.ones((3, 2), np.float32), "label": np.arange(3)}
    np.savez(tmp_path / "a.npz", **arrays | {name: bad if name == "x" else bad.reshape(3, -1)[:, 0]})  # type: ignore[arg-type]
    with pytest.raises(RepositoryError, match="can't verify with"):
        list(samples_of(tmp_path / "a.npz"))
