"""What OpenVINO's CPU plugin computes wrong in 8 bits, written so that it computes it right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["with_sound_kernels"]

RANK = 3
REDUCTIONS = {
    "ReduceL1": "reduce_l1", "ReduceL2": "reduce_l2", "ReduceMax": "reduce_max", "ReduceMean": "reduce_mean",
    "ReduceMin": "reduce_min", "ReduceProd": "reduce_prod", "ReduceSum": "reduce_sum",
}  # fmt: skip


def with_sound_kernels(graph: Any) -> Any:
    """Write what OpenVINO 2026.4 computes wrong in a quantized graph otherwise, in place.

    - Reductions (means, sums, maxima, …) of three dimensions, mostly from some number of rows on: they are given a
      fourth one of 1 in front.
    - Maxima and minima of other numbers of dimensions whose answers are rounded to 8 bits: these are no longer joined
      to one operator.
    - Sums of 8 bits that stand for zero by another number than 0, in some graphs: these are sums of floats.
    - Constants put around 8 bits that stand for zero by another number than 0, also where that makes the graph
      fail to compile: they are put around floats.

    The `openvino` backend of `serve` does the same.

    Args:
        graph: as `Core.read_model` gives it.

    Returns:
        The graph.
    """
    every = graph.get_ordered_ops()
    if not any(op.get_type_name() == "FakeQuantize" for op in every):
        return graph
    parts = _normalizations(every)
    for node in every:
        kind = node.get_type_name()
        constant = kind == "Pad" and node.get_attributes()["pad_mode"].lower() == "constant"
        if (constant or kind == "ReduceSum") and _is_float(node):
            node.input(0).replace_source_output(_apart(node.input_value(0)))
        if kind not in REDUCTIONS or not _is_float(node):
            continue
        takers = list(node.output(0).get_target_inputs())  # before a new one is made
        rank, axes = node.input(0).get_partial_shape().rank, _axes_of(node)
        if rank.is_static and rank.get_length() == RANK and axes is not None:
            below = sorted(axis % RANK + 1 for axis in axes)
            if below in ([3], [2, 3]) and node.get_name() in parts:  # of other axes OpenVINO writes them out again
                continue
            _give(takers, _of_four(node, below), node)
        elif kind in ("ReduceMax", "ReduceMin"):
            _give(takers, _apart(node.output(0)), node)
    graph.validate_nodes_and_infer_types()
    return graph


def _is_float(node: Any) -> bool:
    return bool(node.get_input_element_type(0).get_type_name() == "f32")


def _of_four(node: Any, below: Sequence[int]) -> Any:
    """A reduction of three dimensions, of four; `below` are its axes there."""
    from openvino import opset13 as ops

    wide = ops.unsqueeze(node.input_value(0), ops.constant([0]))
    # Over the added dimension, too: otherwise OpenVINO takes the mean first, and adds the dimension behind it.
    made = getattr(ops, REDUCTIONS[node.get_type_name()])(wide, ops.constant([0, *below]), keep_dims=True)
    return ops.squeeze(made, ops.constant([0] if node.get_attributes()["keep_dims"] else [0, *below])).output(0)


def _apart(value: Any) -> Any:
    """The value as it is, behind an operator that OpenVINO neither leaves out nor computes in 8 bits."""
    from openvino import opset13 as ops

    return ops.minimum(value, ops.constant(float("inf"), dtype="float32")).output(0)


def _give(takers: Sequence[Any], value: Any, node: Any) -> None:
    """Let what took a node's output take this value, by the same name."""
    value.get_tensor().set_names(node.output(0).get_names())
    for taker in takers:
        taker.replace_source_output(value)


def _axes_of(reduction: Any) -> list[int] | None:
    """The axes of a reduction, also of a GlobalAveragePool, whose axes are a range; None where they are not told."""
    axes = reduction.input_value(1)
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
