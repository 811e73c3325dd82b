"""Operators of ONNX with weights in the file, as the layers of torch.nn that have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from compress.formats.onnx_layers.operators import FUNCTIONS, torch_pads
from compress.formats.onnx_layers.recurrent import RECURRENT
from compress.formats.onnx_layers.shapes import Handler
from compress.formats.onnx_layers.static import same_pads
from compress.formats.onnx_layers.values import Graph, Live, NotTakenBackError, in_file, samples

__all__ = ["HANDLERS"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def _conv(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    in_file(x, 1, 2)
    value, weight, bias = x[0], x[1], x[2] if len(x) > 2 else None
    dims = weight.ndim - 2
    if not 1 <= dims <= 3:
        raise NotTakenBackError(f"it is of {dims} dimensions")
    stride, dilation = (list(a.get(name, [1] * dims)) for name in ("strides", "dilations"))
    pads = list(a.get("pads", [0] * 2 * dims))
    auto = a.get("auto_pad", b"NOTSET")
    if auto in (b"SAME_UPPER", b"SAME_LOWER"):
        pads = same_pads(auto, a.get("shape"), weight.shape[2:], stride, dilation)
    elif auto == b"VALID":
        pads = [0] * 2 * dims
    if pads[:dims] != pads[dims:]:
        value = g.call(F.pad, value, torch_pads(pads))
        pads = [0] * dims
    group = a.get("group", 1)
    form = (
        weight.shape[1] * group, weight.shape[0], tuple(weight.shape[2:]), tuple(stride), tuple(pads[:dims]),
        tuple(dilation), group, bias is not None,
    )  # fmt: skip
    return g.layer(_CONVOLUTIONS[dims - 1], form, {"weight": weight, "bias": bias}, value)


def _transposed(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    in_file(x, 1, 2)
    weight, bias = x[1], x[2] if len(x) > 2 else None
    dims = weight.ndim - 2
    pads = list(a.get("pads", [0] * 2 * dims))
    if a.get("auto_pad", b"NOTSET") != b"NOTSET" or "output_shape" in a or pads[:dims] != pads[dims:]:
        raise NotTakenBackError("its padding is not the same on both sides")
    stride, dilation = (tuple(a.get(name, [1] * dims)) for name in ("strides", "dilations"))
    group, more = a.get("group", 1), tuple(a.get("output_padding", [0] * dims))
    form = (
        weight.shape[0], weight.shape[1] * group, tuple(weight.shape[2:]), stride, tuple(pads[:dims]), more, group,
        bias is not None, dilation,
    )  # fmt: skip
    return g.layer(_TRANSPOSED[dims - 1], form, {"weight": weight, "bias": bias}, x[0])


def _linear(g: Graph, x: Live, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """Of a weight [inputs, outputs]."""
    form = (weight.shape[0], weight.shape[1], bias is not None)
    return g.layer(nn.Linear, form, {"weight": g.turned(weight), "bias": bias}, x)


def _gemm(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    in_file(x, 1, 2)
    bias = x[2] if len(x) > 2 else None
    weight = g.turned(x[1]) if a.get("transB", 0) else x[1]
    value = g.call("t", x[0]) if a.get("transA", 0) else x[0]
    if float(a.get("alpha", 1.0)) != 1.0:
        weight = g.call(torch.mul, weight, float(a["alpha"]))
    if bias is not None and float(a.get("beta", 1.0)) != 1.0:
        bias = g.call(torch.mul, bias, float(a["beta"]))
    if bias is not None and tuple(bias.shape) != (weight.shape[1],):
        if bias.ndim == 2 and bias.shape[0] != 1:
            return g.call(torch.add, _linear(g, value, weight, None), bias)
        bias = g.call("expand", g.call("reshape", bias, (-1,)), weight.shape[1])
    return _linear(g, value, weight, bias)


def _matmul(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    if isinstance(x[0], Live) and isinstance(x[1], torch.Tensor) and x[1].ndim == 2 and x[1].is_floating_point():
        return _linear(g, x[0], x[1], a.get("bias"))
    return FUNCTIONS["MatMul"](g, x, a)


def _batch_norm(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    in_file(x, 1, 2, 3, 4)
    kind = _NORMS.get(samples(x[0]).ndim)
    if kind is None or a.get("training_mode", 0):
        raise NotTakenBackError("it normalizes as in training, or a tensor of more dimensions than 5")
    held = dict(zip(("weight", "bias", "running_mean", "running_var"), x[1:5], strict=True))
    return g.layer(kind, (len(x[1]), float(a.get("epsilon", 1e-5))), held, x[0])


def _layer_norm(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    in_file(x, 1, 2)
    rank, axis = samples(x[0]).ndim, a.get("axis", -1)
    shape, bias = tuple(samples(x[0]).shape[axis % rank :]), x[2] if len(x) > 2 else None
    if tuple(x[1].shape) != shape:
        raise NotTakenBackError("its scale has not the shape of what it normalizes")
    form = (shape, float(a.get("epsilon", 1e-5)), True, bias is not None)
    return g.layer(nn.LayerNorm, form, {"weight": x[1], "bias": bias}, x[0])


def _instance_norm(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    in_file(x, 1, 2)
    kind = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}.get(samples(x[0]).ndim)
    if kind is None:
        raise NotTakenBackError("it normalizes a tensor of other dimensions than 3 to 5")
    form = (len(x[1]), float(a.get("epsilon", 1e-5)), 0.1, True)
    return g.layer(kind, form, {"weight": x[1], "bias": x[2]}, x[0])


def _group_norm(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    """Its scales are one for each channel; before opset 21, one for each group."""
    in_file(x, 1, 2)
    channels, groups = samples(x[0]).shape[1], a["num_groups"]
    weight, bias = (
        each if len(each) == channels else g.call("repeat_interleave", each, channels // len(each)) for each in x[1:3]
    )
    return g.layer(
        nn.GroupNorm, (groups, channels, float(a.get("epsilon", 1e-5))), {"weight": weight, "bias": bias}, x[0]
    )


def _rms_norm(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    in_file(x, 1)
    rank, axis = samples(x[0]).ndim, a.get("axis", -1)
    shape = tuple(samples(x[0]).shape[axis % rank :])
    if tuple(x[1].shape) != shape:
        raise NotTakenBackError("its scale has not the shape of what it normalizes")
    return g.layer(nn.RMSNorm, (shape, float(a.get("epsilon", 1e-5))), {"weight": x[1]}, x[0])


def _prelu(g: Graph, x: list[Any], _a: Mapping[str, Any]) -> Any:
    in_file(x, 1)
    slope = g.call("reshape", x[1], (-1,))
    rank = samples(x[0]).ndim
    spread = [1] * (rank - x[1].ndim) + list(x[1].shape)  # over the last axes, as numpy does
    if len(slope) > 1 and any(size != 1 for axis, size in enumerate(spread) if axis != 1):
        raise NotTakenBackError("it has slopes for other axes than the channels")
    return g.layer(nn.PReLU, (len(slope),), {"weight": slope}, x[0])


HANDLERS: Mapping[str, Handler] = {
    **FUNCTIONS, "Conv": _conv, "ConvTranspose": _transposed, "Gemm": _gemm, "MatMul": _matmul,
    "BatchNormalization": _batch_norm, "LayerNormalization": _layer_norm, "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm, "RMSNormalization": _rms_norm, "PRelu": _prelu, **RECURRENT,
}  # fmt: skip
