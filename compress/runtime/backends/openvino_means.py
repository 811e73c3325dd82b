"""Means that OpenVINO's CPU plugin computes wrong in 8 bits, written so that it computes them right."""

from __future__ import annotations

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
    for mean in every:
        if mean.get_type_name() != "ReduceMean" or _normalizes(mean):
            continue
        rank, axes = mean.input(0).get_partial_shape().rank, mean.input_value(1).get_node()
        if rank.is_dynamic or rank.get_length() != RANK or axes.get_type_name() != "Constant":
            continue
        below = [int(axis) % RANK + 1 for axis in axes.get_vector()]
        wide = ops.unsqueeze(mean.input_value(0), ops.constant([0]))
        made = ops.reduce_mean(wide, ops.constant(below), keep_dims=mean.get_attributes()["keep_dims"])
        plain = ops.squeeze(made, ops.constant([0]))
        plain.output(0).get_tensor().set_names(mean.output(0).get_names())
        for taker in list(mean.output(0).get_target_inputs()):
            taker.replace_source_output(plain.output(0))
    graph.validate_nodes_and_infer_types()
    return graph


def _normalizes(mean: Any) -> bool:
    """Whether it is taken from what it is of: OpenVINO makes one operator of a normalization that is written out."""
    given = mean.input_value(0)
    takers = (taker.get_node() for taker in mean.output(0).get_target_inputs())
    return any(each.get_type_name() == "Subtract" and each.input_value(0) == given for each in takers)
