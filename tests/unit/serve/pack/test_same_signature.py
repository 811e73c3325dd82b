"""An artifact whose signature is not what its file declares is not packed: Triton would refuse what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compress.errors import RepositoryError
from serve.pack.write import pack
from tests.serve_models import tiny_artifact


def told(folder: Path, **sides: list[str]) -> Path:
    """The artifact with another signature in its artifact.json."""
    made = tiny_artifact(folder)
    file = made / "artifact.json"
    values = json.loads(file.read_text())
    values["signature"] |= sides
    file.write_text(json.dumps(values))
    return made


@pytest.mark.parametrize(
    ("sides", "why"),
    [
        ({"inputs": ["x:float32[batch,16]"]}, "x:float32[any, 4]"),
        ({"inputs": ["x:float64[batch,4]"]}, "x:float32[any, 4]"),
        ({"inputs": ["x:float32[batch,4,1]"]}, "x:float32[any, 4]"),
        ({"inputs": ["x:float32[batch,4]", "y:float32[batch,4]"]}, "in the file they are 'x'"),
        ({"outputs": ["scores:float32[batch,3]"]}, "in the file they are 'logits'"),
    ],
)
def test_a_signature_that_is_not_the_files_is_refused(sides: dict[str, list[str]], why: str, tmp_path: Path) -> None:
    made = told(tmp_path / "made", **sides)
    with pytest.raises(RepositoryError) as caught:
        pack(made, name="m", repository=tmp_path / "repository")
    assert why in caught.value.why
    assert not (tmp_path / "repository").exists()


@pytest.mark.parametrize("sides", [{}, {"inputs": ["x:float32[n,width]"], "outputs": ["logits:float32[n,3]"]}])
def test_names_of_sizes_and_sizes_that_the_file_leaves_open_are_no_contradiction(
    sides: dict[str, list[str]], tmp_path: Path
) -> None:
    pack(told(tmp_path / "made", **sides), name="m", repository=tmp_path / "repository")
    assert (tmp_path / "repository" / "m").is_dir()
