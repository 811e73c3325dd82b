"""Means that OpenVINO's CPU plugin computes wrong in 8 bits, written so that it computes them right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["with_sound_means"]

RANK = 3


def with_sound_means(graph: Any) -> Any:
    """Give the means of a quantized graph that have three dimensions a fourth one of 1 in front, in place.

    OpenVINO 2026.4 computes a ReduceMean of 8 bits wrong there, mostly from some number of rows on, and of no other
    number of dimensions. The `openvino` backend of `serve` does the same.

    Args:
        graph: as `Core.read_model` gives it.

    Returns:
        The graph.
    """
    from openvino import opset13 as ops

    every = graph.get_ordered_ops()
    if not any(op.get_type_name() == "FakeQuantize" for op in every):
        return graph
    parts = _normalizations(every)
    for mean in every:
        if mean.get_type_name() != "ReduceMean":
            continue
        rank, axes = mean.input(0).get_partial_shape().rank, _axes_of(mean)
        if rank.is_dynamic or rank.get_length() != RANK or axes is None:
            continue
        below = sorted(axis % RANK + 1 for axis in axes)
        if below in ([3], [2, 3]) and mean.get_name() in parts:  # of other axes OpenVINO writes them out again
            continue
        wide = ops.unsqueeze(mean.input_value(0), ops.constant([0]))
        # Over the added dimension, too: otherwise OpenVINO takes the mean first, and adds the dimension behind it.
        made = ops.reduce_mean(wide, ops.constant([0, *below]), keep_dims=True)
        plain = ops.squeeze(made, ops.constant([0] if mean.get_attributes()["keep_dims"] else [0, *below]))
        plain.output(0).get_tensor().set_names(mean.output(0).get_names())
        for taker in list(mean.output(0).get_target_inputs()):
            taker.replace_source_output(plain.output(0))
    graph.validate_nodes_and_infer_types()
    return graph


def _axes_of(mean: Any) -> list[int] | None:
    """The axes of a mean, also of a GlobalAveragePool, whose axes are a range; None where the graph does not tell."""
    axes = mean.input_value(1)
    if axes.get_node().get_type_name() == "Constant":
        return [int(axis) for axis in axes.get_node().get_vector()]
    if axes.get_node().get_type_name() != "Range" or axes.get_partial_shape().is_dynamic:
        return None
    first, _, step = (value.get_node() for value in axes.get_node().input_values())
    if any(node.get_type_name() != "Constant" for node in (first, step)):
        return None
    start, by = int(first.get_vector()[0]), int(step.get_vector()[0])
    return [start + by * at for at in range(axes.get_shape()[0])]


def _normalizations(every: Sequence[Any]) -> set[str]:
    """Names of the means that are parts of normalizations which are written out: OpenVINO makes one operator of each.

    That is, of squares by whose root their base is divided, and of what the base is apart from and nothing else takes.
    """
    found: set[str] = set()
    for mean in every:
        if mean.get_type_name() != "ReduceMean":
            continue
        square = mean.input_value(0).get_node()
        if square.get_type_name() not in ("Power", "Multiply"):
            continue
        base = square.input_value(0)
        roots = [root for more in _takers(mean, "Add") for root in _takers(more, "Sqrt", "Power")]
        roots += [inverse for root in roots for inverse in _takers(root, "Power", "Divide")]
        ends = [end for root in roots for end in _takers(root, "Divide", "Multiply") if base in end.input_values()]
        if not ends:
            continue
        found.add(mean.get_name())
        apart = base.get_node()
        ours = {node.get_name() for node in (square, *ends)}
        if apart.get_type_name() == "Subtract" and all(each.get_name() in ours for each in _takers(apart)):
            taken = apart.input_value(1).get_node()
            if len(_takers(taken)) == 1:
                found.add(taken.get_name())
    return found


def _takers(node: Any, *kinds: str) -> list[Any]:
    """What reads a node; of these kinds, if any are named."""
    found = [taker.get_node() for output in node.outputs() for taker in output.get_target_inputs()]
    return [each for each in found if not kinds or each.get_type_name() in kinds]
