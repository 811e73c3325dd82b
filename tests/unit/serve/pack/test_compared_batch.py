"""What OpenVINO serves makes no larger batches than its answers were compared with ONNX Runtime's at."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from compress.artifact import Artifact, Runtime
from compress.errors import ArtifactError
from serve.lint.run import lint
from serve.pack.write import PackOptions, pack
from tests.serve_models import tiny_artifact


def artifact(folder: Path, rows: tuple[int, ...] = (1, 8), runtime: Runtime = "openvino") -> Path:
    made = tiny_artifact(folder)
    compared = {"batch": rows} if rows else {}
    dataclasses.replace(Artifact.load(made), runtime=runtime, compared=compared).save()
    return made


@pytest.mark.parametrize(
    ("rows", "asked", "runtime", "most"),
    [
        ((1, 8), 32, None, 8),
        ((1, 8), 64, None, 8),
        ((1, 8), 4, None, 4),
        ((1, 64), 32, None, 32),
        ((), 32, None, 32),
        ((1, 8), 32, "onnxruntime", 32),
    ],
)
def test_a_batch_is_as_large_as_was_compared_at_most(
    rows: tuple[int, ...], asked: int, runtime: Runtime | None, most: int, tmp_path: Path
) -> None:
    pytest.importorskip("openvino")
    options = PackOptions(max_batch_size=asked, runtime=runtime)
    found = pack(artifact(tmp_path / "a", rows), repository=tmp_path / "r", name="m", options=options)
    assert found.max_batch_size == most
    told = [warning for warning in found.warnings if "max_batch_size" in warning]
    assert bool(told) == (most < asked)
    assert not told or f"max_batch_size is {most}, not {asked}" in told[0]
    assert not [each for each in lint(tmp_path / "r") if "compared" in each.what]


@pytest.mark.parametrize(
    ("table", "asked", "told"),
    [
        (48, 32, "max_batch_size is 48, as a table or an edit by hand has it"),
        (48, 4, "max_batch_size is 48, as a table or an edit by hand has it"),
        (8, 32, "max_batch_size is 8, not 32"),
        (4, 32, None),
        (2, 4, None),
    ],
)
@pytest.mark.parametrize("by", ["a table", "an edit"])
def test_what_is_said_of_a_batch_is_what_config_pbtxt_has(
    by: str, table: int, asked: int, told: str | None, tmp_path: Path
) -> None:
    pytest.importorskip("openvino")
    source, config = artifact(tmp_path / "a"), tmp_path / "r" / "m" / "config.pbtxt"
    options = PackOptions(max_batch_size=asked)
    if by == "a table":
        options = dataclasses.replace(options, models={"network": {"max_batch_size": table}})
    else:
        first = pack(source, repository=tmp_path / "r", name="m", options=options).max_batch_size
        text = config.read_text()
        assert f"max_batch_size: {first}" in text
        config.write_text(text.replace(f"max_batch_size: {first}", f"max_batch_size: {table}"))
    found = pack(source, repository=tmp_path / "r", name="m", options=options)
    assert f"max_batch_size: {table}\n" in config.read_text()
    said = [warning for warning in found.warnings if "max_batch_size" in warning]
    assert len(said) == (told is not None), said
    assert told is None or told in said[0]


def test_lint_tells_of_a_batch_that_was_made_larger_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    pack(artifact(tmp_path / "a"), repository=tmp_path / "r", name="m")
    config = tmp_path / "r" / "m" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 8", "max_batch_size: 48"))
    (told,) = (each for each in lint(tmp_path / "r") if "compared" in each.what)
    assert "max_batch_size is 48" in told.what
    assert "write max_batch_size: 8" in told.mend


def test_an_artifact_keeps_what_was_compared(tmp_path: Path) -> None:
    folder = artifact(tmp_path / "a", (1, 5, 64))
    assert Artifact.load(folder).compared == {"batch": (1, 5, 64)}
    assert "compared" not in json.loads((artifact(tmp_path / "b", ()) / "artifact.json").read_text())


@pytest.mark.parametrize(
    "damaged", [{"batch": []}, {"batch": 8}, {"batch": [0]}, {"batch": ["8"]}, {"batch": [True]}, 8]
)
def test_sizes_that_are_none_are_damage(damaged: object, tmp_path: Path) -> None:
    path = artifact(tmp_path / "a") / "artifact.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"compared": damaged}))
    with pytest.raises(ArtifactError, match="damaged"):
        Artifact.load(path.parent)
