"""Looking into an artifact of someone else's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from compress.artifact import Artifact
from compress.jobs.examine import told_of
from tests.hostile.onnx_files import artifact, model


@pytest.mark.timeout(60)  # a pipe is waited for without end
def test_a_report_that_is_a_pipe_is_left_out(tmp_path: Path) -> None:
    artifact(tmp_path, model().SerializeToString())
    os.mkfifo(tmp_path / "report.json")
    assert "from" not in told_of(Artifact.load(tmp_path))
