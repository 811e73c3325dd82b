"""The examples in the docstrings of the Python API run, and give what they say."""

from __future__ import annotations

import doctest
from pathlib import Path

import numpy as np
import pytest
import torch

import compress.artifact
import compress.formats.checkpoint
import compress.jobs.export
import compress.jobs.sensitivity
from compress.formats.checkpoint import save
from tests.models import mlp


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and its data, which is the current one."""
    torch.manual_seed(0)
    save(mlp(), tmp_path / "model.pt", inputs="x:float32[batch,4]")
    rng = np.random.default_rng(0)
    for name, count in (("train", 200), ("eval", 100)):
        x = rng.standard_normal((count, 4), dtype=np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x, labels=rng.integers(0, 3, count))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (compress.formats.checkpoint, "load"),
        (compress.formats.checkpoint, "save"),
        (compress.jobs.export, "export"),
        (compress.jobs.export, "optimize"),
        (compress.jobs.sensitivity, "sensitivity"),
        (compress.artifact, "Artifact.load"),
    ],
)
def test_an_example_runs(module: object, name: str, place: Path) -> None:
    if name == "Artifact.load":
        compress.export("model.pt", compress.ExportOptions(output=place / "artifact"))
    thing = module
    for part in name.split("."):
        thing = getattr(thing, part)
    (found,) = doctest.DocTestFinder(recurse=False).find(thing, name, globs=dict(vars(module)))
    assert found.examples
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    assert runner.run(found, out=told.append).failed == 0, "".join(told)
