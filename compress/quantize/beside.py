"""Two graphs of one network on the same data: how far their tensors are apart, what clips, which channels died."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from compress.data.dataset import Dataset
from compress.model.apart import without_fills
from compress.quantize.calibrate import batch_for
from compress.quantize.cuts import cuts, noted
from compress.quantize.graph import observe
from compress.stage import Progress

__all__ = ["Range", "Tensor", "beside"]

QUANTIZED = {TensorProto.UINT8: (0, 255), TensorProto.INT8: (-128, 127), TensorProto.UINT16: (0, 65535)}
RESCALED = 4.0  # times as much noise as with scales fitted, from which on the scales are what differs
ROUNDED = 1e-12  # of the signal: what is left of a fit's noise by rounding


@dataclass(frozen=True)
class Tensor:
    """A tensor that both have.

    Attributes:
        name: in both.
        snr_db: its signal to noise; None where they are equal.
        dead_channels: that became constant.
        rescaled: whether its channels are in another scale each, which is gone in the outputs, as smoothing makes it;
            what is left of the noise with these scales fitted is told.
    """

    name: str
    snr_db: float | None
    dead_channels: tuple[int, ...] = ()
    rescaled: bool = False


@dataclass(frozen=True)
class Range:
    """What a QuantizeLinear holds, and the share of its values that lie beyond."""

    tensor: str
    low: float
    high: float
    clipped: float


def beside(
    first: tuple[Path, ModelProto], second: tuple[Path, ModelProto], data: Dataset, progress: Progress
) -> tuple[tuple[Tensor, ...], tuple[Range, ...], dict[str, str]]:
    """Run both, a few samples at a time.

    Args:
        first: the original's file, and what it holds; nodes and tensors have the names of the other.
        second: the same of what was made of it.
        data: fits the inputs of both.
        progress: is told of samples done.

    Returns:
        Tensors in the order of the graph; ranges of which values clip, most first; tensors that could not be compared,
        with why.
    """
    (path, before), (other, after) = first, second
    made = {name for node in after.graph.node for name in node.output}
    quantizers, told = _quantizers(after), noted(after)
    drawn = {**cuts(before, after), **(told or {})}

    alike = [name for node in before.graph.node for name in node.output if name]
    common = [name for name in alike if name in made or name in drawn]
    unmatched = {name: "the other has no such tensor" for name in alike if name not in common}
    names = list(dict.fromkeys(common))
    seen = {name: _Seen() for name in names}
    if told is None:  # another's file: a range from 0 on may be a Relu's or a Clip's, which is seen nowhere else
        for name in [name for name, (low, _, _) in quantizers.items() if low == 0 and name not in {*alike, *drawn}]:
            del quantizers[name]
            unmatched[name] = "what lies beyond its range, from 0 on, may be cut on purpose (a Relu, a Clip)"
    beyond = {name: [0, 0] for name in quantizers}
    batch, done = batch_for(path, names, data), 0
    theirs = observe(other, [*names, *quantizers], data, batch=batch)
    for (was, samples), (now, _) in zip(observe(path, names, data, batch=batch), theirs, strict=True):
        for name in (name for name in names if was[name].dtype == np.float32):
            if now[name].dtype != was[name].dtype:
                unmatched[name] = f"it is {now[name].dtype}, {was[name].dtype} before"
                continue
            drawn_in = np.clip(now[name], *drawn.get(name, (-np.inf, np.inf)))
            if was[name].shape != drawn_in.shape:
                unmatched[name] = f"it is {list(drawn_in.shape)}, {list(was[name].shape)} before"
            elif not seen[name].add(was[name], drawn_in, samples):
                unmatched[name] = "NaN or infinities are in one and not in the other"
        for name, (low, high, step) in quantizers.items():
            values = np.clip(now[name], *drawn.get(name, (-np.inf, np.inf)))
            beyond[name][0] += int(((values < low - step / 2) | (values > high + step / 2)).sum())
            beyond[name][1] += values.size
        done += samples
        progress(done, len(data), "samples")
    ranges = [Range(n, quantizers[n][0], quantizers[n][1], out / total) for n, (out, total) in beyond.items() if out]
    there = [name for name in names if seen[name].any and name not in unmatched]
    shown = {value.name for value in after.graph.output}
    ends = [seen[name].ratio for name in there if name in shown]
    tensors = tuple(seen[name].result(name, max(ends, default=0.0)) for name in there)
    return tensors, tuple(sorted(ranges, key=lambda each: -each.clipped)), unmatched


class _Seen:
    """Sums over samples of one tensor of both."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0
        self.any = False
        self.products: dict[int, np.ndarray[Any, Any]] = {}  # by axis: of both, and the other's squares, by channel
        self.ends: list[list[np.ndarray[Any, Any]]] | None = [[], []]

    def add(self, was: np.ndarray[Any, Any], now: np.ndarray[Any, Any], samples: int) -> bool:
        """Whether they can be compared: what is infinite or NaN (a mask) has to be so in both."""
        there = np.isfinite(was)
        if not np.array_equal(was[~there], now[~there], equal_nan=True) or not np.isfinite(now[there]).all():
            return False
        if not was.size:
            return True
        self.any = True
        was, now = without_fills(was, now)  # a mask's, which would be all of the signal
        wide = was[there].astype(np.float64)
        self.signal += float(np.square(wide).sum())
        self.noise += float(np.square(now[there] - wide).sum())
        if there.all() and was.ndim > 1:
            for axis in {_channel_axis(was), was.ndim - 1}:
                others = tuple(at for at in range(was.ndim) if at != axis)
                wide, mine = was.astype(np.float64), now.astype(np.float64)
                sums = np.stack([(wide * mine).sum(axis=others), np.square(mine).sum(axis=others)])
                known = self.products.get(axis, np.zeros_like(sums))
                self.products[axis] = known + sums if known.shape == sums.shape else np.zeros((2, 0))
        self._channels(was, now, samples)
        return True

    def _channels(self, was: np.ndarray[Any, Any], now: np.ndarray[Any, Any], samples: int) -> None:
        """Each channel's ends; none where samples do not lead, or where channels are of another number each time."""
        if self.ends is None or was.ndim == 0 or (was.ndim > 1 and was.shape[0] % samples):
            self.ends = None
            return
        for at, values in enumerate((was, now)):
            axis = _channel_axis(values)
            flat = np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1) if values.ndim > 1 else values[None]
            low, high = flat.min(axis=1), flat.max(axis=1)
            ends = self.ends[at]
            if ends and len(ends[0]) != len(low):
                self.ends = None
                return
            self.ends[at] = [np.minimum(ends[0], low), np.maximum(ends[1], high)] if ends else [low, high]

    @property
    def ratio(self) -> float:
        """Of signal to noise."""
        return self.signal / self.noise if self.noise else math.inf

    def _left(self) -> float:
        """Noise with a scale fitted to each channel."""
        found = [self.noise]
        for both, squares in self.products.values():
            if len(both):
                found.append(self.signal - float((np.square(both) / np.where(squares == 0, 1.0, squares)).sum()))
        return max(min(found), ROUNDED * self.signal)

    def result(self, name: str, outputs: float) -> Tensor:
        """What is told of it, beside the ratio of the outputs."""
        dead = np.zeros(0, np.int64)
        if self.ends is not None:
            (was_low, was_high), (low, high) = self.ends
            dead = np.flatnonzero((low == high) & (was_low < was_high))
        noise = self._left()
        rescaled = self.noise >= RESCALED * noise and outputs >= 2 * self.ratio
        noise = noise if rescaled else self.noise
        snr = 10 * math.log10(self.signal / noise) if noise and self.signal else None
        return Tensor(name, snr, tuple(map(int, dead)), rescaled)


def _channel_axis(values: np.ndarray[Any, Any]) -> int:
    return 1 if values.ndim in (2, 4, 5) else values.ndim - 1


def _quantizers(model: ModelProto) -> dict[str, tuple[float, float, float]]:
    """Lowest, highest and step of each activation's range, where one scale is in the file."""
    values = {tensor.name: tensor for tensor in model.graph.initializer}
    found: dict[str, tuple[float, float, float]] = {}
    for node in model.graph.node:
        if node.op_type != "QuantizeLinear" or len(node.input) < 3 or not {*node.input[1:3]} <= set(values):
            continue
        scale, zero = (numpy_helper.to_array(values[name]) for name in node.input[1:3])
        ends = QUANTIZED.get(values[node.input[2]].data_type)
        if scale.size == 1 and ends is not None:
            step, at = float(scale.ravel()[0]), int(zero.ravel()[0])
            found[node.input[0]] = ((ends[0] - at) * step, (ends[1] - at) * step, step)
    return found
