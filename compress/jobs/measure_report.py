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
    samples = min((row.compared for row in found.figures), default=0)
    alike = f"the least of {counted(samples, 'samples')} of the data" if samples else "of one batch of random inputs"
    table = Table(title=f"On {on}, in turns{at}; cosine: {alike}", title_justify="left")
    for column in ("batch", "model", "runtime", "p50", "p99", "samples/s", "over the first (95%)", "cosine to it"):
        table.add_column(column, justify="left" if column in ("model", "runtime") else "right", no_wrap=True)
    for row in found.figures:
        table.add_row(
            str(row.batch), escape(row.model), row.runtime, f"{row.p50_ms:.3f} ms", f"{row.p99_ms:.3f} ms",
            f"{row.throughput:,.0f}", _over(row), f"{row.cosine_similarity:.6f}",
        )  # fmt: skip
    return table


def _over(row: Figure) -> str:
    """Above 1 for faster; what could be noise is told as such."""
    if row.over_first_low is None or row.over_first_high is None or row.over_first_low == row.over_first_high == 1:
        return f"{row.over_first:.2f}×"
    told = Ratio(row.over_first, row.over_first_low, row.over_first_high)
    within = "" if told.faster or told.slower else ", noise"
    return f"{row.over_first:.2f}× ({row.over_first_low:.2f}–{row.over_first_high:.2f}{within})"
