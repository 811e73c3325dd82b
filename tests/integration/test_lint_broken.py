"""Lint says of what is renamed, moved, damaged and misspelt what `serve up` and the real Triton make of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from compress.errors import RepositoryError
from serve.lint.finding import Finding
from serve.lint.run import lint
from serve.repository.provenance import verify_checksums
from serve.repository.read import read_models
from tests.chosen import chosen
from tests.lint_broken import BROKEN, Packed
from tests.lint_corpus import Case
from tests.triton_control import Control

pytestmark = pytest.mark.integration


@dataclass
class Corpus:
    """All cases in one repository, and each in one of its own."""

    folder: Path
    control: Control
    found: list[Finding]

    def alone(self, case: Case | Packed) -> Path:
        return self.folder / case.name / "models"

    def errors(self, case: Case | Packed) -> list[str]:
        names = {path.name for path in self.alone(case).iterdir()}
        return [each.what for each in self.found if each.severity == "error" and each.model in names]

    def refused(self, case: Case | Packed) -> str:
        """Why `serve up` does not even start Triton, its own look with `serve lint` aside."""
        try:
            read_models(self.alone(case))
            verify_checksums(self.alone(case))
        except RepositoryError as err:
            return f"{err.what}: {err.why}"
        return ""


@pytest.fixture(scope="module")
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    folder = tmp_path_factory.mktemp("broken")
    for case in chosen(request, "case"):
        (folder / case.name).mkdir()
        case.write(folder / case.name / "models")
        shutil.copytree(folder / case.name / "models", folder / "models", symlinks=True, dirs_exist_ok=True)
    control = Control(folder / "models", folder / "triton.log")
    yield Corpus(folder, control, lint(folder / "models"))
    control.triton.stop()


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_what_lint_passes_is_served_and_what_it_refuses_is_not(case: Case | Packed, corpus: Corpus) -> None:
    errors = corpus.errors(case)
    refused = corpus.refused(case)
    served = not refused and corpus.control.loads(case.name, answering=True)
    assert served == (not errors), (errors, refused)
