"""Bounds of a Relu or a Clip that a quantizer drew into the range of what it takes: they cut on purpose."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from onnx import ModelProto, helper, numpy_helper

from compress.onnx_export.fold import OURS
from compress.vetting.texts import parse_json

__all__ = ["Cuts", "cuts", "noted", "tell"]

Cuts = Mapping[str, tuple[float, float]]
_KEY = f"{OURS}cuts"


def cuts(before: ModelProto, after: ModelProto) -> Cuts:
    """(lowest, highest) of each tensor of a quantized graph that an activation was drawn into the range of.

    Args:
        before: the float graph.
        after: the quantized one, whose nodes have the names that they have there.
    """
    values = {t.name: numpy_helper.to_array(t) for t in before.graph.initializer if math.prod(t.dims) == 1}
    there = {node.name: node for node in after.graph.node}
    makers = {name: node for node in before.graph.node for name in node.output}
    found: dict[str, tuple[float, float]] = {}
    for node in before.graph.node:
        if node.op_type not in ("Relu", "Clip") or node.name in there:
            continue
        low, high = 0.0, math.inf
        if node.op_type == "Clip":
            bounds = [values.get(name) for name in [*node.input[1:], "", ""][:2]]
            low, high = (
                end if at is None else at.item() for at, end in zip(bounds, (-math.inf, math.inf), strict=True)
            )
        maker = makers.get(node.input[0])
        while maker is not None and maker.name not in there and maker.op_type in ("Relu", "Clip"):  # one after another
            maker = makers.get(maker.input[0])
        for name in there[maker.name].output if maker is not None and maker.name in there else ():
            least, most = found.get(name, (-math.inf, math.inf))
            found[name] = max(low, least), min(high, most)
    return found


def tell(model: ModelProto, found: Cuts) -> None:
    """Write them into a file's metadata, in place: with the original's names gone, nothing else there tells."""
    ends = {name: [None if math.isinf(end) else end for end in each] for name, each in found.items()}
    helper.set_model_props(model, {p.key: p.value for p in model.metadata_props} | {_KEY: json.dumps(ends)})


def noted(model: ModelProto) -> Cuts | None:
    """What `tell` has written; None where nothing is."""
    told = next((each.value for each in model.metadata_props if each.key == _KEY), None)
    try:
        return (
            None
            if told is None
            else {
                name: (-math.inf if low is None else float(low), math.inf if high is None else float(high))
                for name, (low, high) in parse_json(told.encode()).items()
            }
        )
    except (ValueError, TypeError, AttributeError):  # somebody else's
        return None
