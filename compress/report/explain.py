"""What `compress explain` shows in the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from compress.console.wording import counted
from compress.evaluate.intervals import CONFIDENCE, percent

if TYPE_CHECKING:
    from compress.jobs.explain import Explanation

__all__ = ["exclusions_told", "explain_tables", "not_finite_told", "notes_told"]


def explain_tables(found: Explanation, rows: int | None) -> list[Table]:
    """Layers, tensors, ranges that clip and channels that died; the worst first, so many of each at most."""
    error = "not finite" if found.error is None else f"{found.error:.3g} of their size"
    over = f"{counted(found.samples, 'samples')}, error of the outputs {error}"
    layers = _table(
        f"each layer alone as in the original ({over})",
        "layer",
        "kind",
        f"share of the error gone ({percent(CONFIDENCE)})",
    )
    for layer in found.layers[:rows]:
        layers.add_row(escape(layer.name), layer.kind, share_text(layer.share, layer.low, layer.high))
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


def share_text(share: float, low: float | None, high: float | None) -> str:
    """+58.9% (+40.1 to +70.2)."""
    return f"{share:+.1%}" + ("" if low is None or high is None else f" ({100 * low:+.1f} to {100 * high:+.1f})")


def not_finite_told(found: Explanation) -> str:
    """What to warn of where outputs are no numbers, and the original's are."""
    told = f"outputs of {found.not_finite} of {counted(found.samples, 'samples')} are NaN or infinite"
    return f"{told}, the original's are not: no error and no layer's share of it can be given"


def notes_told(found: Explanation, rows: int | None) -> Iterator[str]:
    """What the tables leave out, and why; of what could not be compared so many at most, what holds for all first."""
    if scaled := sum(tensor.rescaled for tensor in found.tensors):
        told = f"{counted(scaled, 'tensors')} differ by a scale for each channel"
        yield f"{told}, which is gone in the outputs (smoothing): their dB are with these scales fitted"
    for name, why in sorted(found.unmatched.items(), key=lambda pair: pair[0] != "layers")[:rows]:
        yield f"{name} could not be compared: {why}"


def exclusions_told(found: Explanation) -> str:
    """What became of the search for layers to keep in float; "" where there was none."""
    if found.gone is None:
        return "no exclusion found that mends it" if found.searched else ""
    share = share_text(found.gone.share, found.gone.low, found.gone.high)
    proof = f"of the outputs' error on {counted(found.gone.samples, 'samples')} that had no part in the choice"
    if found.emptied:
        told = f"no exclusion found that leaves layers in INT8: with all in float, {share} {proof} is gone"
        return f"{told}; leave --int8 out of the export"
    if not found.keep_float:
        return f"no exclusion found that mends it: the best, {', '.join(found.tried)}, takes {share} {proof}"
    return f"with these in float, {share} {proof} is gone; add to the export: {found.flags}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        left = column in ("layer", "kind", "tensor", "channels")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    return table
