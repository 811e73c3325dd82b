"""How large what a part in ONNX gives is, as its graph proves it: never by the sizes that were tried alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from compress.errors import ToolkitError
from compress.formats.onnx.domains import STANDARD
from compress.formats.onnx.scope import captured, inner_bodies
from compress.storage.shortages import raise_shortage

__all__ = ["Place", "Shape", "Told", "alike", "apart", "steady", "told", "tried_alone"]

Shape = tuple[int, ...]
Place = tuple[int, int]  # an input, and an axis of it
Told = Sequence["int | Place | None"] | None  # by axis; None where not even their number is known
# Sizes that hang on one size each, by a rule that holds at all where it holds at as many as repeat: they move a window
# over it, or copy it so many times, without a least or a most.
_STEADY = {
    "AveragePool", "MaxPool", "LpPool", "Conv", "ConvTranspose", "ConvInteger", "QLinearConv", "Pad", "Tile",
    "DepthToSpace", "SpaceToDepth", "Concat", "TopK", "Resize",
}  # fmt: skip
_IN_A_ROW, _FAR, _FEW = 65, 1021, 16  # sizes beside the sample's; one apart from these; how many must run
_MOST = 1 << 22  # elements of an input that is tried
_EIGHTHS = 8


def told(data: bytes, inputs: Sequence[Sequence[int | Place]]) -> list[Told]:
    """By output what ONNX Runtime's inference of shapes proves, through both branches of an If and around a Loop.

    Args:
        data: the ONNX model.
        inputs: by axis how large each is, or the place of one that is as large.
    """
    model = _without_claims(onnx.load_model_from_string(data))
    names: dict[str, Place] = {}
    for value, sizes in zip(model.graph.input, inputs, strict=True):
        dims = [size if isinstance(size, int) else f"{size[0]}|{size[1]}" for size in sizes]
        names |= {f"{size[0]}|{size[1]}": size for size in sizes if not isinstance(size, int)}
        _declare(value, value.type.tensor_type.elem_type, dims)
    nodes = [node for node in model.graph.node if node.op_type != "Constant"]
    loop = nodes[0].op_type == "Loop" and len(nodes) == 1
    found = _around(model, nodes[0]) if loop else _inferred(model)
    order = list(nodes[0].output) if loop else []
    wanted = [found[order.index(value.name)] for value in model.graph.output] if loop else found
    return [
        None if dims is None else [names.get(dim) if isinstance(dim, str) else dim for dim in dims] for dims in wanted
    ]


def _declare(value: onnx.ValueInfoProto, kind: int, dims: Sequence[int | str | None]) -> None:
    value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, kind, dims))


def _without_claims(model: ModelProto) -> ModelProto:
    """Without the shapes that the file says its tensors have, which need not be so; in place."""
    for graph in (model.graph, *inner_bodies(model.graph)):
        del graph.value_info[:]
        for value in (*graph.output, *(graph.input if graph is not model.graph else ())):
            value.type.tensor_type.ClearField("shape")
    for value in model.graph.output:
        value.ClearField("type")
    return model


def _inferred(model: ModelProto) -> list[list[int | str | None] | None]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as err:  # ONNX Runtime's own classes
        raise_shortage(err)
        return [None] * len(model.graph.output)
    return [list(value.shape) or None for value in session.get_outputs()]  # which is as empty where nothing is known


def _around(model: ModelProto, loop: NodeProto) -> list[list[int | str | None] | None]:
    """By output of a Loop, of which inference tells nothing: what goes around keeps the sizes that its body keeps."""
    graph = model.graph
    body: GraphProto = next(a.g for a in loop.attribute if a.name == "body")
    known: dict[str, tuple[int, list[int | str | None]]] = {}
    for value in graph.input:
        kind = value.type.tensor_type
        known[value.name] = kind.elem_type, [d.dim_param or d.dim_value for d in kind.shape.dim]
    tables = {tensor.name: tensor for tensor in graph.initializer}
    tables |= {
        n.output[0]: a.t for n in graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"
    }
    known |= {name: (tensor.data_type, list(tensor.dims)) for name, tensor in tables.items()}
    unknown: list[list[int | str | None] | None] = [None] * len(loop.output)
    carried = list(loop.input[2:])
    if not all(name in known for name in carried) or len(body.input) != len(carried) + 2:
        return unknown
    state = [(known[name][0], list(known[name][1])) for name in carried]
    while True:
        inside = ModelProto(ir_version=model.ir_version, graph=body)
        inside.opset_import.extend(model.opset_import)
        for value, (kind, dims) in zip(
            inside.graph.input, [(TensorProto.INT64, []), (TensorProto.BOOL, []), *state], strict=True
        ):
            _declare(value, kind, dims)
        for name in sorted(captured(loop)):
            if name in tables:
                copy = TensorProto.FromString(tables[name].SerializeToString())
                copy.name = name
                inside.graph.initializer.append(copy)
            elif name in known:
                inside.graph.input.append(onnx.helper.make_tensor_value_info(name, *known[name]))
            else:
                return unknown
        found = _inferred(inside)
        weaker = []
        for (kind, dims), after in zip(state, found[1:], strict=False):
            if dims and (after is None or len(after) != len(dims)):
                return unknown
            weaker.append((kind, [a if a == b else None for a, b in zip(dims, after or [], strict=True)]))
        if weaker == state:
            return [*(dims for _, dims in state), *unknown[len(state) :]]
        state = weaker


def steady(data: bytes) -> bool:
    """Whether sizes of what it gives hang on one size of what it reads each, by a rule without a least or a most."""
    graph = onnx.load_model_from_string(data).graph
    nodes = [node for node in graph.node if node.op_type != "Constant"]
    if len(nodes) != 1 or nodes[0].domain not in STANDARD or nodes[0].op_type not in _STEADY:
        return False
    (node,) = nodes
    given = {value.name for value in graph.input}
    weights = ("Concat", "Conv", "ConvTranspose")
    if node.op_type not in weights and not given.isdisjoint(node.input[1:]):
        return False
    return node.op_type != "Resize" or _in_eighths(graph, node)


def _in_eighths(graph: GraphProto, node: NodeProto) -> bool:
    """Whether a Resize has scales, and these are multiples of an eighth: a rule of small numbers."""
    name = node.input[2] if len(node.input) > 2 else ""
    scales = next((numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.name == name), None)
    return scales is not None and bool(scales.size) and bool((scales * _EIGHTHS == np.floor(scales * _EIGHTHS)).all())


def tried_alone(
    run: Callable[..., Sequence[torch.Tensor]],
    sample: Sequence[torch.Tensor],
    inputs: Sequence[Sequence[int | Place]],
) -> list[tuple[list[Shape], list[Shape]]]:
    """Shapes of what a part reads and gives, each size that varies tried at many in a row, and far off.

    Args:
        run: the part.
        sample: that it takes.
        inputs: by axis how large each is, or the place of one that is as large.

    Returns:
        Nothing where too few sizes run.
    """
    runs: list[tuple[list[Shape], list[Shape]]] = []
    for place in sorted({size for sizes in inputs for size in sizes if not isinstance(size, int)}):
        near = sample[place[0]].shape[place[1]]
        ran = 0
        for size in itertools.chain(range(max(1, near - _IN_A_ROW // 2), near + _IN_A_ROW // 2), (_FAR,)):
            shapes = [
                tuple(size if each == place else have for each, have in zip(sizes, x.shape, strict=True))
                for sizes, x in zip(inputs, sample, strict=True)
            ]
            if any(math.prod(shape) > _MOST for shape in shapes):
                continue
            arrays = [torch.from_numpy(np.resize(x.numpy(), shape)) for x, shape in zip(sample, shapes, strict=True)]
            try:
                found = run(*arrays)
            except ToolkitError:
                raise
            except Exception as err:  # ONNX Runtime's own classes: a size that it refuses can't go wrong in silence
                raise_shortage(err)
                continue
            runs.append((shapes, [tuple(each.shape) for each in found]))
            ran += 1
        if ran < _FEW:
            return []
    return runs


def alike(runs: Sequence[Sequence[Shape]]) -> list[list[int | Place]]:
    """By input and axis its size, where it is the same in all runs; else the first place that was as large in all."""
    first: dict[tuple[int, ...], Place] = {}
    found: list[list[int | Place]] = []
    for at, shape in enumerate(runs[0]):
        row: list[int | Place] = []
        for axis, size in enumerate(shape):
            have = tuple(run[at][axis] for run in runs)
            row.append(size if len(set(have)) == 1 else first.setdefault(have, (at, axis)))
        found.append(row)
    return found


def apart(inputs: Sequence[Sequence[int | Place]]) -> list[list[int | Place]]:
    """The same without one's being as large as another."""
    return [[s if isinstance(s, int) else (at, axis) for axis, s in enumerate(row)] for at, row in enumerate(inputs)]
