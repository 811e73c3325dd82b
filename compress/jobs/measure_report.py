"""What `compress measure` shows in the terminal."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from compress.console.wording import counted
from compress.jobs.measure import Figure, Measurement
from compress.runtime.latency import Ratio

__all__ = ["measure_table"]


def measure_table(found: Measurement) -> Table:
    """A row for each model at each batch size."""
    on = found.environment.get("gpu", found.environment["cpu"])
    at = "".join(f", {dim} = {told['size']} ({told['source']})" for dim, told in found.sizes.items())
    table = Table(title=f"On {on}, in turns{at}; cosine: {_compared(found)}", title_justify="left")
    for column in ("batch", "model", "runtime", "p50", "p99", "samples/s", "over the first (95%)", "cosine to it"):
        table.add_column(column, justify="left" if column in ("model", "runtime") else "right", no_wrap=True)
    for row in found.figures:
        table.add_row(
            str(row.batch), escape(row.model), row.runtime, f"{row.p50_ms:.3f} ms", f"{row.p99_ms:.3f} ms",
            f"{row.throughput:,.0f}", _over(row), f"{row.cosine_similarity:.6f}",
        )  # fmt: skip
    table.caption, table.caption_justify = escape("\n".join([*_not_finite(found), *_apart(found)])) or None, "left"
    return table


def _not_finite(found: Measurement) -> list[str]:
    """Models whose answers hold what is no number, a line each."""
    return [
        f"{row.model}, batch {row.batch}: outputs for {row.not_finite} of {counted(row.looked_at, 'samples')} hold NaN "
        "or infinity; the cosine to these counts as -1, whatever the first gives"
        for row in found.figures
        if row.not_finite
    ]


def _apart(found: Measurement) -> list[str]:
    """Runtimes that compute a file differently, a line each."""
    return [
        f"{row.model}, batch {row.batch}: {row.runtime} computes the file differently than ONNX Runtime: "
        + (
            f"its answers are {row.apart:.2g} of their size from those"
            if row.apart is not None
            else "it gives no numbers where that gives some"
        )
        for row in found.figures
        if row.differs
    ]


def _compared(found: Measurement) -> str:
    """What the answers were compared on: a batch that is larger than the data has its samples several times."""
    by_batch = {row.batch: row.compared for row in found.figures}
    timed = (
        "of one batch of random inputs" if found.data is None else "of the data's samples, taken again to fill a batch"
    )
    if not any(by_batch.values()):
        return timed
    least = min(filter(None, by_batch.values()))
    told = f"the least of {counted(least, 'samples')} of the data"
    larger = [str(batch) for batch, samples in by_batch.items() if not samples]
    return f"{told}; at batch {', '.join(larger)} {timed}" if larger else told


def _over(row: Figure) -> str:
    """Above 1 for faster; what could be noise is told as such."""
    if row.over_first_low is None or row.over_first_high is None or row.over_first_low == row.over_first_high == 1:
        return f"{row.over_first:.2f}×"
    told = Ratio(row.over_first, row.over_first_low, row.over_first_high)
    within = "" if told.faster or told.slower else ", noise"
    return f"{row.over_first:.2f}× ({row.over_first_low:.2f}–{row.over_first_high:.2f}{within})"
