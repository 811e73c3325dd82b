"""Whether a kept state is one that this training could have written: from anything else it does not go on."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch

from compress.training.updates.rollback import MOST

__all__ = ["alike", "fits", "has", "is_number", "is_state", "is_whole", "tells"]

ROWS = 100_000
"""Of a journal, at most."""
ROW = ("epoch", "loss", "seconds", "samples_per_second")


def is_state(found: Any, samples: int) -> bool:
    """Whether it has the parts of a state, but for those that only a training knows: see `fits`.

    Args:
        found: read from a file, with plain values of exact types.
        samples: of the training data.
    """
    if not has(found, "position", "rollback", "size", "tried", "warnings"):
        return False
    back = found["rollback"]
    return (
        has(back, "count", "scale", "back_to")
        and is_whole(back["count"], 0, MOST)
        and is_number(back["scale"])
        and 0 < back["scale"] <= 1
        and is_whole(back["back_to"], -1)
        and is_whole(found["size"], 1, max(1, samples))
        and type(found["tried"]) is dict
        and all(is_whole(size, 1) and (speed is None or is_number(speed)) for size, speed in found["tried"].items())
        and type(found["warnings"]) is list
        and all(type(text) is str for text in found["warnings"])
        and has(found["position"], "step", "best", "stepper", "journal")
    )


def fits(position: Mapping[str, Any], first: Mapping[str, Any], steps: int, *, judged: bool) -> bool:
    """Whether a training can go on from a position.

    Args:
        position: of a state.
        first: this training's, before its first step.
        steps: of the whole training.
        judged: whether there is validation data.
    """
    stepper, begun, best = position["stepper"], first["stepper"], position["best"]
    weights = begun["module"]
    if not is_whole(position["step"], 0, steps) or not has(stepper, *begun):
        return False
    if best is not None and not (
        judged
        and has(best, "value", "epoch", "state")
        and is_number(best["value"])
        and is_whole(best["epoch"], 0)
        and alike(best["state"], weights)
    ):
        return False
    return (
        alike(stepper["module"], weights)
        and (stepper["average"] is None) == (begun["average"] is None)
        and (stepper["average"] is None or alike(stepper["average"], begun["average"]))
        and type(stepper["scaler"]) is dict
        and all(type(name) is str and is_number(value) for name, value in stepper["scaler"].items())
        and (stepper["compiled"] is None or type(stepper["compiled"]) is bool)
        and _optimizes(stepper["optimizer"], begun["optimizer"], weights)
        and _journal(position["journal"], first["journal"])
    )


def _optimizes(found: Any, begun: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> bool:
    if not has(found, *begun) or type(found["state"]) is not dict or type(found["param_groups"]) is not list:
        return False
    groups = found["param_groups"]
    if len(groups) != len(begun["param_groups"]):
        return False
    for group, wanted in zip(groups, begun["param_groups"], strict=True):
        if not has(group, *wanted) or group["params"] != wanted["params"]:
            return False
        if not all(_like(group[name], value) for name, value in wanted.items()):
            return False
    numbers = {number for group in begun["param_groups"] for number in group["params"]}
    shapes = {tensor.shape for tensor in weights.values()} | {torch.Size([])}
    return all(
        number in numbers and type(kept) is dict and all(_kept(value, shapes) for value in kept.values())
        for number, kept in found["state"].items()
    )


def _kept(value: Any, shapes: set[torch.Size]) -> bool:
    if isinstance(value, torch.Tensor):
        return value.shape in shapes and (not value.is_floating_point() or bool(torch.isfinite(value).all()))
    return value is None or is_number(value)


def _journal(found: Any, begun: Mapping[str, Any]) -> bool:
    if not has(found, *begun) or not is_number(found["seconds"]) or not has(found["sums"], *begun["sums"]):
        return False
    return all(is_number(value) for value in found["sums"].values()) and tells(found["epochs"], found["curve"])


def tells(epochs: Any, curve: Any) -> bool:
    """Whether they are what a journal tells: a row for each epoch; step, loss and rate of some steps."""
    return (
        type(epochs) is list
        and type(curve) is list
        and len(epochs) + len(curve) <= ROWS
        and all(
            type(row) is dict and set(ROW) <= row.keys() <= {*ROW, "validation"} and all(map(is_number, row.values()))
            for row in epochs
        )
        and all(type(point) is list and len(point) == 3 and all(map(is_number, point)) for point in curve)
    )


def alike(found: Any, wanted: Mapping[str, torch.Tensor]) -> bool:
    """Whether all tensors are there, with their shapes and types, and of numbers."""
    return has(found, *wanted) and all(
        isinstance(tensor := found[name], torch.Tensor)
        and tensor.shape == like.shape
        and tensor.dtype == like.dtype
        and (not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()))
        for name, like in wanted.items()
    )


def _like(found: Any, wanted: Any) -> bool:
    if type(wanted) in (list, tuple):
        return type(found) in (list, tuple) and len(found) == len(wanted) and all(map(_like, found, wanted))
    if type(wanted) in (int, float):
        return is_number(found)
    return type(found) is type(wanted)


def has(found: Any, *names: str) -> bool:
    """Whether it is a dict of these keys."""
    return type(found) is dict and found.keys() == set(names)


def is_whole(value: Any, least: int, most: float = math.inf) -> bool:
    """Whether it is a whole number within these."""
    return type(value) is int and least <= value <= most


def is_number(value: Any) -> bool:
    """Whether it is a finite number, which a float can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max
