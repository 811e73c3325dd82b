"""Nodes that have no form in torch, as parts that stay as they are in ONNX."""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from torch import fx

from compress.errors import ToolkitError, first_line
from compress.formats.native.onnx_part import ANY, DTYPES, OnnxPart
from compress.formats.native.onnx_part import MOST as MOST_BYTES
from compress.formats.onnx.scope import captured, inner_bodies
from compress.formats.onnx_layers.opsets import in_opset
from compress.formats.onnx_layers.values import MOST, Graph, Live, NotTakenBackError, samples
from compress.model.watched import Watched
from compress.storage.shortages import raise_shortage

__all__ = ["UNTOLD", "has_weights", "no_gradient_before", "part_of", "read_by", "trained"]

# How much these give hangs on the values that they get; or it is no tensor.
UNTOLD = {
    "NonZero", "NonMaxSuppression", "Unique", "Compress", "SplitToSequence", "SequenceConstruct", "SequenceEmpty",
    "Optional", "StringSplit", "ZipMap", "SequenceMap", "SequenceInsert",
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_BYTES = MOST_BYTES - (1 << 20)  # of its constants
_TABLE = 1024  # bytes; of smaller constants, which axes and sizes are, each part has its own
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16)


def read_by(node: NodeProto) -> list[str]:
    """Names of all that a node reads, its bodies with it."""
    return [name for name in dict.fromkeys([*node.input, *sorted(captured(node))]) if name]


def part_of(
    g: Graph, nodes: Sequence[NodeProto], held: Mapping[str, Any], wanted: Sequence[str], model: ModelProto, opset: int,
    told: str, shared: Callable[[str], bool], *, free: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """What nodes give, by name, run as they are; constants where all that they read is constant.

    Args:
        nodes: in order.
        held: what they read from around them.
        wanted: which of the tensors that they make are read elsewhere.
        model: that they are of, for its opsets.
        opset: that it will be written in.
        told: which nodes they are.
        shared: whether others read a tensor of that name, too: a table that several parts read stays one, outside.
        free: how large what they give is may hang on values: nothing but outputs of the graph comes behind.

    Raises:
        NotTakenBackError: they do not run by themselves, or give what is no tensor of torch's.
    """
    made = {name for node in nodes for name in node.output}
    names = [name for name in dict.fromkeys(itertools.chain(*map(read_by, nodes))) if name not in made]
    lost = next((name for name in names if name not in held), None)
    if lost is not None:
        raise NotTakenBackError(f"nothing makes {lost!a}, which it reads")
    values = {name: g.tensor(held[name]) for name in names if held[name] is not None}
    live = {name: value for name, value in values.items() if isinstance(value, Live)}
    tables = {
        name: value
        for name, value in values.items()
        if live and not isinstance(value, Live) and value.numel() * value.element_size() > _TABLE and shared(name)
    }
    try:
        part, found = _made(nodes, values, [*live, *tables], wanted, model, opset)
    except NotTakenBackError:
        if not tables:
            raise
        tables = {}  # an operator that wants its weights as constants
        part, found = _made(nodes, values, [*live], wanted, model, opset)
    tensors = [_tensor(each) for each in found]
    if not live:
        return {name: g.named(tensor, name) for name, tensor in zip(wanted, tensors, strict=True)}
    data = part.SerializeToString(deterministic=True)
    given: list[Any] = [*live.values(), *(g.table(each) for each in tables.values())]
    form = (
        len(data), hashlib.sha256(data).hexdigest(), told[:100], _weights(part.graph),
        tuple((_NAMES[each.dtype], *each.shape) for each in samples(given)),
        tuple((_NAMES[each.dtype], *((ANY,) * each.ndim if free else each.shape)) for each in tensors),
    )  # fmt: skip
    layer = OnnxPart(*form)
    layer.model = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    whole = g.module(nodes[0].name or nodes[0].op_type, layer, given, tuple(tensors))
    return {name: g.call(operator.getitem, whole, at) for at, name in enumerate(wanted)}


def _made(
    nodes: Sequence[NodeProto], values: Mapping[str, Any], given: Sequence[str], wanted: Sequence[str], of: ModelProto,
    opset: int,
) -> tuple[ModelProto, list[Any]]:  # fmt: skip
    """The model that some nodes make, in that opset, and what it gives.

    Args:
        nodes: in order.
        values: all that they read, by name.
        given: which of these are its inputs; the others are constants in it.
        wanted: its outputs.
        of: the model that they are of.
        opset: that it will be written in.

    Raises:
        NotTakenBackError: it does not run by itself.
    """
    made = ModelProto(ir_version=of.ir_version)
    made.opset_import.extend(of.opset_import)
    made.graph.name = "part"
    made.graph.node.extend(nodes)
    arrays = {name: samples(values[name]) for name in given}
    size = 0
    for name in values.keys() - arrays.keys():
        size += values[name].numel() * values[name].element_size()
        if size > _MOST_BYTES:
            raise NotTakenBackError(f"it has over {_MOST_BYTES / 1e9:.1f} GB of weights")
    for name, value in values.items():
        if name not in arrays:
            made.graph.initializer.append(numpy_helper.from_array(value.detach().contiguous().numpy(), name))
    made.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    live = {name for name in given if isinstance(values[name], Live)}
    sizes = {name for name in live if arrays[name].ndim == 1 and not arrays[name].is_floating_point()}
    try:
        return _runs(_given(made, arrays, live), arrays, opset)
    except NotTakenBackError:
        if not sizes:
            raise
    # ONNX takes sizes for none where nothing says how many there are, as a Resize to Shape(x) reads them.
    return _runs(_given(made, arrays, live - sizes), arrays, opset)


def _given(made: ModelProto, arrays: Mapping[str, torch.Tensor], free: Collection[str]) -> ModelProto:
    """The model, with inputs like some samples, of any sizes where they are free; in place, as it may be large."""
    del made.graph.input[:]
    for name, sample in arrays.items():
        dtype = helper.np_dtype_to_tensor_dtype(sample.numpy().dtype)
        shape = [None] * sample.ndim if name in free else sample.shape
        made.graph.input.append(helper.make_tensor_value_info(name, dtype, shape))
    return made


def _weights(graph: GraphProto) -> int:
    """How many numbers of its tables there are: of what is no single number, and not whole."""
    graphs = [graph, *inner_bodies(graph)]
    tables = [tensor for each in graphs for tensor in each.initializer]
    tables += [a.t for each in graphs for node in each.node for a in node.attribute if node.op_type == "Constant"]
    return sum(math.prod(each.dims) for each in tables if each.dims and each.data_type in _FLOATS)


def _runs(part: ModelProto, arrays: Mapping[str, torch.Tensor], opset: int) -> tuple[ModelProto, list[Any]]:
    """The part in that opset, and what it gives.

    Raises:
        NotTakenBackError: it has none there, or does not run by itself.
    """
    given = {name: tensor.detach().numpy() for name, tensor in arrays.items()}
    try:
        found = in_opset(part, opset)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        data = found.SerializeToString()
        session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        return found, Watched(data, part.graph.node[0].op_type).run(session, None, given)
    except NotTakenBackError:
        raise
    except ToolkitError as err:
        raise NotTakenBackError(f"{err.what}: {err.why}") from err
    except Exception as err:  # of ONNX Runtime's and of onnx's C++
        raise_shortage(err)
        raise NotTakenBackError(f"it does not run by itself in opset {opset}: {first_line(err)[:150]}") from err


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, np.ndarray):
        raise NotTakenBackError("what it gives is no tensor")
    if value.size > MOST:
        raise NotTakenBackError(f"it makes {value.size:,} elements, over {MOST:,}")
    try:
        tensor = torch.from_numpy(np.array(value))
    except TypeError as err:
        raise NotTakenBackError("what it gives is of a type that torch has no arrays of") from err
    if tensor.dtype not in _NAMES:
        raise NotTakenBackError("what it gives is of a type that torch has no arrays of")
    return tensor


def has_weights(module: fx.GraphModule) -> bool:
    """Whether anything but parts in ONNX has parameters."""

    def is_part(node: fx.Node) -> bool:
        return node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), OnnxPart)

    tables = {
        str(node.target)
        for node in module.graph.nodes
        if node.op == "get_attr" and all(is_part(reader) for reader in node.users)
    }
    return any(name not in tables for name, _ in module.named_parameters())


def trained(module: fx.GraphModule) -> frozenset[str]:
    """Names of the parameters that gradients of the outputs reach: not those that parts in ONNX are between."""
    waiting = [node for node in module.graph.nodes if node.op == "output"]
    seen: set[fx.Node] = set()
    own: set[int] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "get_attr":
            own.add(id(operator.attrgetter(str(node.target))(module)))
        elif node.op == "call_module":
            layer = module.get_submodule(str(node.target))
            if isinstance(layer, OnnxPart):
                continue
            own |= {id(each) for each in layer.parameters()}
        waiting += node.all_input_nodes
    return frozenset(name for name, each in module.named_parameters() if id(each) in own)


def no_gradient_before(module: fx.GraphModule) -> None:
    """Let parameters that no gradient reaches be known as not to be trained, where there are others."""
    reached = trained(module)
    for name, each in module.named_parameters():
        if reached and name not in reached:
            each.requires_grad_(False)
