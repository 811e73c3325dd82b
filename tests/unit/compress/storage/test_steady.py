"""What a run reads is not written to while it runs, or nothing comes of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import compress
from compress import ExportOptions
from compress.artifact import sha256_of
from compress.errors import DatasetError
from compress.formats.checkpoint import save
from compress.jobs.branch import Silent
from compress.stage import Progress
from compress.storage.steady import refuse_changed, seen, steady
from tests.models import mlp


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"other")


def replaced(path: Path) -> None:
    path.with_name("new").write_bytes(b"another")
    path.with_name("new").rename(path)


CHANGES: dict[str, tuple[Callable[[Path], object], set[str]]] = {  # and of which it is refused
    "nothing": (lambda _path: None, set()),
    "overwritten": (overwritten, {"bytes", "open", "by name"}),
    "replaced": (replaced, {"by name"}),  # one that is open stays what it was
    "gone": (Path.unlink, set()),
    "touched": (lambda path: os.utime(path, (1, 1)), {"open"}),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["bytes", "open", "by name"])
def test_a_file_that_was_written_to_is_refused(tmp_path: Path, change: str, kind: str) -> None:
    happen, refused = CHANGES[change]
    path = tmp_path / "data"
    path.write_bytes(b"first and more")
    known = sha256_of(path)
    with steady():
        if kind == "open":
            assert seen(path) == ""
        else:
            assert seen(path, lambda: sha256_of(path), opened=kind == "bytes") == known
        happen(path)
        if kind in refused:
            with pytest.raises(DatasetError, match="data was written to while this ran"):
                refuse_changed()
        else:
            refuse_changed()
    refuse_changed()  # which is over


@pytest.mark.parametrize("stage", ["quantize_onnx", "measure"])
def test_no_artifact_comes_of_data_that_changed_and_no_stage_is_kept(tmp_path: Path, stage: str) -> None:
    """The samples were read from the disk as they were needed, of two files under one name."""
    save(mlp(), tmp_path / "model.pt", inputs="x:float32[batch,4]")
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "x.npy"
    np.save(path, np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32))
    whole = path.read_bytes()
    told: list[str] = []

    class Meanwhile(Silent):
        def started(self, stage_name: str) -> Progress:
            told.append(stage_name)
            if stage_name == stage:
                with path.open("r+b") as file:
                    file.seek(200)
                    file.write(np.full(8, 7.0, np.float32).tobytes())
            return super().started(stage_name)

    options = ExportOptions(
        output=tmp_path / "artifact", int8="static", calibration=str(tmp_path / "data"), eval=str(tmp_path / "data")
    )
    with pytest.raises(DatasetError, match=r"x\.npy was written to while this ran"):
        compress.export(tmp_path / "model.pt", options, watcher=Meanwhile())
    assert stage in told
    assert not (tmp_path / "artifact").exists()
    kept = [each.name for each in (tmp_path / "artifact.work").rglob("*") if each.name.startswith("0")]
    assert any("quantize_onnx" in name for name in kept) == (stage == "measure")
    path.write_bytes(whole)
    compress.export(tmp_path / "model.pt", options)
    assert (tmp_path / "artifact" / "report.json").exists()
