"""For the report: which layers' INT8 lost what, where an export lost more than its noise by it."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from compress.artifact import StageReport
from compress.console.wording import Note, counted
from compress.errors import ToolkitError
from compress.evaluate.evaluation import Evaluation
from compress.evaluate.judge import spread
from compress.jobs.explain import Explanation, explained_within
from compress.jobs.prove import Found, loss_between
from compress.model import OnnxModel
from compress.pipeline import Outcome, Watcher
from compress.report.explain import exclusions_told, share_text
from compress.report.findings import telling

__all__ = ["blamed", "blamed_told"]

SECONDS = 30.0
SAMPLES = 128


def blamed(
    reports: Sequence[StageReport],
    outcomes: Mapping[str, Outcome],
    found: Found,
    judged: Evaluation | None,
    watcher: Watcher,
) -> tuple[Explanation | None, tuple[str, ...]]:
    """What static INT8 did to each layer, and a finding that says so.

    Nothing, where there was no loss by it beyond chance, or where mixed precision has looked at the layers already.
    Where it would take longer than `SECONDS`, the finding names the command that does it.

    Args:
        reports: the rows, in order.
        outcomes: of the stages, by row.
        found: what was measured.
        judged: evaluation data.
        watcher: is told how it goes on.
    """
    names = [*outcomes]
    at = next((at for at, name in enumerate(names) if outcomes[name].stage.name == "quantize_onnx"), 0)
    if judged is None or not at or outcomes[names[at]].stage.options.get("mode") != "static":
        return None, ()
    before, name = names[at - 1], names[at]
    models = outcomes[before].given.model, outcomes[name].given.model
    told = {row.stage: row.measured for row in reports}
    lost = loss_between(found, name, before)
    by_stage = dataclasses.replace(told[name], drop=told[name].stage_drop)
    if lost is None or lost <= 0 or not telling(by_stage, told["original"]):
        return None, ()
    if not (isinstance(models[0], OnnxModel) and isinstance(models[1], OnnxModel)):
        return None, ()
    with tempfile.TemporaryDirectory() as folder:
        try:
            made = explained_within(SECONDS, models[0], models[1], spread(judged.proof, SAMPLES), Path(folder), watcher)
        except ToolkitError as err:
            return None, (Note(f"Which layer's INT8 lost it can't be told: {err.why}."),)
    if made is None:
        more = "`compress explain` tells, with the evaluation data as --data"
        return None, (Note(f"Which layer's INT8 lost it would take over {SECONDS:.0f} s to measure: {more}."),)
    return made, blamed_told(made)


def blamed_told(found: Explanation) -> tuple[str, ...]:
    """A note of the worst layer, and of what would mend it."""
    if not found.layers or found.layers[0].low is None or found.layers[0].low <= 0:
        return ()
    worst = found.layers[0]
    share = share_text(worst.share, worst.low, worst.high)
    over = counted(found.samples, "samples")
    first = f"Of the outputs' error by INT8, {share} goes with {worst.name} alone in float ({over})"
    more = exclusions_told(found)
    return (Note(f"{first}; {more}." if more else f"{first}."),)
