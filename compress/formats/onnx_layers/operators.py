"""Operators of ONNX without weights of their own, by functions of torch; as of opset 13."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from torch.nn import functional as F

from compress.formats.onnx_layers.values import (
    ARITHMETIC,
    MOST,
    MOST_SIZES,
    Graph,
    Live,
    NotTakenBackError,
    Sizes,
    is_count,
    is_whole,
    samples,
)

__all__ = ["FUNCTIONS", "Handler", "torch_pads"]

FAR = 2**31 - 1  # a place in a slice that stands for the end, whatever the size
Handler = Callable[[Graph, list[Any], Mapping[str, Any]], Any]
_ONE: Mapping[str, Callable[..., Any]] = {
    "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Erf": torch.erf, "Exp": torch.exp,
    "Log": torch.log, "Sqrt": torch.sqrt, "Neg": torch.neg, "Abs": torch.abs, "Floor": torch.floor, "Ceil": torch.ceil,
    "Reciprocal": torch.reciprocal, "Not": torch.logical_not, "Sin": torch.sin, "Cos": torch.cos, "Sign": torch.sign,
    "HardSwish": F.hardswish, "Softplus": F.softplus, "Mish": F.mish, "IsNaN": torch.isnan,
}  # fmt: skip
_TWO: Mapping[str, Callable[..., Any]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div, "MatMul": torch.matmul,
    "Equal": torch.eq, "Less": torch.lt, "Greater": torch.gt, "LessOrEqual": torch.le, "GreaterOrEqual": torch.ge,
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
                pairs = list(zip(_spread(one.items, count), _spread(other.items, count), strict=True))
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
    return _of_type(g, g.call(torch.pow, a, b), kind)


def _of_type(g: Graph, value: Any, dtype: torch.dtype) -> Any:
    return value if samples(value).dtype == dtype else g.call("to", value, dtype)


def _spread(items: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    return items * count if len(items) == 1 else items


def _axes(g: Graph, x: list[Any], a: Mapping[str, Any], at: int = 1) -> list[int] | None:
    """Axes as an input, from opset 13 or 18 on, or as an attribute."""
    if len(x) > at and x[at] is not None:
        return [_int(each) for each in g.sizes(x[at]).items]
    return list(a["axes"]) if "axes" in a else None


def _int(value: Any) -> int:
    if not isinstance(value, int):
        raise NotTakenBackError("an axis or a number of it hangs on the sizes of the inputs")
    return value


def _reduce(function: Callable[..., Any]) -> Handler:
    def handle(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
        value = g.tensor(x[0])
        axes = _axes(g, x, a)
        if not axes:
            if a.get("noop_with_empty_axes", 0):
                return value
            axes = list(range(samples(value).ndim))
        return _of_type(g, g.call(function, value, axes, bool(a.get("keepdims", 1))), samples(value).dtype)

    return handle


def _reshape(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    sizes = g.sizes(x[1]).items
    if isinstance(x[0], Sizes) and len(sizes) < 2:  # of more axes it is a table, as those of paddings are
        return x[0].of(x[0].items, scalar=not sizes)
    value = g.tensor(x[0])
    if not a.get("allowzero", 0):
        sizes = tuple(_kept(g, value, at) if each == 0 else each for at, each in enumerate(sizes))
    return g.call("reshape", value, sizes)


def _kept(g: Graph, x: Any, axis: int) -> Any:
    return g.size(x, axis) if isinstance(x, Live) else x.shape[axis]


def _shape(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    if isinstance(x[0], Sizes):
        return Sizes(() if x[0].scalar else (len(x[0].items),))
    value = g.tensor(x[0])
    axes = range(samples(value).ndim)[a.get("start", 0) : a.get("end")]
    return Sizes(tuple(_kept(g, value, axis) for axis in axes))


def _gather(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    axis = a.get("axis", 0)
    if isinstance(x[0], Sizes) and isinstance(x[1], torch.Tensor | Sizes):
        at = g.sizes(x[1])
        return x[0].of(tuple(x[0].items[_int(each)] for each in at.items), scalar=at.scalar)
    table, index = g.tensor(x[0]), g.tensor(x[1])
    axis %= samples(table).ndim
    if isinstance(index, torch.Tensor) and index.ndim == 0:
        return g.call(torch.select, table, axis, int(index))
    matrix = isinstance(table, torch.Tensor) and table.is_floating_point() and table.ndim == 2
    if matrix and axis == 0 and isinstance(index, Live):
        return g.layer(torch.nn.Embedding, tuple(table.shape), {"weight": table}, index)
    where = (*[slice(None)] * axis, index)
    return g.call(operator.getitem, table, where)


def _gather_elements(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    return g.call(torch.gather, g.tensor(x[0]), a.get("axis", 0), g.tensor(x[1]))


def _gather_nd(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    table, places = g.tensor(x[0]), g.tensor(x[1])
    if a.get("batch_dims", 0):
        raise NotTakenBackError("it gathers from each sample")
    where = tuple(g.call(torch.select, places, -1, at) for at in range(samples(places).shape[-1]))
    return g.call(operator.getitem, table, where)


def _slice(g: Graph, x: list[Any], _a: Mapping[str, Any]) -> Any:
    starts, ends = g.sizes(x[1]).items, g.sizes(x[2]).items
    value = x[0] if isinstance(x[0], Sizes) else g.tensor(x[0])
    rank = 1 if isinstance(value, Sizes) else samples(value).ndim
    axes = _axes(g, x, {}, 3) or list(range(len(starts)))
    steps = [_int(each) for each in g.sizes(x[4]).items] if len(x) > 4 and x[4] is not None else [1] * len(starts)
    parts: list[Any] = [slice(None)] * rank
    flipped: list[int] = []
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if isinstance(value, Sizes):
            if isinstance(start, Live) or isinstance(end, Live):
                raise NotTakenBackError("it takes a part of a shape whose bounds hang on the inputs")
            return value.of(value.items[max(start, -len(value.items)) : end : step])
        if step < 0:
            parts[axis] = _turned(start, end, step)
            flipped.append(axis)
            continue
        stop = None if isinstance(end, int) and end >= FAR else end
        parts[axis] = slice(None if start == 0 else start, stop, None if step == 1 else step)
    if parts != [slice(None)] * rank:
        value = g.call(operator.getitem, value, tuple(parts))
    return g.call(torch.flip, value, tuple(flipped)) if flipped else value


def _turned(start: Any, end: Any, step: int) -> slice:
    """What a slice takes that goes backwards one by one, in the order in which it lies: at every size."""
    known = isinstance(start, int) and isinstance(end, int)
    if step != -1 or not known or start < -1 or end == -1:  # further from the end, none may be left
        raise NotTakenBackError("it steps backwards by more than 1, or from where its input does not tell")
    high = None if start == -1 or start >= FAR else start + 1
    return slice(None if end <= -FAR else end + 1, high)


def _squeeze(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    if isinstance(x[0], Sizes):
        return x[0].of(x[0].items, scalar=len(x[0].items) == 1)
    axes = _axes(g, x, a)
    return g.call(torch.squeeze, x[0], tuple(axes)) if axes else g.call(torch.squeeze, x[0])


def _unsqueeze(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    axes = _axes(g, x, a) or []
    if isinstance(x[0], Sizes) and x[0].scalar and axes in ([0], [-1]):
        return x[0].of(x[0].items)
    value = g.tensor(x[0])
    rank = samples(value).ndim + len(axes)
    for axis in sorted(each % rank for each in axes):
        value = g.call(torch.unsqueeze, value, axis)
    return value


def _concat(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    if any(isinstance(each, Sizes) for each in x) and not any(isinstance(each, Live) for each in x):
        parts = [g.sizes(each) for each in x]
        return parts[0].of(tuple(item for each in parts for item in each.items))
    return g.call(torch.cat, [g.tensor(each) for each in x], a["axis"])


def _cast(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    try:
        dtype = torch.from_numpy(np.empty(0, onnx.helper.tensor_dtype_to_np_dtype(a["to"]))).dtype
    except TypeError as err:
        raise NotTakenBackError("it casts to a type that torch has no arrays of") from err
    if isinstance(x[0], Sizes) and dtype in (torch.int64, torch.int32):
        span = torch.iinfo(dtype)
        if all(isinstance(each, Live) or span.min <= each <= span.max for each in x[0].items):
            return Sizes(x[0].items, x[0].scalar, dtype)
    return _of_type(g, g.tensor(x[0]), dtype)


def _expand(g: Graph, x: list[Any], _a: Mapping[str, Any]) -> Any:
    value, sizes = g.tensor(x[0]), list(g.sizes(x[1]).items)
    shape = samples(value).shape
    sizes = [1] * (len(shape) - len(sizes)) + sizes
    for back, size in enumerate(reversed(shape), 1):  # either side may be the one that is 1
        if size != 1 and sizes[-back] == 1:
            sizes[-back] = -1
    return g.call("expand", value, *sizes)


def _constant_of_shape(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    value = a.get("value")
    fill = torch.zeros(1) if value is None else torch.from_numpy(onnx.numpy_helper.to_array(value).copy())
    sizes = g.sizes(x[0]).items
    count = math.prod(samples(sizes))
    if count > MOST:
        raise NotTakenBackError("it makes a tensor of more elements than memory should be taken for")
    known = all(isinstance(each, int) for each in sizes)
    if known and len(sizes) <= 1 and count <= MOST_SIZES and is_whole(fill):
        return Sizes((int(fill),) * count, not sizes, fill.dtype)
    return g.call(torch.full, sizes, fill.item(), dtype=fill.dtype)


def _range(g: Graph, x: list[Any], _a: Mapping[str, Any]) -> Any:
    if all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in x):
        return g.call(torch.arange, *(each.item() for each in x), dtype=x[0].dtype)
    given = [g.sizes(each) for each in x]
    return g.call(torch.arange, *(each.items[0] for each in given), dtype=given[0].dtype)


def _where(g: Graph, x: list[Any], _a: Mapping[str, Any]) -> Any:
    if isinstance(x[0], torch.Tensor) and x[0].ndim == 1 and len(x[0]) <= MOST_SIZES and all(map(is_whole, x[1:])):
        shapes = [_shape(g, [each], {}).items for each in x]
        if shapes[0] == shapes[1] == shapes[2]:
            one, other = (g.sizes(each) for each in x[1:])
            pairs = zip(x[0].tolist(), one.items, other.items, strict=True)
            return one.of(tuple(a if use else b for use, a, b in pairs))
    return g.call(torch.where, *(g.tensor(each) for each in x))


def _equal(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    if any(isinstance(each, Sizes) for each in x) and not any(isinstance(each, Live) for each in x):
        one, other = (g.sizes(each).items for each in x)
        count = max(len(one), len(other))
        pairs = zip(_spread(one, count), _spread(other, count), strict=True)
        found = [_alike(p, q) for p, q in pairs]
        if None not in found:
            made = torch.tensor(found)
            return made[0] if all(_shape(g, [each], {}).items == () for each in x) else made
    return _two("Equal")(g, x, a)


def _alike(one: Any, other: Any) -> bool | None:
    """Whether two sizes are the same, where that is known: a size is not -1, but a difference may be."""
    if not (isinstance(one, Live) or isinstance(other, Live)):
        return bool(one == other)
    apart = any(is_count(a) and not isinstance(b, Live) and b < 0 for a, b in ((one, other), (other, one)))
    return False if apart else None


def _clip(g: Graph, x: list[Any], _a: Mapping[str, Any]) -> Any:
    bounds = [each if each is None else g.tensor(each) for each in [*x[1:], None, None][:2]]
    if any(isinstance(each, Live) for each in bounds):
        raise NotTakenBackError("its bounds are computed")
    low, high = (None if each is None else each.item() for each in bounds)
    return g.call(torch.clamp, g.tensor(x[0]), low, high)


def _split(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    value, axis = g.tensor(x[0]), a.get("axis", 0)
    if len(x) > 1 and x[1] is not None:
        sizes = [_int(each) for each in g.sizes(x[1]).items]
    else:
        whole, count = samples(value).shape[axis], int(a["num_outputs"] if "num_outputs" in a else a["outputs"])
        each = -(-whole // count)
        sizes = [min(each, whole - at * each) for at in range(count)]
    parts = g.call(torch.split, value, sizes, axis)
    return [g.call(operator.getitem, parts, at) for at in range(len(sizes))]


def _softmax(function: Callable[..., Any]) -> Handler:
    return lambda g, x, a: g.call(function, x[0], a.get("axis", -1))


def _pool(name: str) -> Handler:
    def handle(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
        kernel = list(a["kernel_shape"])
        dims = len(kernel)
        if a.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
            raise NotTakenBackError("its padding is automatic")
        pads = list(a.get("pads", [0] * 2 * dims))
        stride, dilation = list(a.get("strides", [1] * dims)), list(a.get("dilations", [1] * dims))
        ceil = bool(a.get("ceil_mode", 0))
        value = x[0]
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
    if mode != "constant" or (len(x) > 3 and x[3] is not None):
        raise NotTakenBackError(f"its padding is {mode}, or of axes that are named")
    fill = 0.0 if len(x) < 3 or x[2] is None else g.tensor(x[2]).item()
    return g.call(F.pad, x[0], torch_pads([_int(each) for each in g.sizes(x[1]).items]), "constant", fill)


def _flatten(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    axis = a.get("axis", 1)
    if axis == 1 and samples(x[0]).ndim > 1:
        return g.call(torch.flatten, x[0], 1)
    rows: Any = 1
    for at in range(axis % max(1, samples(x[0]).ndim) if axis < 0 else axis):
        rows = g.number(operator.mul, rows, _kept(g, x[0], at))
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
    "Equal": _equal, "Identity": _identity, "Dropout": _identity, "Reshape": _reshape, "Shape": _shape,
    "Gather": _gather, "GatherElements": _gather_elements, "GatherND": _gather_nd,
    "Slice": _slice, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze, "Concat": _concat, "Cast": _cast,
    "Expand": _expand, "ConstantOfShape": _constant_of_shape, "Range": _range, "Where": _where, "Clip": _clip,
    "Split": _split, "Softmax": _softmax(torch.softmax), "LogSoftmax": _softmax(torch.log_softmax),
    "MaxPool": _pool("MaxPool"), "AveragePool": _pool("AveragePool"), "GlobalAveragePool": _global(torch.mean),
    "GlobalMaxPool": _global(torch.amax), "ReduceMean": _reduce(torch.mean), "ReduceSum": _reduce(torch.sum),
    "ReduceMax": _reduce(torch.amax), "ReduceMin": _reduce(torch.amin), "Pad": _pad, "Flatten": _flatten,
    "Transpose": _transpose, "HardSigmoid": _hard_sigmoid, "Max": _max(torch.maximum), "Min": _max(torch.minimum),
    "Sum": _max(torch.add),
    "LeakyRelu": lambda g, x, a: g.call(F.leaky_relu, x[0], float(a.get("alpha", 0.01))),
    "Elu": lambda g, x, a: g.call(F.elu, x[0], float(a.get("alpha", 1.0))),
    "Gelu": lambda g, x, a: g.call(F.gelu, x[0], approximate=a.get("approximate", b"none").decode()),
}  # fmt: skip
