"""StageReports → a terminal table, report.json and a self-contained report.html."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from compress.artifact import RUNTIME_NAMES, Measured, Signature, StageReport
from compress.console.durations import bytes_text, ms_text
from compress.console.wording import Note, counted
from compress.data.sizes import call_size
from compress.evaluate.gains import Gain, gains_of, in_points, signed, speed, within
from compress.evaluate.intervals import CONFIDENCE, percent
from compress.evaluate.runtime_choice import Choice
from compress.report.explain_plots import explained_plots
from compress.report.findings import telling
from compress.report.pages import page
from compress.report.plots import INT8, ONNX, SHARES, TORCH, plots
from compress.report.roofline import roofline_plot
from compress.report.training_plots import settings_of, training_plots, trial_rows
from compress.runtime.grid import Cell
from compress.runtime.roofline import Roofline
from compress.storage.files import let_run

if TYPE_CHECKING:
    from compress.jobs.explain import Explanation

__all__ = ["Report", "stage_table"]

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Report:
    """What a run did and measured.

    Attributes:
        command: as typed, if it came from the command line.
        source: the model file.
        signature: of the model.
        environment: machine and versions.
        data: `samples` and `sha256` of the evaluation data.
        stages: "original" first, "original_onnx" where that is no ONNX file itself, then each stage.
        findings: what the reader should not miss.
        grid: latency and throughput by batch size and thread count, of the original in torch and ONNX and the result.
        rooflines: of "original_onnx", or "original" where that is an ONNX file, and of the result, by row.
        layer_bytes: weights by layer, of the original and of the result.
        script: reproduce.sh, where the run came from a command line.
        searched: where the search's page is, seen from this one, where a search has chosen what was done.
        recipe: the options of the run as a recipe.
        measuring: `seconds` that all measuring took, and of the turns for latency `latency`: rounds, seconds, how wide
            the widest interval of a ratio is, and why they ended.
        serving: on what the finished file was measured, and which of these serves it; None for one alone.
    """

    command: str
    source: str
    signature: Signature
    environment: Mapping[str, Any]
    data: Mapping[str, Any]
    stages: tuple[StageReport, ...]
    findings: tuple[str, ...]
    grid: tuple[Cell, ...] = ()
    rooflines: Mapping[str, Roofline] = field(default_factory=dict)
    layer_bytes: tuple[Mapping[str, int], Mapping[str, int]] = ({}, {})
    script: str = ""
    searched: str = ""
    recipe: str = ""
    measuring: Mapping[str, Any] = field(default_factory=dict)
    serving: Choice | None = None
    explained: Explanation | None = None

    @property
    def gains(self) -> dict[str, float]:
        """Ratios of the original to the result, above 1 for a gain; `accuracy_points` is after minus before.

        Size, work and weights are held against the original's own ONNX file: what exporting folds away is no gain.
        Of latencies the ratio is paired by round, and has its 95% interval in `…_low` and `…_high`.
        """
        rows = {row.stage: row.measured for row in self.stages}
        original, last = rows["original"], self.stages[-1].measured
        onnx = rows.get("original_onnx", original)
        pairs = {
            "size": (onnx.size_bytes, last.size_bytes),
            "macs": (onnx.macs, last.macs),
            "params": (onnx.params, last.params),
        }
        found = {name: before / after for name, (before, after) in pairs.items() if before and after}
        for name, before in (("latency_over_torch", original), ("latency_over_onnx", onnx)):
            if name == "latency_over_torch" and before is onnx:
                continue
            if (ratio := speed(before, last)) is not None:
                ends = {f"{name}_low": ratio.low, f"{name}_high": ratio.high}
                found |= {name: ratio.value} | {end: value for end, value in ends.items() if value is not None}
        if original.accuracy is not None and last.accuracy is not None:
            found["accuracy_points"] = 100 * (last.accuracy - original.accuracy)
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "source": self.source,
            "signature": self.signature.to_dict(),
            "sizes": self.signature.sizes_told,
            "environment": dict(self.environment),
            "evaluation": dict(self.data),
            "stages": [stage.to_dict() for stage in self.stages],
            "gains": self.gains,
            "measuring": dict(self.measuring),
            "runtimes": None if self.serving is None else self.serving.to_dict(),
            "findings": list(self.findings),
            "notes": list(self.notes),
            "explained": None if self.explained is None else self.explained.to_dict(),
            "grid": [cell.to_dict() for cell in self.grid],
            "rooflines": {name: found.to_dict() for name, found in self.rooflines.items()},
            "layer_bytes": {"original": dict(self.layer_bytes[0]), "result": dict(self.layer_bytes[1])},
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """The findings that warn of nothing."""
        return tuple(finding for finding in self.findings if isinstance(finding, Note))

    @property
    def confidence(self) -> float:
        """Of the metric's intervals."""
        return float(self.data.get("confidence", CONFIDENCE))

    @property
    def columns(self) -> tuple[str, ...]:
        """Of the stage table."""
        metric, sure = self.metric, percent(self.confidence)
        return tuple(name.format(metric=metric, sure=sure) for name in COLUMNS)

    @property
    def call_size(self) -> int:
        """The samples of each call that was timed."""
        return call_size(self.signature)

    @property
    def metric(self) -> str:
        """Its name, by which the rows are judged; "metric" where nothing was."""
        return next((row.measured.metric for row in self.stages if row.measured.metric), "metric")

    def write(self, folder: Path, latencies_ms: Mapping[str, Sequence[float]]) -> None:
        """Write report.json, report.html and, where there is a command, reproduce.sh into a folder.

        Args:
            folder: is there.
            latencies_ms: single calls by stage, for the plot.
        """
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        (folder / "report.json").write_text(text, encoding="utf-8")
        html = page(
            "report.html",
            report=self,
            rows=[_paired([_lines(cell) for cell in cells]) for cells in _cells(self.stages)],
            columns=_paired([(column, "") for column in self.columns]),
            warnings=[finding for finding in self.findings if not isinstance(finding, Note)],
            notes=self.notes,
            plots=[
                *plots(self.stages, latencies_ms, self.layer_bytes, self.confidence, self.call_size),
                *(explained_plots(self.explained) if self.explained else ()),
                *(
                    plot
                    for row in self.stages
                    if "curve" in row.details
                    for plot in training_plots(row.details, row.stage)
                ),
            ],
            searches=[
                (row.stage, row.details["tuning"], settings_of(row.details), trial_rows(row.details))
                for row in self.stages
                if "tuning" in row.details
            ],
            roofs=[(name, roofline_plot(found)) for name, found in self.rooflines.items()],
            gains=gains_of(self.stages),
            change=_change(self.stages[0].measured, self.stages[-1].measured, percent(self.confidence)),
            threads=counted(int(self.environment["threads"]), "threads"),
            samples=counted(int(self.data.get("samples", 0)), "evaluation samples"),
            runtimes=RUNTIME_NAMES,
            colours={"in torch": TORCH, "in ONNX Runtime": ONNX, "with INT8": INT8},
            left=[(row.stage, row.details[key]) for row in self.stages for key in LEFT if row.details.get(key)],
        )
        # Names of files need not be UTF-8: the page shows what they are, the script has their very bytes.
        (folder / "report.html").write_bytes(html.encode("utf-8", "backslashreplace"))
        if self.recipe:
            (folder / "recipe.toml").write_bytes(os.fsencode(self.recipe))
        if self.script:
            (folder / "reproduce.sh").write_bytes(os.fsencode(self.script))
            let_run(folder / "reproduce.sh")


COLUMNS = (
    "stage",
    "MACs",
    "params",
    "size",
    "{metric} ({sure})",
    "drop ({sure})",
    "agreement",
    "p50 (95%)",
    "p99",
    "memory",
    "load",
    "runtime",
)


PAIRS = (("MACs", "params"), ("memory", "load"))  # of columns that share one in the page

# Details of a stage that name layers, each with a reason.
LEFT = ("left_alone", "layers_float", "kept_float32")


def _count(number: int) -> str:
    value = float(number)
    for unit in ("", " k", " M", " G"):
        if value < 1000 or unit == " G":
            break
        value /= 1000
    return f"{value:.3g}{unit}"


def _cells(stages: Sequence[StageReport]) -> list[tuple[str, ...]]:
    """Each row's figures as text; what was not measured is a dash."""

    def shown(value: float | None, text: str) -> str:
        return "–" if value is None else text.format(value)

    rows: list[tuple[str, ...]] = []
    for row in stages:
        m = row.measured
        rows.append(
            (
                row.stage,
                "–" if m.macs is None else _count(m.macs),
                "–" if m.params is None else _count(m.params),
                "–" if m.size_bytes is None else bytes_text(m.size_bytes),
                _metric(m),
                _drop(m),
                shown(m.agreement, "{:.2%}"),
                _latency(m),
                "–" if m.latency_p99_ms is None else f"{ms_text(m.latency_p99_ms)} ms",
                "–" if m.peak_memory_bytes is None else bytes_text(m.peak_memory_bytes),
                shown(m.load_ms, "{:.0f} ms"),
                m.runtime or "–",
            )
        )
    return rows


def _latency(m: Measured) -> str:
    if m.latency_p50_ms is None:
        return "–"
    if m.latency_p50_low_ms is None or m.latency_p50_high_ms is None:
        return f"{ms_text(m.latency_p50_ms)} ms"
    return f"{ms_text(m.latency_p50_ms)} ms ({ms_text(m.latency_p50_low_ms)}–{ms_text(m.latency_p50_high_ms)})"


def _metric(m: Measured) -> str:
    if m.value is None:
        return "–"
    if m.metric in SHARES:
        return f"{m.value:.2%}" + (
            "" if m.value_low is None else f" ({100 * m.value_low:.1f}–{100 * (m.value_high or 0):.1f})"
        )
    return f"{m.value:.4g}" + ("" if m.value_low is None else f" ({m.value_low:.4g}–{m.value_high:.4g})")


def _drop(m: Measured) -> str:
    if m.drop is None:
        return "–"
    if m.drop_low is None or m.drop == m.drop_low == m.drop_high:
        return signed(m.drop, m.metric, m.metric_scale)
    between = within(m.drop_low, m.drop_high, m.metric, m.metric_scale)
    return f"{signed(m.drop, m.metric, m.metric_scale)} ({between})"


def _change(original: Measured, last: Measured, sure: str) -> Gain | None:
    """What became of the metric, and whether that is more than chance."""
    if last.drop is None:
        return None
    points = "points of " if in_points(last.metric, last.metric_scale) else ""
    interval = ""
    falls = (last.value or 0.0) < (original.value or 0.0)
    sign = -1 if falls == (last.drop > 0) else 1  # of a metric that is better when it is lower, a drop is a rise
    if last.drop_low is not None and last.drop_high is not None:
        low, high = sorted((sign * last.drop_low, sign * last.drop_high))
        interval = f"({within(low, high, last.metric, last.metric_scale)} at {sure})"
    if float(signed(last.drop, last.metric, last.metric_scale)) == 0:
        return Gain("±0", f"no change in {last.metric}", interval, "neither")
    lost = last.drop_low is not None and last.drop_low > 0 and telling(last, original)
    won = last.drop_high is not None and last.drop_high < 0
    chance = "" if lost or won or not interval or not last.drop_low or last.drop_low > 0 else ": may be chance"
    words = f"{points}change in {last.metric}{chance}"
    return Gain(
        signed(sign * last.drop, last.metric, last.metric_scale),
        words,
        interval,
        "loss" if lost else "gain" if won else "neither",
    )


def _paired(cells: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Two columns without an interval in one, above each other: the page is not to be scrolled sideways."""
    found = dict(zip(COLUMNS, cells, strict=True))
    for above, below in PAIRS:
        found[above] = (found[above][0], found.pop(below)[0])
    return list(found.values())


def _lines(cell: str) -> tuple[str, str]:
    """A figure, and its interval, if it has one, for the line below."""
    figure, _, interval = cell.partition(" (")
    return figure, interval.removesuffix(")")


def stage_table(report: Report) -> Table:
    """The stages for the terminal."""
    table = Table(
        title=f"{escape(report.source)}: each stage, measured on this machine (latency at batch "
        f"{report.call_size}, "
        + (f"{escape(report.signature.sizes_text)}, " if report.signature.sizes_text else "")
        + f"{counted(int(report.environment['threads']), 'threads')})",
        title_justify="left",
    )
    shown = [
        at for at, name in enumerate(COLUMNS) if name not in ("agreement", "load", "memory")
    ]  # those are in the page
    for at in shown:
        name = COLUMNS[at]
        table.add_column(
            "p50" if name.startswith("p50") else escape(report.columns[at]),
            justify="left" if name in ("stage", "runtime") else "right",
            no_wrap=True,
        )
    for cells in _cells(report.stages):
        # The interval of the p50 is in the page, for which there is room.
        table.add_row(*(_lines(cells[at])[0] if COLUMNS[at].startswith("p50") else cells[at] for at in shown))
    return table
