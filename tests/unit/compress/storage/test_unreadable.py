"""What this user may not read is told as that, wherever it lies: no output is blamed, and no format."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.errors import DatasetError, ResourceError
from compress.storage.shortages import shortages

NOBODY = 65534
SIGNATURE = Signature((TensorSpec("x", "float32", ("batch", 4)),), (TensorSpec("y", "float32", ("batch", 2)),))


@pytest.fixture(params=["the folder for temporary files", "another"])
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a user who is not root, with the inputs in it."""
    made = Path(tempfile.mkdtemp())
    monkeypatch.setattr(tempfile, "tempdir", str(made if request.param.startswith("the") else made.parent))
    np.savez(made / "data.npz", x=np.zeros((3, 4), np.float32))
    (made / "shut").mkdir()
    shutil.copy(made / "data.npz", made / "shut")
    for each in ("data.npz", "shut"):
        (made / each).chmod(0)
    if root := os.geteuid() == 0:
        os.chown(made, NOBODY, -1)
        os.seteuid(NOBODY)
    try:
        yield made
    finally:
        if root:
            os.seteuid(0)
        (made / "shut").chmod(0o700)
        shutil.rmtree(made)


@pytest.mark.parametrize("given", ["data.npz", "shut/data.npz", "shut"])
@pytest.mark.parametrize("output", [(), ("out",)])
def test_an_input_that_can_t_be_read_is_named_and_not_the_output(
    given: str, output: tuple[str, ...], folder: Path
) -> None:
    path = folder / given
    with (
        pytest.raises(ResourceError, match="can't read") as caught,
        shortages(*(folder / each for each in output)),
    ):
        Dataset.open(str(path), SIGNATURE)
    assert caught.value.what == f"can't read {path}"
    assert caught.value.why.startswith("Permission denied")
    assert (str(folder / "shut") in caught.value.why) == (given == "shut/data.npz")
    assert "chmod" in caught.value.mend


def test_an_output_in_a_folder_that_can_t_be_entered_can_t_be_written(folder: Path) -> None:
    output = folder / "shut" / "out"
    with pytest.raises(ResourceError, match="can't write"), shortages(output):
        output.write_text("")


def test_data_that_can_t_be_read_are_not_called_damaged(folder: Path) -> None:
    with pytest.raises(DatasetError) as caught:
        Dataset.open(str(folder / "data.npz"), SIGNATURE)
    assert caught.value.why == "Permission denied"
