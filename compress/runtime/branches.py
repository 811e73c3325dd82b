"""Which branch of an If runs: of one that sizes decide, the same for all data, and so what a call's work is."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from compress.formats.onnx.counted import counted
from compress.formats.onnx.outline import read_whole
from compress.formats.onnx.scope import captured
from compress.model.inputs import Arrays
from compress.model.watched import Watched

__all__ = ["with_branches_taken"]

_OF_SIZES = ("Shape", "Size")


def with_branches_taken(path: Path, inputs: Arrays, names: Collection[str], *, every: bool) -> ModelProto | None:
    """A file's graph with the nodes of the branches that run in place of Ifs, and the values of its weights.

    Args:
        path: an ONNX file.
        inputs: one batch.
        names: of the outputs of Ifs that are wanted, as `counted_graph` has them, at any depth.
        every: whether those count, too, whose condition hangs on values; by sizes and constants alone otherwise.

    Returns:
        None where no such If is wanted, or the file does not run.
    """
    model = counted(read_whole(path), values=True)
    found = False
    while ifs := [node for node in model.graph.node if _is_wanted(node, names)]:
        ifs = [node for node in ifs if every or _by_sizes(model.graph, node.input[0])]
        if not ifs:
            break
        try:
            values = _values(path, model, {node.input[0] for node in ifs}, inputs)
        except Exception:  # what does not run here is counted as it is written
            return None
        _put_in(model.graph, {node.output[0]: bool(values[node.input[0]].all()) for node in ifs})
        found = True
    return model if found else None


def _is_wanted(node: NodeProto, names: Collection[str]) -> bool:
    return node.op_type == "If" and node.output[0] in names


def _by_sizes(graph: GraphProto, condition: str) -> bool:
    """Whether a tensor is the same whatever the values of the inputs are."""
    makers = {name: node for node in graph.node for name in node.output}
    given = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
    waiting, seen = [condition], set[str]()
    while waiting:
        name = waiting.pop()
        if name in given:
            return False
        if name in seen or name not in makers:
            continue
        seen.add(name)
        node = makers[name]
        waiting += [] if node.op_type in _OF_SIZES else [*node.input, *captured(node)]
    return True


def _values(path: Path, model: ModelProto, names: Collection[str], inputs: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    """The values of some tensors of a graph."""
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.name in names}
    found |= {name: inputs[name] for name in names if name in inputs}
    computed = [name for name in names if name not in found]
    if not computed:
        return found
    made = ModelProto()
    made.CopyFrom(model)
    del made.graph.output[:]  # what nothing asked for is not run
    made.graph.output.extend(onnx.ValueInfoProto(name=name) for name in computed)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    running = ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return found | dict(zip(computed, Watched(path).run(running, computed, inputs), strict=True))


def _put_in(graph: GraphProto, taken: dict[str, bool]) -> None:
    """Replace Ifs, by their first output, by the nodes of the branch that is taken, in place."""
    kept: list[NodeProto] = []
    for node in graph.node:
        if node.op_type != "If" or node.output[0] not in taken:
            kept.append(node)
            continue
        wanted = "then_branch" if taken[node.output[0]] else "else_branch"
        body = next(attribute.g for attribute in node.attribute if attribute.name == wanted)
        kept += body.node
        graph.initializer.extend(body.initializer)
        kept += [
            helper.make_node("Identity", [value.name], [name])
            for value, name in zip(body.output, node.output, strict=True)
            if name
        ]
    copies = [_copy(node) for node in kept]
    del graph.node[:]
    graph.node.extend(copies)


def _copy(node: NodeProto) -> NodeProto:
    made = NodeProto()
    made.CopyFrom(node)
    return made
