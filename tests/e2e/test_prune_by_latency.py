"""A user prunes to a share of the latency: by the command, with tables that the next run finds again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import compress
from tests.models import build


def test_a_share_of_the_latency_goes_and_the_report_says_what_tables_told(tmp_path: Path) -> None:
    module, inputs = build("residual")
    compress.save(module, tmp_path / "model.pt", inputs=inputs)
    images = np.random.default_rng(0).random((64, 3, 16, 16), np.float32)
    np.savez(tmp_path / "calibration.npz", image=images)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "COMPRESS_MEASURE_SECONDS": "0"}
    environment["COMPRESS_CACHE_GB"] = "1"
    (tmp_path / "cache").mkdir(mode=0o700)

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "compress", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    asked = ("export", "model.pt", "--prune", "0.3", "--allocate", "latency", "--importance", "obs")
    more = ("--calibration", "calibration.npz", "--eval", "calibration.npz", "--runtime", "onnxruntime")
    told = run(*asked, *more, "-o", "out")
    assert "by tables of the layers' shapes" in " ".join(told.split())
    report = json.loads((tmp_path / "out/report.json").read_text())
    row = next(row for row in report["stages"] if row["stage"] == "prune_channels")
    figures = row["details"]["by_latency"]
    assert figures["shapes"] == 5, "of six layers, two are alike"
    assert figures["predicted_ms"] > 0 < figures["latency_ms"]
    assert row["options"]["latency"]["runtime"] == "onnxruntime"
    assert 'allocate = "latency"' in (tmp_path / "out/recipe.toml").read_text()
    assert "--allocate latency" in (tmp_path / "out/reproduce.sh").read_text()
    kept = run("cache", "list")
    assert "latency_table" in kept
    run(*asked[:3], "0.4", *asked[4:], *more, "-o", "other")
    again = json.loads((tmp_path / "other/report.json").read_text())
    other = next(row for row in again["stages"] if row["stage"] == "prune_channels")
    assert other["details"]["by_latency"]["table_seconds"] == 0, "the tables are those of the first run"
