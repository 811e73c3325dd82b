"""Operators of ONNX that make, read or rearrange shapes, and those that take sizes; as of opset 13."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import torch

from compress.formats.onnx_layers.values import (
    MOST,
    MOST_SIZES,
    Graph,
    Live,
    NotTakenBackError,
    Sizes,
    TooLargeError,
    is_count,
    is_whole,
    samples,
)

__all__ = ["SHAPES", "Handler", "axes_of", "fixed", "kept", "of_type", "spread"]

Handler = Callable[[Graph, list[Any], Mapping[str, Any]], Any]
FAR = 2**31 - 1  # a place in a slice that stands for the end, whatever the size


def of_type(g: Graph, value: Any, dtype: torch.dtype) -> Any:
    """A tensor as one of that type."""
    return value if samples(value).dtype == dtype else g.call("to", value, dtype)


def spread(items: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Numbers so many times as another list is long, where they are one."""
    return items * count if len(items) == 1 else items


def axes_of(g: Graph, x: list[Any], a: Mapping[str, Any], at: int = 1) -> list[int] | None:
    """Axes as an input, from opset 13 or 18 on, or as an attribute."""
    if len(x) > at and x[at] is not None:
        return [fixed(each) for each in g.sizes(x[at]).items]
    return list(a["axes"]) if "axes" in a else None


def fixed(value: Any) -> int:
    """A number that is the same whatever comes in.

    Raises:
        NotTakenBackError: it hangs on the inputs.
    """
    if not isinstance(value, int):
        raise NotTakenBackError("an axis or a number of it hangs on the sizes of the inputs")
    return value


def _reshape(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    sizes = g.sizes(x[1]).items
    if isinstance(x[0], Sizes) and len(sizes) < 2:  # of more axes it is a table, as those of paddings are
        return x[0].of(x[0].items, scalar=not sizes)
    value = g.tensor(x[0])
    if not a.get("allowzero", 0):
        sizes = tuple(kept(g, value, at) if each == 0 else each for at, each in enumerate(sizes))
    return g.call("reshape", value, sizes)


def kept(g: Graph, x: Any, axis: int) -> Any:
    """The size of an axis, read when the graph is run where that is computed."""
    return g.size(x, axis) if isinstance(x, Live) else x.shape[axis]


def _shape(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    if isinstance(x[0], Sizes):
        return Sizes(() if x[0].scalar else (len(x[0].items),))
    value = g.tensor(x[0])
    axes = range(samples(value).ndim)[a.get("start", 0) : a.get("end")]
    return Sizes(tuple(kept(g, value, axis) for axis in axes))


def _gather(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    axis = a.get("axis", 0)
    if isinstance(x[0], Sizes) and isinstance(x[1], torch.Tensor | Sizes):
        at = g.sizes(x[1])
        return x[0].of(tuple(x[0].items[fixed(each)] for each in at.items), scalar=at.scalar)
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
    axes = axes_of(g, x, {}, 3) or list(range(len(starts)))
    steps = [fixed(each) for each in g.sizes(x[4]).items] if len(x) > 4 and x[4] is not None else [1] * len(starts)
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
    axes = axes_of(g, x, a)
    return g.call(torch.squeeze, x[0], tuple(axes)) if axes else g.call(torch.squeeze, x[0])


def _unsqueeze(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    axes = axes_of(g, x, a) or []
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
    return of_type(g, g.tensor(x[0]), dtype)


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
        raise TooLargeError("it makes a tensor of more elements than memory should be taken for")
    known = all(isinstance(each, int) for each in sizes)
    if known and len(sizes) <= 1 and count <= MOST_SIZES and is_whole(fill):
        return Sizes((int(fill),) * count, not sizes, fill.dtype)
    return g.call(torch.full, sizes, fill.item(), dtype=fill.dtype)


def _range(g: Graph, x: list[Any], _a: Mapping[str, Any]) -> Any:
    if all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in x):
        return g.call(torch.arange, *(each.item() for each in x), dtype=x[0].dtype)
    if all(isinstance(each, torch.Tensor | Live) for each in x):  # of sizes as floats, which are whole
        bounds = [_counted(each) for each in x]
        if None not in bounds:
            return g.call(torch.arange, *bounds, dtype=samples(x[0]).dtype)
    given = [g.sizes(each) for each in x]
    return g.call(torch.arange, *(each.items[0] for each in given), dtype=given[0].dtype)


def _counted(value: Any) -> Any:
    """The whole number that a float without axes is of: a constant, or a size that was cast to it; None if neither."""
    if isinstance(value, torch.Tensor):
        return int(value) if value.ndim == 0 and value.is_floating_point() and float(value).is_integer() else None
    node = value.node
    made = node.args[0] if node.op == "call_method" and node.target == "to" else None
    full = isinstance(made, torch.fx.Node) and getattr(made.target, "__name__", "") == "full" and made.args[0] == ()
    if not full or not samples(value).is_floating_point():
        return None
    assert isinstance(made, torch.fx.Node)  # noqa: S101  as told above
    return Live(made.args[1], int(value.sample), counts=True) if isinstance(made.args[1], torch.fx.Node) else None


def _where(g: Graph, x: list[Any], _a: Mapping[str, Any]) -> Any:
    if isinstance(x[0], torch.Tensor) and x[0].ndim == 1 and len(x[0]) <= MOST_SIZES and all(map(is_whole, x[1:])):
        shapes = [_shape(g, [each], {}).items for each in x]
        if shapes[0] == shapes[1] == shapes[2]:
            one, other = (g.sizes(each) for each in x[1:])
            pairs = zip(x[0].tolist(), one.items, other.items, strict=True)
            return one.of(tuple(a if use else b for use, a, b in pairs))
    return g.call(torch.where, *(g.tensor(each) for each in x))


def _equal(g: Graph, x: list[Any], _a: Mapping[str, Any]) -> Any:
    if any(isinstance(each, Sizes) for each in x) and not any(isinstance(each, Live) for each in x):
        one, other = (g.sizes(each).items for each in x)
        count = max(len(one), len(other))
        pairs = zip(spread(one, count), spread(other, count), strict=True)
        found = [_alike(p, q) for p, q in pairs]
        if None not in found:
            made = torch.tensor(found)
            return made[0] if all(_shape(g, [each], {}).items == () for each in x) else made
    return g.call(torch.eq, *(g.tensor(each) for each in x))


def _alike(one: Any, other: Any) -> bool | None:
    """Whether two sizes are the same, where that is known: a size is not -1, but a difference may be."""
    if not (isinstance(one, Live) or isinstance(other, Live)):
        return bool(one == other)
    apart = any(is_count(a) and not isinstance(b, Live) and b < 0 for a, b in ((one, other), (other, one)))
    return False if apart else None


SHAPES: Mapping[str, Handler] = {
    "Equal": _equal, "Reshape": _reshape, "Shape": _shape, "Gather": _gather, "GatherElements": _gather_elements,
    "GatherND": _gather_nd, "Slice": _slice, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze, "Concat": _concat,
    "Cast": _cast, "Expand": _expand, "ConstantOfShape": _constant_of_shape, "Range": _range, "Where": _where,
}  # fmt: skip
