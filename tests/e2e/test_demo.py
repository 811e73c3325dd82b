"""The main job, as `make demo` runs it: from training to a stopped server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compress.artifact import Artifact

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The demo's folder, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    script = ROOT / "examples" / "digits" / "demo.py"
    environment = {**os.environ, "COLUMNS": "140"}
    run = subprocess.run(
        [sys.executable, str(script), str(folder)],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return folder, run.stdout + run.stderr


def test_the_result_is_small_and_as_accurate_as_the_original(demo: tuple[Path, str]) -> None:
    report = json.loads((demo[0] / "artifact" / "report.json").read_text())
    rows = {stage["stage"]: stage["measured"] for stage in report["stages"]}
    assert rows["original"]["accuracy"] >= 0.98
    assert rows["quantize_onnx"]["accuracy"] >= rows["original"]["accuracy"] - 0.01
    assert rows["original_onnx"]["size_bytes"] >= 8 * rows["quantize_onnx"]["size_bytes"]
    assert abs(1 - rows["quantize_onnx"]["macs"] / rows["original"]["macs"] - 0.7) <= 0.02
    assert all(row["latency_p50_ms"] > 0 for row in rows.values())


def test_the_artifact_holds_what_it_says(demo: tuple[Path, str]) -> None:
    artifact = Artifact.load(demo[0] / "artifact")
    assert {path.name for path in artifact.folder.iterdir()} == {
        "model.onnx",
        "artifact.json",
        "report.json",
        "report.html",
        "reproduce.sh",
    }
    assert str(artifact.signature.inputs[0]) == "image:float32[batch,1,8,8]"


def test_the_answers_through_the_gateway_are_the_artifacts_own(demo: tuple[Path, str]) -> None:
    line = next(line for line in demo[1].splitlines() if "accuracy through the gateway" in line)
    shares = [word.strip(";") for word in line.split() if "%" in word]
    assert shares[0] == shares[1]


def test_the_load_test_had_answers_and_no_errors(demo: tuple[Path, str]) -> None:
    paths = sorted(demo[0].glob("load*.json"))
    assert len(paths) == 7
    for path in paths:
        (load,) = json.loads(path.read_text())["runs"]
        assert load["count"] > 100
        assert not load["errors"]


def test_every_step_and_the_summary_were_shown(demo: tuple[Path, str]) -> None:
    assert all(f"[{step}/7]" in demo[1] for step in range(1, 8))
    assert "before → after" in demo[1]
    assert "report.html" in demo[1]
    assert "no process is left, and the ports are free" in demo[1]
