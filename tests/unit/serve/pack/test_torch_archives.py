"""What a file of PyTorch is, is told by names that every reader of the archive sees alike."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path

import pytest

from compress.artifact import Signature, TensorSpec
from compress.errors import RepositoryError
from serve.pack.source import load_source

ONE = Signature((TensorSpec.parse("x:float32[batch,4]"),), (TensorSpec.parse("y:float32[batch,4]"),))
SCRIPT = ("net/data.pkl", "net/constants.pkl", "net/code/__torch__.py")


def archive(path: Path, *names: str) -> Path:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as file:
        warnings.simplefilter("ignore")
        for name in names:
            file.writestr(name, b"")
    return path


def test_torchscript_is_known_by_its_code(tmp_path: Path) -> None:
    assert load_source(archive(tmp_path / "m.pt", *SCRIPT), ONE).format == "torchscript"


@pytest.mark.parametrize(
    "names", [(*SCRIPT, SCRIPT[0]), (*SCRIPT, "../up"), (*SCRIPT, *(f"net/data/{at}" for at in range(200_001)))]
)
def test_an_archive_that_can_be_read_in_two_ways_or_never_ends_is_refused(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    with pytest.raises(RepositoryError, match="can't serve"):
        load_source(archive(tmp_path / "m.pt", *names), ONE)
