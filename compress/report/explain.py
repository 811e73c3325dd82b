"""What `compress explain` shows in the terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from compress.console.wording import counted

if TYPE_CHECKING:
    from compress.jobs.explain import Explanation

__all__ = ["explain_tables"]


def explain_tables(found: Explanation, rows: int | None) -> list[Table]:
    """Layers, tensors, ranges that clip and channels that died; the worst first, so many of each at most."""
    error = "not finite" if found.error is None else f"{found.error:.3g} of their size"
    over = f"{counted(found.samples, 'samples')}, error of the outputs {error}"
    layers = _table(f"each layer alone as in the original ({over})", "layer", "kind", "share of the error gone")
    for layer in found.layers[:rows]:
        layers.add_row(escape(layer.name), layer.kind, f"{layer.share:+.1%}")
    tensors = _table("signal to noise of tensors that both have", "tensor", "dB")
    worst = sorted(found.tensors, key=lambda each: math.inf if each.snr_db is None else each.snr_db)
    for tensor in worst[:rows]:
        tensors.add_row(escape(tensor.name), "equal" if tensor.snr_db is None else f"{tensor.snr_db:.1f}")
    ranges = _table("ranges that clip", "tensor", "from", "to", "values beyond")
    for each in found.ranges[:rows]:
        ranges.add_row(escape(each.tensor), f"{each.low:.4g}", f"{each.high:.4g}", f"{each.clipped:.2%}")
    dead = _table("channels that are constant now, and were not", "tensor", "channels")
    for tensor in [each for each in found.tensors if each.dead_channels][:rows]:
        shown = ", ".join(map(str, tensor.dead_channels[:8]))
        more = len(tensor.dead_channels) - 8
        dead.add_row(escape(tensor.name), shown + (f" and {more} more" if more > 0 else ""))
    return [table for table in (layers, tensors, ranges, dead) if table.row_count]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        left = column in ("layer", "kind", "tensor", "channels")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    return table
