"""What the figures say that a reader should not miss: gains that did not come, losses that did."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from compress.artifact import Measured, StageReport
from compress.console.wording import Note
from compress.evaluate.gains import apart, in_points, speed, within
from compress.evaluate.intervals import CONFIDENCE, percent
from compress.runtime.latency import ALIKE

__all__ = ["findings", "telling"]

BATCH_DIFFERENCE = 0.01
# Points that are nobody's loss, of a metric from 0 to 1; of others as a share of the original's, or as it stands of 0.
LEAST_POINTS, LEAST_SHARE, LEAST = 0.05, 5e-4, 1e-4
IN_POINTS = ("top1", "top5", "agreement", "cosine")


def telling(now: Measured, original: Measured) -> bool:
    """Whether what was lost is worth a word, however sure it is."""
    if now.drop is None:
        return False
    if now.metric in IN_POINTS:
        return now.drop >= LEAST_POINTS
    if now.metric == "mse" and now.drop_constant:  # the outputs' variance: the unit that they have
        return now.drop >= LEAST_SHARE * now.drop_constant
    scale = now.metric_scale or (1 if now.metric == "mse" else 100)
    return now.drop >= scale * (LEAST_SHARE * abs(original.value or 0.0) or LEAST)


def findings(rows: Sequence[StageReport], confidence: float = CONFIDENCE, batch: int = 1) -> tuple[str, ...]:
    """Warnings, each in one sentence, and notes among them.

    Args:
        rows: "original" first, "original_onnx" where that is no ONNX file itself, then the stages in order.
        confidence: of the metric's intervals.
        batch: at which latencies were taken.
    """
    by_name = {row.stage: row.measured for row in rows}
    found = [warning for row in rows for warning in row.warnings]
    original = by_name["original"]
    onnx = by_name.get("original_onnx", original)
    last = rows[-1].measured
    floats = by_name.get("fold_onnx")
    int8 = by_name.get("quantize_onnx") or by_name.get("quantize_within") or by_name.get("quantize_faster")
    elsewhere = any(row.options.get("target", "cpu") != "cpu" for row in rows)
    engine = any(row.stage == "engine_from_onnx" for row in rows)
    if elsewhere and not engine:
        found.append(
            Note(
                "The file is made for a GPU, and was measured with ONNX Runtime on this CPU: its accuracy holds there, "
                "its latency says nothing. `compress measure --device cuda` tells it where a GPU is."
            )
        )
    if last.runtime is not None and last.runtime.endswith("emulated"):
        found.append(
            f"{last.runtime}: what is said of its accuracy holds, its speed was not measured. The file is for GPUs, "
            "and for OpenVINO on CPUs that multiply BF16."
        )
    if not elsewhere and int8 and floats and (slower := _slower(floats, int8, batch)):
        found.append(
            f"INT8 is {slower} here than the float model before it. Without --int8 the result would be faster."
        )
    elif not elsewhere and int8 and floats and _in_int8(rows) and (unsure := _no_faster(floats, int8, batch)):
        found.append(f"INT8 is used, but no gain in time over the float model can be told from noise: {unsure}.")
    # A budget that the model keeps as it is takes nothing away.
    pruned = any(
        row.stage.startswith(("prune", "drop_blocks")) and row.details.get("macs_removed") != 0 for row in rows
    )
    if pruned and floats and (slower := _slower(onnx, floats, batch)):
        found.append(f"Pruning removed MACs, and yet the model is {slower} in ONNX Runtime than it was.")
    elif pruned and floats and (unsure := _no_faster(onnx, floats, batch)):
        found.append(f"Pruning removed MACs, but no gain in time can be told from noise: {unsure}.")
    found += _regained(rows)
    if pruned and "finetune" not in by_name:
        repaired = any(row.stage.startswith("repair_channels") and row.details.get("kept") for row in rows)
        recovers = "may recover more" if repaired else "usually recovers most of what was lost"
        found.append(Note(f"Pruned but not trained since: --finetune {recovers}."))
    if onnx.size_bytes and last.size_bytes and last.size_bytes > onnx.size_bytes:
        grown = f"The file has grown, from {onnx.size_bytes:,} to {last.size_bytes:,} bytes"
        scales = ": in so small a model, scales and further nodes outweigh what weights of few bits save"
        layers = [row.details.get("layers", {}) for row in rows if row.stage.startswith("quantize")]
        quantized = any(each.get("int8") or each.get("int4") for each in layers)
        found.append(f"{grown}{scales if quantized and not engine else ''}.")
    if last.drop is not None and original.value is not None and last.value is not None and telling(last, original):
        went = "rose" if last.value > original.value else "fell"
        points = in_points(last.metric, last.metric_scale)
        unit = " points" if points else ""
        before, after = apart(original.value, last.value, 4)
        if not points:
            before, after = f"{original.value:.4g}", f"{last.value:.4g}"
        loss = f"{last.drop:.2f}" if last.metric in IN_POINTS else f"{last.drop:.3g}"
        fell = f"{last.metric} {went} by {loss}{unit}, from {before} to {after}"
        if last.drop_low is None:
            found.append(f"{fell}, without an interval that would say how sure this is: the stage table shows where.")
        elif last.drop_low > 0:
            found.append(f"{fell}: the stage table shows where.")
        elif last.drop_high is not None and (last.drop_high > 1 or not points):
            ends = within(last.drop_low, last.drop_high, last.metric, last.metric_scale).replace(" to ", " and ")
            found.append(
                f"{fell}, which may be chance: at {percent(confidence)} confidence the drop is between {ends}{unit}. "
                "More evaluation samples would tell."
            )
    if last.drop is not None and last.drop_constant is not None and last.drop >= last.drop_constant > 0:
        unit = " points" if in_points(last.metric, last.metric_scale) else ""
        found.append(
            f"The result keeps nothing of {last.metric}: its drop is {last.drop:.4g}{unit}, and an answer that looks "
            f"at nothing loses {last.drop_constant:.4g}. No budget counts as kept."
        )
    if last.batch_difference is not None and last.batch_difference > BATCH_DIFFERENCE:
        found.append(_of_its_batch(original, last, dynamic="dynamic" in str(rows[-1].options.get("mode"))))
    if last.metric is None:
        found.append("Nothing was compared on real data: without --eval neither accuracy nor agreement is known.")
    return tuple(found)


def _regained(rows: Sequence[StageReport]) -> list[Note]:
    """What the repair and the training behind a pruning brought, by the metric."""
    found = []
    for before, row in itertools.pairwise(rows):
        repair = row.stage.startswith("repair_channels") and row.details.get("kept")
        training = row.stage.startswith("finetune") and before.stage.startswith(("prune", "drop_blocks", "repair"))
        was, now = before.measured.value, row.measured.value
        if (repair or training) and was is not None and now is not None:
            left, right = apart(was, now, 4)
            by = "The repair, without training," if repair else "Training"
            found.append(Note(f"{by} took {row.measured.metric} from {left} to {right} ({row.stage})."))
    return found


def _of_its_batch(original: Measured, last: Measured, *, dynamic: bool) -> str:
    here, first = last.batch_difference or 0.0, original.batch_difference or 0.0
    told = f"An answer depends on what else is in its batch, by up to {here:.1%} of the largest output"
    others = "a server that joins requests to batches will give other answers than one that does not."
    if first > BATCH_DIFFERENCE:
        return f"{told}, as the original's does, by up to {first:.1%}: {others}"
    if dynamic:
        return (
            f"{told}: dynamic INT8 takes its ranges over the whole batch. Static INT8 does not; a server that joins "
            "requests to batches wants that."
        )
    return f"{told}: {others}"


def _in_int8(rows: Sequence[StageReport]) -> bool:
    """Whether a layer is: a stage that left all in float has said why."""
    return not any(row.stage.startswith("quantize") and row.details.get("layers", {}).get("int8") == 0 for row in rows)


def _slower(before: Measured, now: Measured, batch: int) -> str:
    """By how much, if that is beyond doubt, as "… slower (…)"; empty otherwise."""
    ratio = speed(before, now)
    if ratio is None or ratio.low is None or ratio.high is None or not ratio.slower:
        return ""
    low, high = apart(1 / ratio.high, 1 / ratio.low, 2)
    told = "; {1} ms against {0} ms".format(*apart(before.latency_p50_ms or 0.0, now.latency_p50_ms or 0.0))
    # On a machine of two speeds, the median round of one model may be a fast one, and that of the other a slow one.
    if (now.latency_p50_ms or 0.0) < (before.latency_p50_ms or 0.0):
        told = ", paired by round"
    return f"{1 / ratio.value:.2f}× slower ({low} to {high}{told} at batch {batch})"


def _no_faster(before: Measured, now: Measured, batch: int) -> str:
    """Between which ratios, if it is beyond doubt neither faster nor slower; empty otherwise.

    An interval that lies on one side of 1 says so: it is smaller than what two sessions of one file may differ by.
    """
    ratio = speed(before, now)
    if ratio is None or ratio.low is None or ratio.high is None or ratio.faster or ratio.slower:
        return ""
    told = f"in ONNX Runtime at batch {batch} it is {ratio.low:.2f} to {ratio.high:.2f} times as fast"
    if ratio.low <= 1 <= ratio.high:
        return told
    return f"{told}, and two sessions of one file differ by up to {ALIKE:.0%}"
