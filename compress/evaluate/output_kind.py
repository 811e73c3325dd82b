"""What an output means: classes, several labels at once, numbers, an embedding, or a class for each place of a map.

Read off the labels where there are some that tell, else off the last operation of the network, else off the shape. What
can't be told (logits of several labels without labels look like logits of classes) has to be said by who knows.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from onnx import NodeProto
from torch import fx, nn

from compress.artifact import TensorSpec
from compress.formats.onnx.outline import outline
from compress.model import OnnxModel, TorchModel
from compress.model.in_order import InOrder

__all__ = [
    "BY_SHAPE",
    "SHARES",
    "Ending",
    "OutputForm",
    "OutputKind",
    "by_labels",
    "class_axes",
    "class_axis",
    "ending_of",
    "endings_of",
    "form_of",
    "kind_of",
    "no_classes",
]

Ending = Literal["softmax", "log_softmax", "sigmoid", "normalize"]

LOOKED_AT = 4096  # labels
SHARES = "the labels are shares of classes"
BY_SHAPE = "its shape is that of a logit for each class"
# What moves values, or gives them another type, and does not change them.
MOVING = {
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "t",
    "contiguous", "clone", "detach", "dropout", "float", "to", "_to_copy", "alias", "rearrange",
}  # fmt: skip
MOVING_LAYERS = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout)
LAYERS: dict[type[nn.Module], Ending] = {
    nn.Softmax: "softmax", nn.Softmax2d: "softmax", nn.LogSoftmax: "log_softmax", nn.Sigmoid: "sigmoid",
}  # fmt: skip
FUNCTIONS: dict[str, Ending] = {
    "softmax": "softmax", "_softmax": "softmax", "log_softmax": "log_softmax", "_log_softmax": "log_softmax",
    "sigmoid": "sigmoid", "expit": "sigmoid", "normalize": "normalize",
}  # fmt: skip
MOVING_NODES = {"Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Dropout"}
NODES: dict[str, Ending] = {
    "Softmax": "softmax", "LogSoftmax": "log_softmax", "Sigmoid": "sigmoid", "LpNormalization": "normalize",
}  # fmt: skip
NORMS = ("norm", "vector_norm", "linalg_vector_norm", "linalg_norm")


class OutputKind(StrEnum):
    """What an output's numbers are."""

    SOFTMAX = "softmax"  # one of several classes
    SIGMOID = "sigmoid"  # each label by itself: there or not
    REGRESSION = "regression"  # numbers, also those of a map
    EMBEDDING = "embedding"  # a direction
    DENSE = "dense"  # one of several classes at each place


@dataclass(frozen=True)
class OutputForm:
    """An output's kind, and what is to be known to compute with it.

    Attributes:
        kind: what its numbers are.
        axis: of the classes, for SOFTMAX and DENSE.
        ending: what the network has done to it already: probabilities, their logarithms, or a unit vector.
        because: how it is known, a clause.
        doubt: why it may be otherwise, a sentence; "" where nothing else fits.
    """

    kind: OutputKind
    axis: int = 1
    ending: Ending | None = None
    because: str = ""
    doubt: str = ""


def kind_of(model: TorchModel, name: str, labels: Any | None = None) -> OutputKind:
    """See `form_of`."""
    return form_of(model, name, labels).kind


def form_of(model: TorchModel, name: str, labels: Any | None = None) -> OutputForm:
    """Tell what an output is.

    Args:
        model: with its forward; one that can't be traced is judged by labels and shape alone.
        name: of one of the signature's outputs.
        labels: [n, …] of this output, if there are some.
    """
    names = [spec.name for spec in model.signature.outputs]
    spec = model.signature.outputs[names.index(name)]
    ending = ending_of(model.module, names.index(name))
    told = None if labels is None else by_labels(labels, spec, ending)
    if told is not None:
        return told
    dims = len(spec.shape)
    if ending in ("softmax", "log_softmax"):
        kind = OutputKind.SOFTMAX if dims == 2 else OutputKind.DENSE
        return OutputForm(kind, class_axis(spec.shape), ending, f"the network ends in {ending}")
    if ending is not None:
        kind = OutputKind.SIGMOID if ending == "sigmoid" else OutputKind.EMBEDDING
        return OutputForm(kind, 1, ending, f"the network ends in {ending}")
    if dims == 2 and spec.shape[1] != 1:
        return OutputForm(OutputKind.SOFTMAX, 1, None, BY_SHAPE)
    return OutputForm(OutputKind.REGRESSION, 1, None, "nothing says that it is more than numbers")


def class_axis(shape: tuple[int | str, ...]) -> int:
    """Where the classes most likely are, of an output without labels that tell: last in a sequence, else second.

    Args:
        shape: of the output; a size that varies counts no classes.
    """
    if len(shape) < 3 or not isinstance(shape[-1], int):
        return 1
    return -1 if len(shape) == 3 or not isinstance(shape[1], int) else 1


def class_axes(shape: tuple[int | str, ...], of: tuple[int, ...]) -> tuple[int, ...]:
    """Where the classes may be, of an output that has class ids for each of its places: 1, -1, both or neither.

    Args:
        shape: of the output; a size that varies counts no classes, and one value is no choice of a class.
        of: the labels' shape, for each sample.
    """
    if len(of) == 0 or len(shape) != len(of) + 2:
        return ()
    places = ((1, shape[2:]), (-1, shape[1:-1]))
    return tuple(at for at, rest in places if isinstance(shape[at], int) and shape[at] != 1 and _fits(rest, of))


def by_labels(labels: Any, spec: TensorSpec, ending: Ending | None) -> OutputForm | None:
    """What labels [n, …] say of an output; None where they don't fit it."""
    shape, of = spec.shape, tuple(labels.shape[1:])
    whole = labels.dtype.kind in "iub"
    if whole and not of and len(shape) == 2 and isinstance(shape[1], int) and shape[1] > 1:
        return OutputForm(OutputKind.SOFTMAX, 1, ending, "the labels are class ids")
    if whole and (axes := class_axes(shape, of)):
        doubt = ""
        if len(axes) > 1:
            doubt = (
                f"The classes of {spec} may be along its second dimension or along its last: both fit the labels "
                f"{['n', *of]}. The second is taken, as torch's cross_entropy has it; where the last is meant, its "
                "figures mean nothing: judge by a function of your own, --metric package.module:function, and give a "
                "model whose other sizes vary, or differ from the number of classes."
            ).replace("'n'", "n")
        return OutputForm(OutputKind.DENSE, axes[0], ending, "the labels are class ids for each place", doubt)
    sizes = [size for size in shape[1:] if isinstance(size, int)]
    flat = len(sizes) == len(shape) - 1 and math.prod(sizes) == math.prod(of)
    alone = shape[1:2] == (1,) and _fits(shape[2:], of)
    if not _fits(shape[1:], of) and not flat and not alone:
        return None
    if labels.dtype.kind not in "biuf":
        return None
    values = _some(labels)
    if not np.isin(values, (0, 1)).all():
        if whole and ending == "sigmoid":
            return None
        if ending != "sigmoid" and _shares(values):
            return OutputForm(OutputKind.SOFTMAX, 1, ending, SHARES)
        return OutputForm(OutputKind.REGRESSION, 1, ending, "the labels are numbers in its shape")
    one = values.ndim == 2 and values.shape[1] > 1 and bool((values.sum(1) == 1).all())
    if one and ending != "sigmoid":
        return OutputForm(OutputKind.SOFTMAX, 1, ending, "the labels are one-hot")
    return OutputForm(OutputKind.SIGMOID, 1, ending, "the labels are 0 or 1, each by itself")


def no_classes(labels: Any) -> bool:
    """Whether labels [n, …] that fit no output can't be ids of classes: numbers, pairs, or several for a sample."""
    if labels.ndim > 2 or (labels.ndim == 2 and labels.shape[1] != 1):
        return True
    if labels.dtype.kind != "f":
        return False
    values = _some(labels)
    return not bool((values == np.rint(values)).all())


def _some(labels: Any) -> np.ndarray[Any, Any]:
    """Labels spread over all of them."""
    many = LOOKED_AT if isinstance(labels, np.ndarray) else 64  # others are made when asked for
    rows = np.unique(np.linspace(0, len(labels) - 1, min(len(labels), many)).astype(np.int64))
    return np.asarray(labels[rows])


def _shares(values: np.ndarray[Any, Any]) -> bool:
    """Whether each row is a distribution over classes."""
    if values.ndim != 2 or values.shape[1] < 2 or values.dtype.kind != "f":
        return False
    return bool((values >= 0).all() and np.allclose(values.sum(1), 1.0, atol=1e-3))


def _fits(want: tuple[int | str, ...], have: tuple[int, ...]) -> bool:
    return len(want) == len(have) and all(isinstance(a, str) or a == b for a, b in zip(want, have, strict=True))


def endings_of(model: TorchModel | OnnxModel) -> dict[str, Ending | None]:
    """The last operation before each output; see `ending_of`."""
    names = [spec.name for spec in model.signature.outputs]
    if isinstance(model, TorchModel):
        return {name: ending_of(model.module, at) for at, name in enumerate(names)}
    makers = {name: node for node in outline(model.path).graph.node for name in node.output}
    return {name: _ending_in_file(makers, name) for name in names}


def _ending_in_file(makers: Mapping[str, NodeProto], name: str) -> Ending | None:
    while (maker := makers.get(name)) is not None and maker.op_type in MOVING_NODES:
        name = maker.input[0]
    return None if maker is None else NODES.get(maker.op_type)


def ending_of(module: nn.Module, index: int = 0) -> Ending | None:
    """The last operation before an output, where it bounds it; None without one, or where the forward can't be traced.

    Args:
        module: in evaluation mode.
        index: of the output, in the order of what the forward gives.
    """
    if isinstance(module, InOrder):
        return ending_of(module.original, module.outputs[index])
    try:
        graph = module if isinstance(module, fx.GraphModule) else fx.symbolic_trace(module)
    except Exception:  # the user's forward: anything may come out of it
        return None
    given = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    while isinstance(given, tuple | list | dict) and len(given) == 1 and not isinstance(given, fx.Node):
        given = next(iter(given.values() if isinstance(given, dict) else given))
    if isinstance(given, tuple | list | dict):
        values = [v for v in (given.values() if isinstance(given, dict) else given) if isinstance(v, fx.Node)]
        given = values[index] if index < len(values) else None
    while isinstance(given, fx.Node) and _moves(graph, given):
        given = given.args[0] if given.args else None
    return _ending(graph, given) if isinstance(given, fx.Node) else None


def _moves(graph: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(graph.get_submodule(str(node.target)), MOVING_LAYERS)
    return _name(node) in MOVING


def _ending(graph: fx.GraphModule, node: fx.Node) -> Ending | None:
    if node.op == "call_module":
        layer = graph.get_submodule(str(node.target))
        return next((ending for kind, ending in LAYERS.items() if isinstance(layer, kind)), None)
    if node.target in (operator.truediv, "div") or _name(node) in ("div", "true_divide"):
        return "normalize" if _norm_of(node.args[1], node.args[0]) else None
    return FUNCTIONS.get(_name(node))


def _norm_of(node: Any, of: Any) -> bool:
    """Whether a node is the norm of another, bounded or moved."""
    while isinstance(node, fx.Node):
        if _name(node) in NORMS:
            return bool(node.args) and node.args[0] is of
        if _name(node) not in MOVING | {"clamp", "clamp_min", "clip", "expand", "expand_as", "add", "maximum"}:
            return False
        node = node.args[0] if node.args else None
    return False


def _name(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    packet = getattr(node.target, "overloadpacket", node.target)  # of torch.ops
    return str(getattr(packet, "__name__", ""))
