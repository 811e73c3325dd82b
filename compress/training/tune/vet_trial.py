"""Whether what a file says of a trial is what a search could have written: from anything else it takes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from compress.evaluate.metrics import METRICS
from compress.evaluate.output_kind import OutputKind
from compress.training.updates.vet_state import has, is_number, is_whole, tells

__all__ = ["QUARTERS", "is_trial"]

QUARTERS = 4
TRIAL = ("settings", "metric", "higher_is_better", "reported", "value", "pruned_at", "failed", "seconds")
TRAINED = ("first", "last", "steps", "figures", "warnings", "notes")
# By what epochs are judged (compress.training.judging), beside shares: the least and the most.
RANGES = {"mse": (0.0, math.inf), "loss": (0.0, math.inf), "r2": (-math.inf, 1.0), "miou": (0.0, 1.0)}
ROUNDED = 1e-5  # a mean of scores in single precision may be so much beyond them


def is_trial(told: Any) -> bool:
    """Whether it has the parts of a trial, each of its kind and within its range, that go together.

    Args:
        told: JSON values.
    """
    if not has(told, "trial", "trained") or not has(told["trial"], *TRIAL):
        return False
    trial, trained = told["trial"], told["trained"]
    value, pruned_at, failed = trial["value"], trial["pruned_at"], trial["failed"]
    if type(failed) is not str or not is_number(trial["seconds"]) or trial["seconds"] < 0 or not _judged(trial):
        return False
    if (value is not None) + (pruned_at is not None) + bool(failed) != 1 or (value is None) != (trained is None):
        return False
    if pruned_at is not None:
        return is_whole(pruned_at, 1, QUARTERS - 1) and str(pruned_at) == max(trial["reported"], default="")
    return value is None or (_in_range(value, trial["metric"]) and _trained(trained, trial))


def _judged(trial: Mapping[str, Any]) -> bool:
    """By a metric that is known, at quarters of its epochs; one that failed may never have been."""
    metric, higher, reported = trial["metric"], trial["higher_is_better"], trial["reported"]
    if type(metric) is not str or type(higher) is not bool or type(reported) is not dict:
        return False
    if metric == "":
        return higher and not reported and bool(trial["failed"])
    if metric not in METRICS and metric not in RANGES:
        return False
    known = metric in METRICS and METRICS[metric].higher_is_better
    quarters = {str(quarter) for quarter in range(1, QUARTERS + 1)}
    return (
        higher == known and reported.keys() <= quarters and all(_in_range(value, metric) for value in reported.values())
    )


def _in_range(value: Any, metric: str) -> bool:
    bounds = METRICS[metric].bounds if metric in METRICS else None
    low, high = bounds or RANGES.get(metric, (-math.inf, math.inf))
    return is_number(value) and low - ROUNDED <= value <= high + ROUNDED


def _trained(told: Any, trial: Mapping[str, Any]) -> bool:
    if not has(told, *TRAINED) or type(told["figures"]) is not dict:
        return False
    warnings, notes, figures = told["warnings"], told["notes"], told["figures"]
    if type(warnings) is not list or not all(type(text) is str for text in warnings):
        return False
    if type(notes) is not list or not all(is_whole(place, 0, len(warnings) - 1) for place in notes):
        return False
    if not is_number(told["first"]) or not is_number(told["last"]) or not is_whole(told["steps"], 1):
        return False
    if not NEEDED.keys() <= figures.keys() <= NEEDED.keys() | OTHERS.keys():
        return False
    if not all((NEEDED | OTHERS)[name](value) for name, value in figures.items()):
        return False
    epochs = figures["history"]
    return (
        tells(epochs, figures["curve"])
        and bool(epochs)
        and (told["first"], told["last"]) == (epochs[0]["loss"], epochs[-1]["loss"])
        and all(_in_range(row["validation"], trial["metric"]) for row in epochs if "validation" in row)
        and told["steps"] == figures["steps"]
        and is_whole(figures["best_epoch"], 1, epochs[-1]["epoch"])
        and figures["best_value"] == trial["value"]
        and figures["validation_metric"] == trial["metric"]
    )


def _count(value: Any) -> bool:
    return is_whole(value, 0)


def _some(value: Any) -> bool:
    return is_whole(value, 1)


def _amount(value: Any) -> bool:
    return is_number(value) and value >= 0


def _text(value: Any) -> bool:
    return type(value) is str


def _truth(value: Any) -> bool:
    return type(value) is bool


def _list(value: Any) -> bool:
    return type(value) is list


def _texts(value: Any) -> bool:
    return type(value) is list and all(map(_text, value))


def _tried(value: Any) -> bool:
    return type(value) is dict and all(
        size.isdecimal() and (speed is None or _amount(speed)) for size, speed in value.items()
    )


def _outputs(value: Any) -> bool:
    return type(value) is dict and all(
        has(form, "taken_as", "ending", "because")
        and form["taken_as"] in [str(kind) for kind in OutputKind]
        and (form["ending"] is None or type(form["ending"]) is str)
        and type(form["because"]) is str
        for form in value.values()
    )


def _samples(value: Any) -> bool:
    names = ("utilization", "memory_bytes", "power_watts", "seconds")
    return type(value) is list and all(has(each, *names) and all(map(_amount, each.values())) for each in value)


NEEDED: dict[str, Callable[[Any], bool]] = {
    "history": _list, "curve": _list, "training_seconds": _amount,
    "cpu_utilization": _amount, "peak_memory_bytes": _count, "samples_per_second": _amount, "compiled": _truth,
    "steps": _some, "samples": _some, "batch_size": _some, "batch_sizes_tried": _tried, "learning_rate": _amount,
    "precision": _text, "device": _text, "processes": _some, "threads": _some, "loader_workers": _count,
    "rollbacks": _count, "outputs": _outputs, "resumed_at_step": lambda value: value is None or _count(value),
    "best_epoch": _some, "best_value": is_number, "validation_metric": _text,
}  # fmt: skip
OTHERS: dict[str, Callable[[Any], bool]] = {
    "peak_device_bytes": _count, "answers_seconds": _amount, "compile_note": _text, "features": _texts,
    "gpu": _samples, "gpu_unknown": _text,
}  # fmt: skip
