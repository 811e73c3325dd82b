"""What people look at works in a real browser, with nothing from outside."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np

import compress
from compress import ExportOptions
from tests.models import build


def test_the_docs_page_shows_the_routes(shipped: str, browse: Callable[[str], str]) -> None:
    page = browse(f"{shipped}/docs")
    assert "/predict/{model}" in page.replace("<wbr>", "").replace("​", "")
    assert "Ask a model" in page
    sources = re.findall(r'(?:src|href)="(https?://[^"]+)"', page)
    assert all(source.startswith(shipped) for source in sources), sources


def test_the_shipped_repository_answers_at_once(shipped: str) -> None:
    with urllib.request.urlopen(f"{shipped}/v2/models/digits/example") as answer:
        example = json.load(answer)["inputs"][0]
    assert example["name"] == "image"
    body = json.dumps({"image": {"base64": example["base64"]}}).encode()
    request = urllib.request.Request(f"{shipped}/predict/digits", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        outputs = json.load(answer)["outputs"]
    assert outputs["label"] == "7"
    assert outputs["probability"] > 0.5


def test_the_shipped_repository_is_small() -> None:
    root = Path(__file__).parents[2] / "model_repository"
    files = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 300_000


def test_the_report_draws_its_plots(tmp_path: Path, browse: Callable[[str], str]) -> None:
    module, inputs = build("residual")
    compress.save(module, tmp_path / "model.pt", inputs=inputs)
    images = np.random.default_rng(0).standard_normal((40, 3, 16, 16)).astype(np.float32)
    np.savez(tmp_path / "data.npz", image=images, label=np.arange(40) % 5)
    options = ExportOptions(
        output=tmp_path / "artifact", prune=0.5, int8="static", calibration="data.npz", eval="data.npz"
    )
    compress.export(tmp_path / "model.pt", options)
    page = browse((tmp_path / "artifact" / "report.html").as_uri())
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert page.count("<svg") == len(captions)
    for drawn in (
        "metric against latency",
        "Accuracy",
        "Latency",
        "Size",
        "channels",
        "Weights",
        "of original_onnx",
        "of result",
    ):
        assert any(drawn in caption for caption in captions), drawn
    assert "quantize_onnx" in page
    assert "reproduce.sh" not in page, "there is no command to run again"
    assert "faster than torch eager" in page
