"""Lint against the real Triton: what it refuses to load, lint calls an error, and nothing else."""

from __future__ import annotations

import http.client
import random
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.lint.finding import Finding
from serve.lint.run import lint
from serve.triton.launch import Ports, TritonOptions, TritonServer
from tests.lint_corpus import CASES, ENSEMBLE, NETWORK, PYTHON, Case
from tests.lint_mutations import mutated

pytestmark = pytest.mark.integration
MUTATIONS = 60


class Control:
    """Triton's model control API; a Triton that dies of a model, or hangs, is started again."""

    def __init__(self, repository: Path, log: Path) -> None:
        self.repository, self.log = repository, log
        self.triton = self._start()

    def _start(self) -> TritonServer:
        options = TritonOptions(explicit=True, load=False, stop_timeout_s=3)
        return TritonServer(self.repository, ports=Ports(0, 0, 0), options=options, log=self.log).start()

    def loads(self, model: str) -> bool:
        """Whether Triton loads it; it is unloaded again."""
        try:
            loaded = self._post(f"{model}/load")
            if loaded:
                self._post(f"{model}/unload")
            if loaded and (self.repository / f"{model}_step").exists():
                self._post(f"{model}_step/unload")
            hangs = False
        except (OSError, http.client.HTTPException) as err:
            loaded, hangs = False, isinstance(err, TimeoutError)
        time.sleep(0.02)
        if hangs or not self.triton.running:
            self.triton.stop()
            self.triton = self._start()
        return loaded

    def _post(self, path: str) -> bool:
        url = f"http://{self.triton.http_address}/v2/repository/models/{path}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data=b"{}", method="POST"), timeout=15):
                return True
        except urllib.error.HTTPError:
            return False


def judged(repository: Path) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in lint(repository):
        if finding.severity == "error":
            found.setdefault(finding.model, []).append(finding)
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Control, dict[str, list[Finding]]]]:
    folder = tmp_path_factory.mktemp("corpus")
    for case in CASES:
        case.write(folder / "models")
    control = Control(folder / "models", folder / "triton.log")
    yield control, judged(folder / "models")
    control.triton.stop()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lint_and_triton_agree(case: Case, corpus: tuple[Control, dict[str, list[Finding]]]) -> None:
    control, errors = corpus
    found = errors.get(case.name, [])
    assert control.loads(case.name) == (not found), [finding.what for finding in found]
    assert all(finding.mend for finding in found)


@pytest.mark.timeout(240)
def test_they_agree_on_random_changes(tmp_path: Path) -> None:
    generator = random.Random(20)
    texts = {"network": NETWORK, "python": PYTHON, "ensemble": ENSEMBLE}
    models = tmp_path / "models"
    names = [f"m{number}" for number in range(MUTATIONS)]
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
    assert 0.1 < sum(loaded.values()) / MUTATIONS < 0.9, "both happen"
