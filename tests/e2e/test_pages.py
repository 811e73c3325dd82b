"""What people look at works in a real browser, with nothing from outside."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, sync_playwright

import compress
from compress import ExportOptions
from compress.artifact import Measured, Signature, StageReport, TensorSpec
from compress.report.export import Report
from compress.runtime.roofline import Layer, Roofline
from compress.runtime.roofs import Machine
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
    assert "than torch eager" in page
    assert "measuring took" in page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no browser: apt-get install chromium")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.mark.parametrize("width", [1100, 1300, 1600])
def test_the_table_of_a_long_run_fits_a_page(browser: Browser, width: int, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(long_page(), encoding="utf-8")
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto((tmp_path / "report.html").as_uri())
    wider = page.evaluate("[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length")
    assert wider == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


@pytest.mark.parametrize("seed", range(4))
def test_no_two_words_of_a_plot_overlap_and_names_stand_by_their_points(
    browser: Browser, seed: int, tmp_path: Path
) -> None:
    (tmp_path / "report.html").write_text(plotted(seed), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.goto((tmp_path / "report.html").as_uri())
    overlapping = page.evaluate(OVERLAPPING)
    page.close()
    assert overlapping == []


# Pairs of texts of one plot whose boxes share more than a pixel, as the browser's own fonts draw them.
OVERLAPPING = """[...document.querySelectorAll('svg')].flatMap(svg => {
  const texts = [...svg.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()]);
  return texts.flatMap(([a, p], i) => texts.slice(i + 1).filter(([b, q]) =>
    Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1 && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 3)
    .map(([b]) => a + ' / ' + b));
})"""


def plotted(seed: int) -> str:
    """Of a run whose stages lie near to each other, and whose layers do in the roofline."""
    rng = np.random.default_rng(seed)
    rows = []
    names = ["original", "original_onnx", "prune_channels", "finetune", "train_quantized", "onnx_from_torch", "fold_onnx",
             "smooth_onnx", "quantize_onnx"]  # fmt: skip
    for name in names:
        latency, value = float(10 ** rng.uniform(-1.5, -1.5 + seed)), float(rng.choice([0.9, 0.901, 0.93, 0.7]))
        measured = Measured(
            macs=1000, params=1000, size_bytes=1000, metric="top1", value=value, value_low=value - 0.02, value_high=value + 0.02,
            accuracy=value, agreement=value, drop=1.0, latency_p50_ms=latency, latency_rounds_ms=(latency,) * 8,
            runtime="ONNX Runtime",
        )  # fmt: skip
        rows.append(StageReport(name, "did it", measured, 1.0))
    layers = tuple(
        Layer(f"node_Conv_{at}_nchwc", "Conv", 100.0 + at, 1e8 * float(rng.uniform(0.8, 1.2)), 1e6, False, "compute")
        for at in range(12)
    )
    roofline = Roofline(Machine(1, 1e12, 3e12, 2e10), layers)
    spec = TensorSpec.parse("x:float32[batch,3,224,224]")
    report = Report(
        "", "m.pt", Signature((spec,), (spec,)), {"threads": 1}, {"samples": 9, "sha256": ""}, tuple(rows), (),
        rooflines={"result": roofline},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        times = {r.stage: [(r.measured.latency_p50_ms or 0.0) * f for f in (0.97, 1.0, 1.01, 1.3)] for r in rows}
        report.write(Path(folder), times)
        return (Path(folder) / "report.html").read_text(encoding="utf-8")


def long_page() -> str:
    """Of a run with many stages, and figures as wide as they get."""
    measured = Measured(
        macs=4_111_000_000, params=25_557_032, size_bytes=102_200_000, accuracy=0.7613, agreement=0.7613, metric="top1",
        value=0.7613, value_low=0.74, value_high=0.78, drop=12.34, drop_low=-10.05, drop_high=15.05, cosine_similarity=0.9,
        latency_p50_ms=1212.3, latency_p99_ms=1339.7, latency_p50_low_ms=1210.1, latency_p50_high_ms=1214.9,
        latency_rounds_ms=(1212.3,) * 8, load_ms=2230.0, peak_memory_bytes=1_340_000_000, runtime="TensorRT 11.4.0.106",
    )  # fmt: skip
    names = ["original", "original_onnx"] + [
        f"{stage} {n}" for n in range(10, 15) for stage in ("prune_to_budget", "finetune")
    ]
    rows = tuple(StageReport(name, "did it", measured, 1.0) for name in [*names, "quantize_within"])
    spec = TensorSpec.parse("x:float32[batch,3,224,224]")
    told = {"seconds": 41.0, "latency": {"told": "stopped after 11 rounds: ratios within ±2.4%"}}
    report = Report(
        "", "m.pt", Signature((spec,), (spec,)), {"threads": 1}, {"samples": 9, "sha256": ""}, rows, (), measuring=told
    )
    with tempfile.TemporaryDirectory() as folder:
        report.write(Path(folder), {row.stage: [1210.0, 1212.3, 1339.7] for row in rows})
        return (Path(folder) / "report.html").read_text(encoding="utf-8")
