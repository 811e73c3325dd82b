"""A training told: terminal table, and a self-contained page with plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from compress.console.wording import counted
from compress.evaluate.gains import signed, within
from compress.report.pages import page
from compress.report.training_plots import settings_of, training_plots, trial_rows

__all__ = ["training_table", "write_page"]


def training_table(metric: str, rows: Sequence[Any]) -> Table:
    """The models, judged."""
    table = Table()
    for column in ("model", metric, "95%", "drop", "95%"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        interval = "" if row.low is None else f"{row.low:.4f} to {row.high:.4f}"
        drop = "" if row.drop is None else signed(row.drop, metric)
        spread = "" if row.drop is None else within(row.drop_low, row.drop_high, metric)
        table.add_row(row.name, f"{row.value:.4f}", interval, drop, spread)
    return table


def write_page(report: Mapping[str, Any], path: Path) -> None:
    """Write training.html."""
    training = report["training"]
    facts = {
        "trained": report["did"].removeprefix("trained "),
        "device": f"{training['device']}, {counted(training['processes'], 'processes')}"
        + (f", each of {counted(training['threads'], 'threads')}" if "threads" in training else ""),
        "precision": training["precision"] + (", compiled" if training["compiled"] else ""),
        "batch size": training["batch_size"],
        "speed": f"{training.get('samples_per_second', 0):,.0f} samples a second",
        "time in steps": f"{training['training_seconds']:.1f} s",
        "processor in use": f"{training['cpu_utilization']:.0%} of its cores",
        "memory at most": f"{training['peak_memory_bytes'] / 1e6:,.0f} MB",
        "memory of the device at most": f"{training['peak_device_bytes'] / 1e6:,.0f} MB"
        if "peak_device_bytes" in training
        else None,
        "torch.compile": training.get("compile_note"),
        "features taught": ", ".join(training["features"]) if "features" in training else None,
        "NVML": training.get("gpu_unknown"),
    }
    html = page(
        "training.html",
        report=report,
        training=training,
        plots=training_plots(training),
        searches=[("the training", training["tuning"], settings_of(training), trial_rows(training))]
        if "tuning" in training
        else [],
        facts={name: value for name, value in facts.items() if value is not None},
    )
    path.write_bytes(html.encode("utf-8", "backslashreplace"))
