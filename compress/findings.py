"""What the figures say that a reader should not miss: gains that did not come, losses that did."""

from __future__ import annotations

from collections.abc import Sequence

from compress.artifact import StageReport

__all__ = ["findings"]


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
    int8 = by_name.get("quantize_onnx")
    if int8 and floats and _slower(int8.latency_p50_ms, floats.latency_p50_ms):
        found.append(
            f"INT8 is slower here than the float model before it: {int8.latency_p50_ms:.3f} ms against "
            f"{floats.latency_p50_ms:.3f} ms at batch 1. Without --int8 the result would be faster."
        )
    if "prune_channels" in by_name and floats and _slower(floats.latency_p50_ms, onnx.latency_p50_ms):
        found.append(
            f"Pruning removed MACs but gained no time: {floats.latency_p50_ms:.3f} ms against "
            f"{onnx.latency_p50_ms:.3f} ms in ONNX Runtime at batch 1."
        )
    if "prune_channels" in by_name and "finetune" not in by_name:
        found.append("Pruned but not trained since: --finetune usually recovers most of what was lost.")
    if onnx.size_bytes and last.size_bytes and last.size_bytes > onnx.size_bytes:
        found.append(
            f"The file has grown, from {onnx.size_bytes:,} to {last.size_bytes:,} bytes: in so small a model, scales "
            "and Q/DQ nodes outweigh what 8-bit weights save."
        )
    if original.accuracy is not None and last.accuracy is not None and original.accuracy - last.accuracy > 0.01:
        found.append(
            f"Accuracy fell by {100 * (original.accuracy - last.accuracy):.1f} points, from {original.accuracy:.2%} to "
            f"{last.accuracy:.2%}: the stage table shows where."
        )
    if last.cosine_similarity is None:
        found.append("Nothing was compared on real data: without --eval neither accuracy nor agreement is known.")
    return tuple(found)


def _slower(now: float | None, before: float | None) -> bool:
    return now is not None and before is not None and now > before
