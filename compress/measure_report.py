"""What `compress measure` shows in the terminal."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from compress.measured import Measurement

__all__ = ["measure_table"]


def measure_table(found: Measurement) -> Table:
    """A row for each model at each batch size."""
    on = found.environment.get("gpu", found.environment["cpu"])
    table = Table(title=f"On {on}, in turns", title_justify="left")
    for column in ("batch", "model", "runtime", "p50", "p99", "samples/s", "over the first", "cosine to it"):
        table.add_column(column, justify="left" if column in ("model", "runtime") else "right", no_wrap=True)
    for row in found.figures:
        table.add_row(
            str(row.batch), escape(row.model), row.runtime, f"{row.p50_ms:.3f} ms", f"{row.p99_ms:.3f} ms",
            f"{row.throughput:,.0f}", f"{row.over_first:.2f}×", f"{row.cosine_similarity:.6f}",
        )  # fmt: skip
    return table
