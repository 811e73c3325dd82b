"""Triton is not waited for once it has said that a model failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress.errors import ServerError
from serve.triton.launch import Ports, TritonOptions, TritonServer
from tests.lint_corpus import MODEL_PY, Case, python_text

pytestmark = pytest.mark.integration
SLOW_S = 100
INITIALIZE = "class TritonPythonModel:\n    def initialize(self, args):\n        {}\n\n"


def with_initialize(text: str) -> str:
    return MODEL_PY.replace("class TritonPythonModel:\n", INITIALIZE.format(text))


def test_a_model_that_failed_ends_the_start_while_others_still_load(tmp_path: Path) -> None:
    late = tmp_path / "late"
    slow = f"import pathlib, time; time.sleep({SLOW_S}); pathlib.Path({str(late)!r}).touch()"
    Case("slow", "python", files=python_text(with_initialize(slow))).write(tmp_path / "models")
    Case("bad", "python", files=python_text(with_initialize("raise RuntimeError('no weights')"))).write(
        tmp_path / "models"
    )
    triton = TritonServer(tmp_path / "models", ports=Ports(0, 0, 0), options=TritonOptions(start_timeout_s=3 * SLOW_S))
    with pytest.raises(ServerError) as told:
        triton.start()
    assert "bad: RuntimeError: no weights" in told.value.why
    assert not late.exists(), "it waited for the slow one"
    assert not triton.running
