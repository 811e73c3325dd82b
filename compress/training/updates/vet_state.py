"""Whether a kept state is one that this training could have written: from anything else it does not go on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from compress.training.updates.rollback import MOST

__all__ = ["alike", "fits", "is_state"]

ROWS = 100_000
"""Of a journal, at most."""
ROW = ("epoch", "loss", "seconds", "samples_per_second")


def is_state(found: Any, samples: int) -> bool:
    """Whether it has the parts of a state, but for those that only a training knows: see `fits`.

    Args:
        found: read from a file, with plain values of exact types.
        samples: of the training data.
    """
    if not _has(found, "position", "rollback", "size", "tried", "warnings"):
        return False
    back = found["rollback"]
    return (
        _has(back, "count", "scale", "back_to")
        and _whole(back["count"], 0, MOST)
        and _number(back["scale"])
        and 0 < back["scale"] <= 1
        and _whole(back["back_to"], -1)
        and _whole(found["size"], 1, max(1, samples))
        and type(found["tried"]) is dict
        and all(_whole(size, 1) and (speed is None or _number(speed)) for size, speed in found["tried"].items())
        and type(found["warnings"]) is list
        and all(type(text) is str for text in found["warnings"])
        and _has(found["position"], "step", "best", "stepper", "journal")
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
    if not _whole(position["step"], 0, steps) or not _has(stepper, *begun):
        return False
    if best is not None and not (
        judged
        and _has(best, "value", "epoch", "state")
        and _number(best["value"])
        and _whole(best["epoch"], 0)
        and alike(best["state"], weights)
    ):
        return False
    return (
        alike(stepper["module"], weights)
        and (stepper["average"] is None) == (begun["average"] is None)
        and (stepper["average"] is None or alike(stepper["average"], begun["average"]))
        and type(stepper["scaler"]) is dict
        and all(type(name) is str and _number(value) for name, value in stepper["scaler"].items())
        and (stepper["compiled"] is None or type(stepper["compiled"]) is bool)
        and _optimizes(stepper["optimizer"], begun["optimizer"], weights)
        and _journal(position["journal"], first["journal"])
    )


def _optimizes(found: Any, begun: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> bool:
    if not _has(found, *begun) or type(found["state"]) is not dict or type(found["param_groups"]) is not list:
        return False
    groups = found["param_groups"]
    if len(groups) != len(begun["param_groups"]):
        return False
    for group, wanted in zip(groups, begun["param_groups"], strict=True):
        if not _has(group, *wanted) or group["params"] != wanted["params"]:
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
    return value is None or _number(value)


def _journal(found: Any, begun: Mapping[str, Any]) -> bool:
    if not _has(found, *begun) or not _number(found["seconds"]) or not _has(found["sums"], *begun["sums"]):
        return False
    epochs, curve = found["epochs"], found["curve"]
    return (
        all(_number(value) for value in found["sums"].values())
        and type(epochs) is list
        and type(curve) is list
        and len(epochs) + len(curve) <= ROWS
        and all(
            type(row) is dict and set(ROW) <= row.keys() <= {*ROW, "validation"} and all(map(_number, row.values()))
            for row in epochs
        )
        and all(type(point) is list and len(point) == 3 and all(map(_number, point)) for point in curve)
    )


def alike(found: Any, wanted: Mapping[str, torch.Tensor]) -> bool:
    """Whether all tensors are there, with their shapes and types, and of numbers."""
    return _has(found, *wanted) and all(
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
        return _number(found)
    return type(found) is type(wanted)


def _has(found: Any, *names: str) -> bool:
    return type(found) is dict and found.keys() == set(names)


def _whole(value: Any, least: int, most: float = math.inf) -> bool:
    return type(value) is int and least <= value <= most


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf
