"""Outputs whose samples do not come first: labels can't be held against them, nor can it be told by sample."""

from __future__ import annotations

from compress.artifact import Signature
from compress.console.wording import Note
from compress.errors import RecipeError
from compress.evaluate.metrics import METRICS, Metric

__all__ = ["samples_elsewhere"]


def samples_elsewhere(metric: Metric, signature: Signature) -> tuple[str, ...]:
    """Words on outputs whose samples do not come first, as of [tokens, samples, classes].

    Args:
        metric: judges all outputs, or one.
        signature: says by name which dimension counts samples.

    Raises:
        RecipeError: labels, whose samples do, are held against one: where there are as many tokens as samples, nothing
            else would tell.
    """
    for place, spec in enumerate(signature.outputs):
        axis = signature.samples_axis(place)
        if not axis or metric.output not in (None, spec.name):
            continue
        shown = f"{spec.name!r} is {spec.dtype}[{', '.join(map(str, spec.shape))}]"
        if metric.needs_labels and metric.name in METRICS:
            raise RecipeError(
                f"can't judge {spec.name!r} by {metric.name}",
                why=f"{shown}: samples are its dimension {axis + 1}, and those of the labels come first",
                mend="let the model give it with samples first (transpose it), leave the labels out, or give "
                "--metric package.module:function, which is handed outputs and labels as they are",
            )
        told = f"{shown}: its samples do not come first, so it is judged by row of its first dimension, not by sample."
        return (Note(told),)
    return ()
