"""Operators of ONNX without weights of their own, by functions of torch; as of opset 13."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from compress.formats.onnx_layers.attention import attention
from compress.formats.onnx_layers.resize import resize
from compress.formats.onnx_layers.shapes import SHAPES, Handler, axes_of, fixed, kept, of_type, spread
from compress.formats.onnx_layers.splits import UNKNOWN
from compress.formats.onnx_layers.static import VARIES, Shape, same_pads
from compress.formats.onnx_layers.values import ARITHMETIC, Graph, Live, NotTakenBackError, Sizes, is_count, samples

__all__ = ["FUNCTIONS", "torch_pads"]

_ONE: Mapping[str, Callable[..., Any]] = {
    "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Erf": torch.erf, "Exp": torch.exp,
    "Log": torch.log, "Sqrt": torch.sqrt, "Neg": torch.neg, "Abs": torch.abs, "Floor": torch.floor, "Ceil": torch.ceil,
    "Reciprocal": torch.reciprocal, "Not": torch.logical_not, "Sin": torch.sin, "Cos": torch.cos, "Sign": torch.sign,
    "HardSwish": F.hardswish, "Softplus": F.softplus, "Mish": F.mish, "IsNaN": torch.isnan,
}  # fmt: skip
_TWO: Mapping[str, Callable[..., Any]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div, "MatMul": torch.matmul,
    "Less": torch.lt, "Greater": torch.gt, "LessOrEqual": torch.le, "GreaterOrEqual": torch.ge,
    "And": torch.logical_and, "Or": torch.logical_or,
}  # fmt: skip


def _one(function: Callable[..., Any]) -> Handler:
    return lambda g, x, _a: g.call(function, g.tensor(x[0]))


def _two(name: str) -> Handler:
    def handle(g: Graph, x: list[Any], _a: Mapping[str, Any]) -> Any:
        if name in ARITHMETIC and any(isinstance(each, Sizes) for each in x):
            try:
                one, other = (g.sizes(each) for each in x)
            except NotTakenBackError:
                one = other = Sizes(())
            if len(one.items) and len({len(one.items), len(other.items), 1}) <= 2 and len(other.items):
                count = max(len(one.items), len(other.items))
                pairs = list(zip(spread(one.items, count), spread(other.items, count), strict=True))
                # ONNX cuts a quotient towards 0, Python downwards: of what is never negative that is the same.
                if name != "Div" or all(is_count(each) for pair in pairs for each in pair):
                    items = tuple(g.number(ARITHMETIC[name], a, b) for a, b in pairs)
                    return one.of(items, scalar=one.scalar and other.scalar)
        a, b = (g.tensor(each) for each in x)
        if name == "Div" and not samples(a).is_floating_point():
            return g.call(torch.divide, a, b, rounding_mode="trunc")
        return g.call(_TWO[name], a, b)

    return handle


def _pow(g: Graph, x: list[Any], _a: Mapping[str, Any]) -> Any:
    """The base tells the type, where torch gives the wider one."""
    a, b = (g.tensor(each) for each in x)
    kind = samples(a).dtype
    if kind.is_floating_point and isinstance(b, torch.Tensor) and b.numel() == 1 and b.ndim <= samples(a).ndim:
        return g.call(torch.pow, a, float(b))
    if not kind.is_floating_point and samples(b).is_floating_point():
        a = g.call("to", a, torch.float64)
    return of_type(g, g.call(torch.pow, a, b), kind)


def _reduce(function: Callable[..., Any]) -> Handler:
    def handle(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
        value = g.tensor(x[0])
        axes = axes_of(g, x, a)
        if not axes:
            if a.get("noop_with_empty_axes", 0):
                return value
            axes = list(range(samples(value).ndim))
        return of_type(g, g.call(function, value, axes, bool(a.get("keepdims", 1))), samples(value).dtype)

    return handle


def _clip(g: Graph, x: list[Any], _a: Mapping[str, Any]) -> Any:
    bounds = [each if each is None else g.tensor(each) for each in [*x[1:], None, None][:2]]
    if any(isinstance(each, Live) for each in bounds):
        raise NotTakenBackError("its bounds are computed")
    low, high = (None if each is None else each.item() for each in bounds)
    return g.call(torch.clamp, g.tensor(x[0]), low, high)


def _split(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    value, axis, equal = g.tensor(x[0]), a.get("axis", 0), False
    if len(x) > 1 and x[1] is not None:
        sizes = [fixed(each) for each in g.sizes(x[1]).items]
    else:
        shape = a.get("shape")
        if a.get("varies") or (shape is not None and shape[axis] == VARIES):
            raise NotTakenBackError("it splits an axis whose size varies")
        whole, count = samples(value).shape[axis], int(a["num_outputs"] if "num_outputs" in a else a["outputs"])
        each = -(-whole // count)
        sizes = [min(each, whole - at * each) for at in range(count)]
        equal = shape is None or shape[axis] is None
    parts = g.call(torch.split, value, sizes, axis)
    if equal and isinstance(parts, Live):
        parts.node.meta[UNKNOWN] = True
    return [g.call(operator.getitem, parts, at) for at in range(len(sizes))]


def _softmax(function: Callable[..., Any]) -> Handler:
    return lambda g, x, a: g.call(function, x[0], a.get("axis", -1))


def _pool(name: str) -> Handler:
    def handle(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
        kernel = list(a["kernel_shape"])
        dims = len(kernel)
        stride, dilation = list(a.get("strides", [1] * dims)), list(a.get("dilations", [1] * dims))
        auto, pads = a.get("auto_pad", b"NOTSET"), list(a.get("pads", [0] * 2 * dims))
        if auto in (b"SAME_UPPER", b"SAME_LOWER"):
            pads = same_pads(auto, a.get("shape"), kernel, stride, dilation)
        elif auto == b"VALID":
            pads = [0] * 2 * dims
        ceil = bool(a.get("ceil_mode", 0))
        value = x[0]
        if ceil and _drops_a_window(a.get("shape"), kernel, stride, dilation, pads):
            if name != "MaxPool":
                raise NotTakenBackError("whether its last window counts hangs on a size that varies")
            pads, ceil = _whole_windows(kernel, stride, dilation, pads), False
        even = pads[:dims] == pads[dims:] and all(2 * p <= k for p, k in zip(pads, kernel, strict=False))
        if name == "MaxPool":
            if not even:
                value, pads = g.call(F.pad, value, torch_pads(pads), "constant", -math.inf), [0] * 2 * dims
            function: Callable[..., Any] = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1]
            return g.call(function, value, kernel, stride, pads[:dims], dilation, ceil)
        if dilation != [1] * dims or (not even and not a.get("count_include_pad", 0)):
            raise NotTakenBackError("its average leaves out padding that is not the same on both sides, or is dilated")
        if not even:
            value, pads = g.call(F.pad, value, torch_pads(pads)), [0] * 2 * dims
        function = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1]
        return g.call(function, value, kernel, stride, pads[:dims], ceil, bool(a.get("count_include_pad", 0)))

    return handle


def _drops_a_window(shape: Shape, kernel: list[int], stride: list[int], dilation: list[int], pads: list[int]) -> bool:
    """Whether sizes that vary decide if the last window of a pool with ceil_mode begins behind all values, and is none.

    torch takes such a branch once, at the size that it is exported at. Where the pads of both sides differ, it is
    given a padded tensor, and would count windows that ONNX does not.
    """
    dims = len(kernel)
    sizes = list(shape[2:]) if shape else [None] * dims
    return any(
        size in (None, VARIES) and (before != behind or apart * (wide - 1) + 1 - behind < step)
        for size, wide, step, apart, before, behind in zip(
            sizes, kernel, stride, dilation, pads[:dims], pads[dims:], strict=True
        )
    )


def _whole_windows(kernel: list[int], stride: list[int], dilation: list[int], pads: list[int]) -> list[int]:
    """Padding that gives without ceil_mode the windows that there are with it: those that begin at or before the last
    value, and no more than one that is not whole."""
    behind = [
        min(apart * (wide - 1), pad + step - 1)
        for wide, step, apart, pad in zip(kernel, stride, dilation, pads[len(kernel) :], strict=True)
    ]
    return [*pads[: len(kernel)], *behind]


_PADDED = {"constant": "constant", "reflect": "reflect", "edge": "replicate"}


def torch_pads(pads: list[int]) -> list[int]:
    """Padding as torch takes it: by axis from the last, before and behind."""
    dims = len(pads) // 2
    return [each for axis in reversed(range(dims)) for each in (pads[axis], pads[dims + axis])]


def _global(function: Callable[..., Any]) -> Handler:
    def handle(g: Graph, x: list[Any], _a: Mapping[str, Any]) -> Any:
        return g.call(function, x[0], tuple(range(2, samples(x[0]).ndim)), True)

    return handle


def _pad(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    mode = a.get("mode", b"constant").decode()
    if mode not in _PADDED or (len(x) > 3 and x[3] is not None):
        raise NotTakenBackError(f"its padding is {mode}, or of axes that are named")
    pads = torch_pads([fixed(each) for each in g.sizes(x[1]).items])
    if mode == "constant":
        fill = 0.0 if len(x) < 3 or x[2] is None else g.tensor(x[2]).item()
        return g.call(F.pad, x[0], pads, "constant", fill)
    rank, count = samples(x[0]).ndim, max((at // 2 + 1 for at, each in enumerate(pads) if each), default=0)
    if not count:
        return x[0]
    count = max(count, rank - 2)
    if rank - count not in (1, 2) or count > 3:  # torch mirrors what is behind batch and channels
        raise NotTakenBackError(f"its padding is {mode}, of other axes than the last after batch and channels")
    return g.call(F.pad, x[0], pads[: 2 * count], _PADDED[mode])


def _flatten(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    axis = a.get("axis", 1)
    if axis == 1 and samples(x[0]).ndim > 1:
        return g.call(torch.flatten, x[0], 1)
    rows: Any = 1
    for at in range(axis % max(1, samples(x[0]).ndim) if axis < 0 else axis):
        rows = g.number(operator.mul, rows, kept(g, x[0], at))
    return g.call("reshape", x[0], (rows, -1))


def _identity(_g: Graph, x: list[Any], _a: Mapping[str, Any]) -> Any:
    return x[0]


def _transpose(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    value = g.tensor(x[0])
    perm = tuple(a.get("perm", reversed(range(samples(value).ndim))))
    if isinstance(value, torch.Tensor) and perm == (1, 0):
        return g.turned(value)
    return g.call("permute", value, perm)


def _hard_sigmoid(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    scaled = g.call(torch.add, g.call(torch.mul, x[0], float(a.get("alpha", 0.2))), float(a.get("beta", 0.5)))
    return g.call(torch.clamp, scaled, 0.0, 1.0)


def _swish(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    alpha = float(a.get("alpha", 1.0))
    if alpha == 1.0:
        return g.call(F.silu, x[0])
    return g.call(torch.mul, x[0], g.call(torch.sigmoid, g.call(torch.mul, x[0], alpha)))


def _max(function: Callable[..., Any]) -> Handler:
    def handle(g: Graph, x: list[Any], _a: Mapping[str, Any]) -> Any:
        found = g.tensor(x[0])
        for each in x[1:]:
            found = g.call(function, found, g.tensor(each))
        return found

    return handle


FUNCTIONS: Mapping[str, Handler] = {
    **{name: _one(function) for name, function in _ONE.items()},
    **{name: _two(name) for name in _TWO},
    "Pow": _pow,
    **SHAPES,
    "Identity": _identity, "Dropout": _identity, "Clip": _clip,
    "Split": _split, "Softmax": _softmax(torch.softmax), "LogSoftmax": _softmax(torch.log_softmax),
    "MaxPool": _pool("MaxPool"), "AveragePool": _pool("AveragePool"), "GlobalAveragePool": _global(torch.mean),
    "GlobalMaxPool": _global(torch.amax), "ReduceMean": _reduce(torch.mean), "ReduceSum": _reduce(torch.sum),
    "ReduceMax": _reduce(torch.amax), "ReduceMin": _reduce(torch.amin), "Pad": _pad, "Flatten": _flatten,
    "Transpose": _transpose, "HardSigmoid": _hard_sigmoid, "Max": _max(torch.maximum), "Min": _max(torch.minimum),
    "Sum": _max(torch.add), "Resize": resize, "Swish": _swish, "Attention": attention,
    "LeakyRelu": lambda g, x, a: g.call(F.leaky_relu, x[0], float(a.get("alpha", 0.01))),
    "Elu": lambda g, x, a: g.call(F.elu, x[0], float(a.get("alpha", 1.0))),
    "Gelu": lambda g, x, a: g.call(F.gelu, x[0], approximate=a.get("approximate", b"none").decode()),
}  # fmt: skip
