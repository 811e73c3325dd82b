"""What a repository's files may make a command read: nothing that stands elsewhere, and nothing without an end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serve.lint.run import lint
from serve.pack.write import pack
from tests.serve_models import tiny_artifact


@pytest.mark.parametrize("kind", ["above", "absolute"])
def test_a_model_file_elsewhere_is_not_opened(tmp_path: Path, kind: str) -> None:
    repository, elsewhere = tmp_path / "models", tmp_path / "elsewhere.onnx"
    pack(tiny_artifact(tmp_path / "artifact"), repository=repository, name="tiny")
    elsewhere.write_bytes(b"no model")
    name = str(elsewhere) if kind == "absolute" else "../../../elsewhere.onnx"
    config = repository / "tiny" / "config.pbtxt"
    config.write_text(config.read_text(encoding="utf-8") + f'\ndefault_model_filename: "{name}"\n', encoding="utf-8")
    found = [item for item in lint(repository, packed=False) if item.model == "tiny" and item.severity == "error"]
    assert len(found) == 1
    assert "leads out of the version's folder" in found[0].what


@pytest.mark.parametrize(
    "call",
    ["from serve.repository.versions import roll_back as f", "from serve.deploy.gate import _network as f"],
    ids=["rollback", "gate"],
)
def test_a_pipe_for_a_configuration_is_refused(tmp_path: Path, call: str) -> None:
    repository = tmp_path / "models"
    pack(tiny_artifact(tmp_path / "artifact"), repository=repository, name="tiny")
    config = repository / "tiny" / "config.pbtxt"
    config.unlink()
    os.mkfifo(config)
    code = f"import sys, pathlib\n{call}\nf(pathlib.Path(sys.argv[1]), 'tiny')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(repository)], check=False, capture_output=True, text=True, timeout=60
    )
    assert "RepositoryError" in done.stderr
