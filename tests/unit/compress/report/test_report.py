"""The report shows what was measured, warns where a gain did not come, and needs nothing from outside."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from compress.artifact import Measured, Signature, StageReport, TensorSpec
from compress.console.durations import bytes_text
from compress.console.wording import Note, with_error
from compress.evaluate import gains
from compress.evaluate.gains import drop_told, gains_of, signed
from compress.jobs.recovery import Row
from compress.report.export import Report, _change, stage_table
from compress.report.findings import findings, telling
from compress.report.plots import axes_of, log_axis, plots
from compress.report.training import training_table

CHANGED = (
    "value",
    "drop",
    "drop_low",
    "drop_high",
    "batch_difference",
    "size_bytes",
    "cosine_similarity",
    "metric",
    "metric_scale",
)


def row(stage: str, latency: float | None = 1.0, accuracy: float | None = 0.9, **figures: object) -> StageReport:
    runtime = "torch eager" if stage in ("original", "prune_channels", "finetune") else "ONNX Runtime"
    measured = Measured(
        macs=100, params=10, size_bytes=1000, accuracy=accuracy, agreement=accuracy,
        cosine_similarity=None if accuracy is None else 1.0, latency_p50_ms=latency, latency_p99_ms=latency,
        latency_rounds_ms=None if latency is None else (latency,) * 8, runtime=runtime,
    )  # fmt: skip
    judged = {name: figures.pop(name) for name in CHANGED if name in figures}
    options = figures.pop("options", {})
    metric = None if accuracy is None else "top1"
    measured = dataclasses.replace(measured, **{"metric": metric, **judged})  # type: ignore[arg-type]
    return StageReport(stage, "did <it>", measured, 1.0, details=figures, options=options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def undrawn() -> None:
    """Here plots are drawn."""


BASE = [row("original", 5.0, value=0.9), row("original_onnx", 2.0, value=0.9)]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([row("fold_onnx", 1.0), row("quantize_onnx", 1.5)], "INT8 is 1.50× slower"),
        ([row("prune_channels"), row("finetune"), row("fold_onnx", 2.5)], "the model is 1.25× slower ("),
        ([row("prune_channels"), row("fold_onnx", 1.0)], "not trained since"),
        ([row("fold_onnx", 1.0, value=0.85, drop=5.0, drop_low=4.0, drop_high=6.0)], "fell by 5.00 points"),
        ([row("fold_onnx", 1.0, value=0.89, drop=1.0, drop_low=-1.0, drop_high=3.0)], "which may be chance"),
        ([row("fold_onnx", 1.0, accuracy=None)], "Nothing was compared on real data"),
        (
            [row("fold_onnx", 1.0, value=0.6, drop=30.0, metric="miou")],
            "miou fell by 30 points, from 0.9000 to 0.6000, without",
        ),
        ([row("fold_onnx", 1.0), row("half_onnx", 1.0, size_bytes=1006)], "from 1,000 to 1,006 bytes."),
        (
            [row("fold_onnx", 1.0), row("quantize_onnx", 0.5, size_bytes=1006, layers={"int8": 3})],
            "scales and further nodes outweigh",
        ),
        (
            [row("repair_channels", layers=4), row("quantize_onnx", 0.5, size_bytes=1006, layers={"int8": 0})],
            "from 1,000 to 1,006 bytes.",
        ),
        ([row("fold_onnx", 1.0, batch_difference=0.5)], "by up to 50.0% of the largest output: a server that joins"),
        (
            [row("quantize_onnx", 0.5, batch_difference=0.5, options={"mode": "dynamic"})],
            "dynamic INT8 takes its ranges",
        ),
        ([row("prune_channels"), row("fold_onnx", 2.0)], "Pruning removed MACs, but no gain in time"),
        (
            [row("fold_onnx", 1.0), row("quantize_within", 1.0, layers={"int8": 2})],
            "INT8 is used, but no gain in time over the float model can be told from noise",
        ),
    ],
)
def test_what_a_reader_must_not_miss_is_said(rows: list[StageReport], says: str) -> None:
    assert any(says in finding for finding in findings([*BASE, *rows]))


def test_int8_that_a_stage_has_left_out_is_not_blamed() -> None:
    assert findings([*BASE, row("fold_onnx", 1.0), row("quantize_faster", 1.0, layers={"int8": 0})]) == ()


@pytest.mark.parametrize(
    ("metric", "now", "drop", "told"),
    [
        ("top1", 0.906, -0.6, "+0.60 points of change in top1 (-0.20 to +1.40 at 95%): may be chance"),
        ("top1", 0.894, 0.6, "-0.60 points of change in top1"),
        ("mse", 1.5, 0.6, "+0.6 change in mse"),
        ("mse", 0.3, -0.6, "-0.6 change in mse"),
    ],
)
def test_a_change_has_the_metric_s_own_sign_and_is_called_one(metric: str, now: float, drop: float, told: str) -> None:
    spread = {"drop_low": -1.4, "drop_high": 0.2} if "(" in told else {}
    original = row("original", 5.0, value=0.9, metric=metric).measured
    change = _change(original, row("fold_onnx", 1.0, value=now, drop=drop, metric=metric, **spread).measured, "95%")
    assert change is not None
    assert set(told.replace(": may be chance", "").split()) <= set(str(change).replace(":", " ").split())


def test_a_drop_is_named_wherever_it_is_told() -> None:
    assert drop_told(-0.6, metric="top1") == "drop -0.60 points"
    assert drop_told(0.6, -0.2, 1.4, metric="top1") == "drop +0.60 points (-0.20 to +1.40)"
    assert signed(-0.001, "top1") == "+0.00"


@pytest.mark.parametrize(("metric", "scale"), [("m:mae", 1.0), ("m:mae", None), ("mse", None)])
def test_a_metric_that_is_no_share_is_told_by_its_own_scale(metric: str, scale: float | None) -> None:
    assert signed(0.003, metric, scale) == "+0.003"
    assert drop_told(0.003, 0.001, 0.005, metric=metric, scale=scale) == "drop +0.003 (+0.001 to +0.005)"
    figures: dict[str, Any] = {"metric": metric, "metric_scale": scale or 1.0, "drop_low": 0.001, "drop_high": 0.005}
    before, after = (row(name, value=value, drop=drop, **figures) for name, value, drop in (
        ("original", 0.002, 0.0), ("fold_onnx", 0.005, 0.003),
    ))  # fmt: skip
    change = _change(before.measured, after.measured, "95%")
    assert str(change) == f"+0.003 change in {metric} (+0.001 to +0.005 at 95%)"
    assert change is not None
    assert change.kind == "loss"
    assert f"{metric} rose by 0.003, from 0.002 to 0.005: the stage table" in " ".join(findings([before, after]))


def test_what_is_worth_a_word_goes_by_the_metric_s_scale() -> None:
    before = Measured(value=2.0)
    assert telling(Measured(metric="m:mae", metric_scale=1.0, drop=0.09), before)
    assert not telling(Measured(metric="m:mae", metric_scale=1.0, drop=0.0009), before)
    assert not telling(Measured(metric="m:share", metric_scale=100.0, drop=0.04), Measured(value=0.9))


def test_a_users_share_is_told_in_points() -> None:
    assert drop_told(0.6, metric="m:share", scale=100.0) == "drop +0.60 points"


def test_a_training_is_told_by_its_metric_s_scale() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(training_table("mse", [Row("after", 5e-3, 4e-3, 6e-3, 0.0049, 0.0039, 0.0059)]))
    assert "+0.0039 to +0.0059" in console.export_text()


def test_no_text_of_the_package_formats_a_signed_drop_of_its_own() -> None:
    """Only `compress.evaluate.gains` does: elsewhere a sign would stand without a word that says of what."""
    root = Path(gains.__file__).parents[1]
    own = re.compile(r"(drop|points|proof)[\w.\[\]-]*(:\+\.\d|\s*\)?\s*\|\s*format)|%\+\.\d*f")
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in [*root.rglob("*.py"), *root.rglob("*.html")]
        if path != Path(gains.__file__)
        for line in path.read_text(encoding="utf-8").splitlines()
        if own.search(line)
    ]
    assert found == []


def test_a_good_run_has_no_findings() -> None:
    rows = [row("prune_channels"), row("finetune"), row("fold_onnx", 1.0), row("quantize_onnx", 0.5)]
    assert findings([*BASE, *rows]) == ()


@pytest.mark.parametrize("target", ["tensorrt", "cuda"])
def test_what_a_gpu_is_for_is_not_called_slow_by_the_cpu(target: str) -> None:
    said = findings([*BASE, row("fold_onnx", 1.0), row("quantize_within", 1.8, options={"target": target})])
    assert len(said) == 1
    assert "The file is made for a GPU" in said[0]


def test_a_budget_that_took_nothing_away_is_no_pruning() -> None:
    assert findings([*BASE, row("prune_to_budget", macs_removed=0.0), row("fold_onnx", 2.0)]) == ()


@pytest.mark.parametrize(
    ("runtime", "latency", "told"), [("ONNX Runtime, BF16 emulated", None, True), ("OpenVINO, BF16", 0.5, False)]
)
def test_that_no_speed_was_measured_is_said_of_what_was_emulated_alone(
    runtime: str, latency: float | None, *, told: bool
) -> None:
    last = row("half_onnx", latency)
    last = dataclasses.replace(last, measured=dataclasses.replace(last.measured, runtime=runtime))
    said = findings([*BASE, row("fold_onnx", 1.0), last])
    assert any("its speed was not measured" in each for each in said) is told


def test_what_the_original_does_too_is_not_laid_to_int8() -> None:
    original = row("original", 5.0, value=0.9, batch_difference=0.736)
    last = row("quantize_onnx", 0.5, batch_difference=0.7, options={"mode": "dynamic"})
    said = findings([original, BASE[1], row("fold_onnx", 1.0), last])
    assert ["as the original's does, by up to 73.6%" in told and "dynamic" not in told for told in said] == [True]


def test_answers_that_are_no_numbers_were_compared_all_the_same() -> None:
    assert findings([*BASE, row("fold_onnx", 1.0, cosine_similarity=None)]) == ()


@pytest.fixture
def report() -> Report:
    rows = (*BASE, row("prune_channels", channels={"conv": [32, 16]}), row("fold_onnx", 1.0), row("quantize_onnx", 0.5))
    signature = Signature((TensorSpec.parse("x:float32[batch,3]"),), (TensorSpec.parse("y:float32[batch,2]"),))
    environment = {"threads": 1, "cpu": "<script>alert(1)</script>"}
    return Report(
        "compress export model.pt", "model.pt", signature, environment, {"samples": 5, "sha256": "ab"}, rows, ("Mind.",)
    )


def test_gains_are_ratios_of_the_original_to_the_result(report: Report) -> None:
    assert report.gains["latency_over_torch"] == 10
    assert report.gains["latency_over_onnx"] == 4
    assert report.gains["accuracy_points"] == 0


def test_what_exporting_folds_away_is_no_gain(report: Report) -> None:
    before = [row("original", 5.0, macs=110, params=1010), row("original_onnx", 2.0, macs=100, params=1000)]
    rows = (*before, row("fold_onnx", 1.0, macs=100, params=1000))
    found = dataclasses.replace(report, stages=rows)
    assert (found.gains["macs"], found.gains["params"]) == (1, 1)
    assert not any("multiply" in str(gain) for gain in gains_of(rows))


def test_the_page_is_self_contained_escaped_and_has_its_plots(report: Report, tmp_path: Path) -> None:
    report.write(tmp_path, {stage.stage: [0.9, 1.0, 1.1] for stage in report.stages})
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 5
    assert "<script" not in page
    outside = re.sub(r'xmlns(:\w+)?="[^"]*"|<rdf:RDF.*?</rdf:RDF>|<!DOCTYPE[^>]*>', "", page, flags=re.DOTALL)
    assert "http" not in outside
    assert "did &lt;it&gt;" in page
    assert "Mind." in page


def test_the_json_holds_every_stage_under_stable_names(report: Report, tmp_path: Path) -> None:
    report.write(tmp_path, {})
    data = json.loads((tmp_path / "report.json").read_text())
    assert set(data) == {"schema_version", "command", "source", "signature", "environment", "evaluation", "stages", "gains",
                         "measuring", "findings", "notes", "grid", "rooflines", "layer_bytes", "sizes", "runtimes",
                         "explained"}  # fmt: skip
    assert data["stages"][0]["stage"] == "original"
    assert data["stages"][0]["measured"]["latency_p50_ms"] == 5.0


def judged(metric: str, value: float, drop: float, confidence: float = 0.95, spread: float = 0.0) -> tuple[str, ...]:
    last = row("fold_onnx", 1.0, value=value, drop=drop, drop_low=drop - spread, drop_high=drop + spread)
    rows = [*BASE, last]
    rows = [dataclasses.replace(r, measured=dataclasses.replace(r.measured, metric=metric)) for r in rows]
    return findings(rows, confidence)


@pytest.mark.parametrize(
    ("metric", "drop", "told"),
    [
        ("cosine", 0.01, False),  # for certain, and nothing all the same
        ("cosine", 0.06, True),
        ("top1", 0.04, False),
        ("top1", 0.2, True),
        ("mse", 1e-5, False),
        ("mse", 0.001, True),
        ("package:bleu", 0.01, False),
        ("package:bleu", 0.1, True),
    ],
)
def test_a_certain_loss_that_is_nothing_is_not_told(metric: str, drop: float, told: bool) -> None:
    assert any("by " in finding for finding in judged(metric, 0.9 - drop / 100, drop)) == told


def test_a_loss_that_may_be_chance_is_told_with_the_confidence_that_was_asked_for() -> None:
    (found,) = judged("top1", 0.89, 1.0, 0.8, spread=2.0)
    assert "at 80% confidence the drop is between -1.00 and +3.00 points" in found
    assert "95" not in found


def test_what_informs_does_not_look_like_a_warning(report: Report, tmp_path: Path) -> None:
    noted = dataclasses.replace(report, findings=("Mind.", Note("It is so.")), searched="../a%20b.search/search.html")
    noted.write(tmp_path, {})
    page = (tmp_path / "report.html").read_text()
    assert '<p class="warn">⚠ Mind.</p>' in page
    assert '<p class="note">It is so.</p>' in page
    assert 'href="../a%20b.search/search.html"' in page
    data = json.loads((tmp_path / "report.json").read_text())
    assert (data["findings"], data["notes"]) == (["Mind.", "It is so."], ["It is so."])
    assert all(isinstance(f, Note) for f in findings([*BASE, row("prune_channels"), row("fold_onnx", 1.0)]))


def test_the_confidence_that_was_asked_for_is_in_the_page(report: Report, tmp_path: Path) -> None:
    judged = [
        dataclasses.replace(
            r, measured=dataclasses.replace(r.measured, value=0.5, drop=0.0, drop_low=-1.0, drop_high=1.0)
        )
        for r in report.stages
    ]
    dataclasses.replace(report, stages=tuple(judged), data={"samples": 5, "confidence": 0.8}).write(tmp_path, {})
    page = (tmp_path / "report.html").read_text()
    assert "bars: 80% confidence" in page
    assert "<th>top1 (80%)</th>" in page
    assert "no change in top1" in page
    assert [at for at in re.findall(r"\S+ \S*95%\S*", page) if "p50" not in at] == [], "only latencies have that"


def test_what_torch_said_of_a_layer_is_in_the_json_and_not_in_the_page(report: Report, tmp_path: Path) -> None:
    said = "shape '[2, 32]' is invalid for input of size 9"
    rows = (*BASE, row("prune_channels", left_alone={"query": with_error("a reshape needs all of them", said)}))
    dataclasses.replace(report, stages=rows).write(tmp_path, {})
    assert "<td>a reshape needs all of them</td>" in (tmp_path / "report.html").read_text()
    told = json.loads((tmp_path / "report.json").read_text())["stages"][-1]["details"]["left_alone"]
    assert told == {"query": f"a reshape needs all of them; torch says: {said}"}


@pytest.mark.parametrize("metric", ["top1", "agreement", "mine.metrics:[f1]"])
def test_the_head_of_the_table_names_the_metric(report: Report, metric: str) -> None:
    rows = [row("original", value=1.0, metric=metric), row("fold_onnx", value=1.0, metric=metric)]
    told = Console(width=200, record=True, file=io.StringIO())
    told.print(stage_table(dataclasses.replace(report, stages=tuple(rows))))
    assert f" {metric} (95%) " in told.export_text()


@pytest.mark.parametrize("metric", ["cosine", "top1"])
def test_the_axis_of_models_that_are_alike_shows_the_metric_not_its_rounding(metric: str) -> None:
    rows = [
        row(name, at, value=1.0 - at * 1e-14) for name, at in (("original", 5.0), ("original_onnx", 2.0), ("fold", 1.0))
    ]
    rows = [dataclasses.replace(r, measured=dataclasses.replace(r.measured, metric=metric)) for r in rows]
    svg = plots(rows, {})[0][1]
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert not [text for text in texts if re.search(r"e[-−]\d", text)], texts
    near = {
        float(text.rstrip("%")) / (100 if "%" in text else 1)
        for text in texts
        if re.fullmatch(r"[01][.\d]*|\d+[.\d]*%", text)
    }
    near = {value for value in near if 0.9 < value < 1.1}
    assert len(near) >= 3
    assert max(near) == 1.0, "the metric can't be more"
    assert min(near) < 0.999


@pytest.mark.parametrize("span", [1.05, 1.5, 3.0, 30.0, 1e3, 1e6])
def test_a_logarithmic_axis_has_figures_and_room_for_them(span: float) -> None:
    _, axes = axes_of(3)
    axes.plot([1.3, 1.3 * span], [0, 1])
    log_axis(axes)
    low, high = axes.get_xlim()
    shown = [tick for tick in axes.xaxis.get_majorticklocs() if low <= tick <= high]
    assert 2 <= len(shown) <= 10


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (204_931, "205 kB"), (2_000_000, "2 MB"), (3.2e12, "3.2e+03 GB")],
)
def test_sizes_are_in_powers_of_ten(size: float, text: str) -> None:
    assert bytes_text(size) == text


def test_every_key_of_a_report_is_documented(report: Report) -> None:
    text = (Path(__file__).parents[4] / "docs/report.md").read_text(encoding="utf-8")
    data = report.to_dict()
    keys = {*data, *data["stages"][0], *data["stages"][0]["measured"]}
    assert [key for key in sorted(keys - {"measured"}) if f"`{key}`" not in text and f".{key}`" not in text] == []
