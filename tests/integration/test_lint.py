"""Lint against the real Triton: what it refuses to load, lint calls an error, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.lint.finding import Finding
from serve.lint.run import lint
from tests.chosen import chosen
from tests.lint_corpus import CASES, ENSEMBLE, NETWORK, PYTHON, Case
from tests.lint_mutations import mutated
from tests.triton_control import Control

pytestmark = pytest.mark.integration
MUTATIONS, FEW = 60, 30


def judged(repository: Path) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in lint(repository):
        if finding.severity == "error":
            found.setdefault(finding.model, []).append(finding)
    return found


@pytest.fixture(scope="module")
def corpus(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Control, dict[str, list[Finding]]]]:
    folder = tmp_path_factory.mktemp("corpus")
    for case in chosen(request, "case"):
        case.write(folder / "models")
    control = Control(folder / "models", folder / "triton.log")
    yield control, judged(folder / "models")
    control.triton.stop()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lint_and_triton_agree(case: Case, corpus: tuple[Control, dict[str, list[Finding]]]) -> None:
    control, errors = corpus
    found = errors.get(case.name, [])
    assert control.loads(case.name, answering=True) == (not found), [finding.what for finding in found]
    assert all(finding.mend for finding in found)


@pytest.mark.timeout(240)
def test_they_agree_on_random_changes(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    generator = random.Random(20)
    texts = {"network": NETWORK, "python": PYTHON, "ensemble": ENSEMBLE}
    models = tmp_path / "models"
    names = [f"m{number}" for number in range(FEW if request.config.getoption("--short") else MUTATIONS)]
    for name in names:
        kind = generator.choice(["network", "network", "python", "ensemble"])
        Case(name, kind).write(models)
        text = mutated(texts[kind].format(name=name), name, generator)
        (models / name / "config.pbtxt").write_text(text, encoding="utf-8")
    errors = judged(models)
    control = Control(models, tmp_path / "triton.log")
    try:
        loaded = {name: control.loads(name) for name in names}
    finally:
        control.triton.stop()
    wrong = [name for name in names if loaded[name] == (name in errors)]
    assert not wrong, "\n".join(
        f"{(models / name / 'config.pbtxt').read_text(encoding='utf-8')}{errors.get(name)}" for name in wrong
    )
    assert 0.1 < sum(loaded.values()) / len(names) < 0.9, "both happen"
