"""Resize of ONNX, by interpolation of torch where the two sample at the same places; as of opset 13 to 19."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from compress.formats.onnx_layers.static import VARIES
from compress.formats.onnx_layers.values import MOST, Graph, Live, NotTakenBackError, samples

__all__ = ["resize"]

_LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}
_FROM_THE_MIDDLE = ("half_pixel", "pytorch_half_pixel")
_TO_THE_NEAREST = ("round_prefer_floor", "round_prefer_ceil")
_CUBIC = -0.75  # the coefficient that torch has, and ONNX where nothing is said


def resize(g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
    """A picture in another size.

    Raises:
        NotTakenBackError: torch samples at other places, or its sizes are computed from values.
    """
    value = g.tensor(x[0])
    shape = tuple(samples(value).shape)
    axes = [axis % len(shape) for axis in a.get("axes", range(len(shape)))]
    scales, sizes = _scales(x), None
    if scales is None:
        sizes = dict(zip(axes, g.sizes(x[3]).items, strict=True))
        scales = [samples(sizes[axis]) / shape[axis] for axis in axes]
    by_axis = dict(zip(axes, scales, strict=True))
    if any(by_axis.get(axis, 1.0) != 1.0 for axis in (0, 1)) or len(shape) not in _LINEAR:
        raise NotTakenBackError("it changes other axes than those of a picture behind its channels")
    if math.prod(shape) * math.prod(scales) > MOST:
        raise NotTakenBackError(f"it makes a tensor of over {MOST:,} elements")
    if a.get("antialias", 0) or a.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
        raise NotTakenBackError("it filters what it leaves out, or keeps the ratio of height and width")
    pictures = range(2, len(shape))
    mode, corners = _mode(a, len(shape), [by_axis.get(axis, 1.0) for axis in pictures], known=sizes is None)
    to: dict[str, Any] = {}
    if sizes is None:
        still = a.get("shape") or [None] * len(shape)
        if any(still[axis] in (None, VARIES) and not (64 * by_axis.get(axis, 1.0)).is_integer() for axis in pictures):
            raise NotTakenBackError("its factors are rounded, and with them the sizes that it makes of such as vary")
        if a.get("coordinate_transformation_mode") == b"pytorch_half_pixel" and not mode.startswith("nearest"):
            factors = [(by_axis.get(axis, 1.0), still[axis]) for axis in pictures]
            if any(by < 1.0 and (size in (None, VARIES) or int(size * by) < 2) for by, size in factors):
                raise NotTakenBackError("it may make a picture of one row or column, which torch takes otherwise")
        to["scale_factor"] = tuple(by_axis.get(axis, 1.0) for axis in pictures)
    else:
        to["size"] = tuple(sizes[axis] if axis in sizes else _kept(g, value, axis) for axis in pictures)
        if mode not in ("nearest", "nearest-exact") and 1 in samples(to["size"]):
            raise NotTakenBackError("it makes a picture of one row or column, which torch takes from elsewhere")
    return g.call(F.interpolate, value, **to, mode=mode, align_corners=corners)


def _scales(x: Sequence[Any]) -> list[float] | None:
    """A factor for each axis; None where sizes stand in their place."""
    found = x[2] if len(x) > 2 else None
    if isinstance(found, Live):
        raise NotTakenBackError("its scales are computed from the inputs")
    if not isinstance(found, torch.Tensor) or not found.numel():
        return None
    return [float(str(each)) for each in found.reshape(-1).numpy()]  # 0.7, and not float32's 0.699999988


def _mode(a: Mapping[str, Any], rank: int, scales: Sequence[float], *, known: bool) -> tuple[str, bool | None]:
    """Torch's mode, and whether corners stand on corners.

    Args:
        a: attributes of the node.
        rank: of the picture.
        scales: of its axes behind the channels.
        known: whether the scales are the same whatever comes in.
    """
    mode = a.get("mode", b"nearest").decode()
    place = a.get("coordinate_transformation_mode", b"half_pixel").decode()
    if mode == "nearest":
        rounding = a.get("nearest_mode", b"round_prefer_floor").decode()
        if (place, rounding) == ("asymmetric", "floor"):
            return "nearest", None
        if (place, rounding) == ("tf_half_pixel_for_nn", "floor"):
            return "nearest-exact", None
        # Of a whole factor nothing lies in the middle between two places, which torch and ONNX round apart.
        if known and place in _FROM_THE_MIDDLE and rounding in _TO_THE_NEAREST and all(map(float.is_integer, scales)):
            return "nearest-exact", None
    elif mode in ("linear", "cubic") and place in (*_FROM_THE_MIDDLE, "align_corners"):
        cubic = mode == "cubic"
        if cubic and (
            rank != 4 or a.get("exclude_outside", 0) or not math.isclose(a.get("cubic_coeff_a", _CUBIC), _CUBIC)
        ):
            raise NotTakenBackError("it is cubic with another coefficient or border than torch's, or of no picture")
        return "bicubic" if cubic else _LINEAR[rank], place == "align_corners"
    raise NotTakenBackError(f"torch has no {mode} interpolation that samples as {place} does, at every size")


def _kept(g: Graph, value: Any, axis: int) -> Any:
    return g.size(value, axis) if isinstance(value, Live) else value.shape[axis]
