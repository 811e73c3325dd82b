"""What 4-bit weights cost in time, in the report's words: they are for size."""

from __future__ import annotations

from collections.abc import Mapping

from compress.console.wording import Note
from compress.data.dataset import Dataset
from compress.data.sizes import call_size
from compress.evaluate.runtime_choice import BATCHED
from compress.jobs.serving_runtime import at_batch
from compress.model import Model
from compress.runtime.latency import Latency, Ratio, ratio

__all__ = ["few_bits_told"]


def few_bits_told(
    rows: Mapping[str, Model], timed: Mapping[str, Latency], threads: int, data: Dataset | None = None
) -> tuple[Note, ...]:
    """How long the file with 4-bit weights takes beside the float file before it, at batch 1 and at a larger one.

    Args:
        rows: models by row, all in ONNX Runtime.
        timed: at batch 1, by row.
        threads: of each.
        data: whose samples go in; random ones by default.
    """
    both = {name: timed[name] for name in ("fold_onnx", "quantize_int4") if name in timed and name in rows}
    if len(both) < 2:
        return ()
    found = {call_size(rows["fold_onnx"].signature): ratio(*(each.rounds_ms for each in both.values()))}
    if rows["fold_onnx"].signature.batches:
        found[BATCHED] = at_batch({name: rows[name] for name in both}, both, threads, data)
    told = [f"{_longer(each)} at batch {batch}" for batch, each in found.items() if each is not None]
    if not told:
        return ()
    return (
        Note(
            f"4-bit weights are for size: beside the float file before them they take {', '.join(told)}, in ONNX "
            "Runtime on this machine. For time, ask for --int8."
        ),
    )


def _longer(speed: Ratio) -> str:
    """The time that it takes, as a multiple."""
    told = f"{1 / speed.value:.2f} times as long"
    if speed.low is None or speed.high is None:
        return told
    noise = "" if speed.faster or speed.slower else ", within noise"
    return f"{told} ({1 / speed.high:.2f} to {1 / speed.low:.2f}{noise})"
