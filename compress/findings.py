"""What the figures say that a reader should not miss: gains that did not come, losses that did."""

from __future__ import annotations

from collections.abc import Sequence

from compress.artifact import Measured, StageReport
from compress.gains import apart, speed

__all__ = ["findings"]

BATCH_DIFFERENCE = 0.01


def findings(rows: Sequence[StageReport]) -> tuple[str, ...]:
    """Warnings, each in one sentence.

    Args:
        rows: "original" and "original_onnx" first, then the stages in order.
    """
    by_name = {row.stage: row.measured for row in rows}
    found = [warning for row in rows for warning in row.warnings]
    original, onnx = by_name["original"], by_name["original_onnx"]
    last = rows[-1].measured
    floats = by_name.get("fold_onnx")
    int8 = by_name.get("quantize_onnx") or by_name.get("quantize_within")
    elsewhere = any(row.options.get("target", "cpu") != "cpu" for row in rows)
    engine = any(row.stage == "engine_from_onnx" for row in rows)
    if elsewhere and not engine:
        found.append(
            "The file is made for a GPU, and was measured with ONNX Runtime on this CPU: its accuracy holds there, its "
            "latency says nothing. `compress measure --device cuda` tells it where a GPU is."
        )
    if not elsewhere and int8 and floats and (slower := _slower(floats, int8)):
        found.append(
            f"INT8 is slower here than the float model before it: {slower}. Without --int8 the result would be faster."
        )
    pruned = any(name.startswith("prune") for name in by_name)
    if pruned and floats and (slower := _slower(onnx, floats)):
        found.append(f"Pruning removed MACs but gained no time in ONNX Runtime: {slower}.")
    elif pruned and floats and (unsure := _as_fast(onnx, floats)):
        found.append(f"Pruning removed MACs, but no gain in time could be told from noise: {unsure}.")
    if pruned and "finetune" not in by_name:
        found.append("Pruned but not trained since: --finetune usually recovers most of what was lost.")
    if onnx.size_bytes and last.size_bytes and last.size_bytes > onnx.size_bytes:
        found.append(
            f"The file has grown, from {onnx.size_bytes:,} to {last.size_bytes:,} bytes: in so small a model, scales "
            "and Q/DQ nodes outweigh what 8-bit weights save."
        )
    # What would be printed as a loss of 0.00 is none.
    if last.drop is not None and original.value is not None and last.value is not None and round(last.drop, 2) > 0:
        went = "rose" if last.value > original.value else "fell"
        unit = "" if last.metric == "mse" else " points"
        before, after = apart(original.value, last.value, 4)
        fell = f"{last.metric} {went} by {last.drop:.2f}{unit}, from {before} to {after}"
        if last.drop_low is not None and last.drop_low > 0:
            found.append(f"{fell}: the stage table shows where.")
        elif last.drop > 0 and last.drop_high is not None and last.drop_high > 1:
            found.append(
                f"{fell}, which may be chance: between {last.drop_low:+.2f} and {last.drop_high:+.2f} points at 95%. "
                "More evaluation samples would tell."
            )
    if last.batch_difference is not None and last.batch_difference > BATCH_DIFFERENCE:
        found.append(
            f"An answer depends on what else is in its batch, by up to {last.batch_difference:.1%} of the largest "
            "output: dynamic INT8 takes its ranges over the whole batch. Static INT8 does not; a server that joins "
            "requests to batches wants that."
            if "dynamic" in str(rows[-1].options.get("mode"))
            else f"An answer depends on what else is in its batch, by up to {last.batch_difference:.1%} of the largest "
            "output: a server that joins requests to batches will give other answers than one that does not."
        )
    if last.cosine_similarity is None:
        found.append("Nothing was compared on real data: without --eval neither accuracy nor agreement is known.")
    return tuple(found)


def _slower(before: Measured, now: Measured) -> str:
    """By how much, if that is beyond doubt; empty otherwise."""
    ratio = speed(before, now)
    if ratio is None or ratio.low is None or ratio.high is None or not ratio.slower:
        return ""
    low, high = apart(1 / ratio.high, 1 / ratio.low, 2)
    told = "{1} ms against {0} ms".format(*apart(before.latency_p50_ms or 0.0, now.latency_p50_ms or 0.0))
    return f"{1 / ratio.value:.2f}× ({low} to {high}), {told} at batch 1"


def _as_fast(before: Measured, now: Measured) -> str:
    """Between which ratios, if neither is beyond doubt the faster; empty otherwise."""
    ratio = speed(before, now)
    if ratio is None or ratio.low is None or ratio.high is None or ratio.faster or _slower(before, now):
        return ""
    return f"{ratio.low:.2f} to {ratio.high:.2f} times as fast in ONNX Runtime at batch 1"
