"""Even out the channels of each activation, so that one 8-bit scale serves them all; the weights take it up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.evaluate.bearing import bearing
from compress.evaluate.parity import differences
from compress.model import Model, OnnxModel
from compress.quantize.exponents import ALPHAS, ROWS, Seen, alive, error, scale_of
from compress.quantize.graph import Array, Graph, observe
from compress.quantize.int8_onnx import attention
from compress.quantize.scale_links import Link, divide_producer, find_links, find_scalings, multiply_consumers
from compress.runtime.backends import OnnxBackend
from compress.stage import Given, Progress

__all__ = ["SmoothOnnx"]

PROVEN = 8  # samples of the calibration data, on which nothing is clipped: the answers have to be those from before
CONVOLVED = 0.5  # the exponent at a convolution, whose products are not tried one by one
WORTH = 0.75  # a Mul of its own has to leave no more than this of the error


@dataclass(frozen=True)
class SmoothOnnx:
    """Each channel j of an activation X is divided by s_j = max|X_j|^a / max|W_j|^(1-a), its consumers' weights W
    multiplied by it; s is folded into the producer (Xiao et al., SmoothQuant, 2023, section 4, equation 4). The
    exponent a is found for each activation: see `exponents`.

    In a graph with attention, what no producer can take in gets a Mul of its own, where that pays: behind a residual's
    LayerNormalization, a GELU, the heads.

    Where all consumers are depthwise, each channel has a weight scale to itself, and a is 1: the activation is evened
    out wholly, at no cost to the weights. Across a Clip from 0 (ReLU6), s_j stays between the share of the bound that
    the channel reaches on the calibration data and 1: exact on that data; beyond it, a channel is clipped at the
    largest value seen, as the static range of an activation clips, too.

    Attributes:
        calibration: typical inputs.
        alpha: one exponent for all, from 0 to 1; None: each activation's own.
        scalings: whether a Mul may be added: one more to compute.
        reduce_range: 7-bit weights will be used.
        attention_only: whether a graph without attention stays as it is.
    """

    calibration: Dataset
    alpha: float | None = None
    scalings: bool = False
    reduce_range: bool = False
    attention_only: bool = False

    name: ClassVar[str] = "smooth_onnx"
    takes: ClassVar[type] = OnnxModel
    gives: ClassVar[type] = OnnxModel

    @property
    def options(self) -> Mapping[str, Any]:
        return {
            "calibration": self.calibration.sha256,
            "alpha": self.alpha,
            "scalings": self.scalings,
            "reduce_range": self.reduce_range,
            "attention_only": self.attention_only,
        }

    def check(self, model: Model) -> None:
        """Any ONNX file will do; one without links stays as it is, and is told so."""

    def run(self, model: OnnxModel, folder: Path, progress: Progress) -> Given:
        graph = Graph(model.path)
        links = self._links(graph)
        seen = _seen(model.path, links, self.calibration, progress)
        chosen = []
        for at, link in enumerate(links):
            chosen.append(self._chosen(graph, link, seen))
            progress(at + 1, len(links), "finding how far to even out")
        path = folder / "model.onnx"
        few = self.calibration.take(np.unique(np.linspace(0, len(self.calibration) - 1, PROVEN).astype(np.int64)))[0]
        expected = OnnxBackend(model, threads=1).infer(few)

        def fails(part: Sequence[int]) -> str | None:
            self._write(model, {at: chosen[at][1] for at in part}, path)
            found = differences(expected, OnnxBackend(OnnxModel(path, model.signature), threads=1).infer(few))
            return next((f"{name} is {apart}" for name, apart in found.items() if not apart.fits), None)

        kept, failed = bearing([at for at, (alpha, _) in enumerate(chosen) if alpha is not None], fails)
        kept.sort()
        self._write(model, {at: chosen[at][1] for at in kept}, path)
        nothing = "no activation is made and taken by layers alone: nothing was evened out"
        warnings = [] if links or self.attention_only else [nothing]
        warnings += [f"{links[at].producer.name} is left as it is: evened out, {why}" for at, why in failed.items()]
        exponents = sorted(alpha for at in kept if (alpha := chosen[at][0]) is not None)
        said = "" if not exponents else f", exponents {exponents[0]:g} to {exponents[-1]:g}"
        if exponents and exponents[0] == exponents[-1]:
            said = f", exponent {exponents[0]:g}"
        added = sum(links[at].scaling for at in kept)
        said += f"; {counted(added, 'multiplications')} added" if added else ""
        done = f"the channels of {counted(len(kept), 'activations')} evened out{said}"
        return Given(
            OnnxModel(path, model.signature),
            done if links or not self.attention_only else "no attention in it: left as it is",
            {
                "links": [
                    {
                        "from": links[at].producer.name,
                        "to": [node.name for node in links[at].consumers],
                        "exponent": chosen[at][0],
                        "spread": float(chosen[at][1].max() / chosen[at][1].min()),
                        "added": links[at].scaling,
                    }
                    for at in kept
                ]
            },
            tuple(warnings),
        )

    def _links(self, graph: Graph) -> list[Link]:
        attends = attention(graph.model)[0] is not None
        links = [] if self.attention_only and not attends else find_links(graph)
        return [*links, *find_scalings(graph, links)] if self.scalings and attends else links

    def _chosen(self, graph: Graph, link: Link, seen: Mapping[str, Seen]) -> tuple[float | None, Array]:
        """The exponent, None to leave it as it is, and what to divide each channel by."""
        weights = [graph.split(node) for node in link.consumers]
        here = seen[link.consumers[0].input[0]]
        if not all(np.isfinite(seen[node.input[0]].largest).all() for node in link.consumers):  # none, or no number
            return None, np.ones(link.channels, np.float32)
        largest = np.max([seen[node.input[0]].largest for node in link.consumers], axis=0)
        weight = np.max([np.abs(w).max(axis=(1, 3)).reshape(-1) for w in weights], axis=0)
        if link.convolves and all(w.shape[0] == link.channels for w in weights):  # depthwise
            alphas: tuple[float, ...] = (1.0,)
        elif self.alpha is not None or link.convolves or link.clips:
            alphas = (CONVOLVED if self.alpha is None else self.alpha,)
        else:
            alphas = ALPHAS
        scales = {alpha: scale_of(largest, weight, alpha) for alpha in alphas}
        if link.clips:
            reach = np.max([seen[name].largest / bound for name, bound in link.clips.items()], axis=0)
            scales = {alpha: _within(scale, reach, largest, weight) for alpha, scale in scales.items()}
        if len(alphas) == 1:
            return alphas[0], scales[alphas[0]]
        matrices = [w[0, :, :, 0] for w in weights]
        levels = 64 if self.reduce_range else 127
        with np.errstate(all="ignore"):  # calibration will tell of an overflow
            errors = {alpha: error(here, matrices, scale, levels) for alpha, scale in scales.items()}
            plain = error(here, matrices, np.ones(link.channels, np.float32), levels)
        best = min(errors, key=errors.__getitem__)
        if not errors[best] < plain * (WORTH if link.scaling else 1.0):
            return None, np.ones(link.channels, np.float32)
        return best, scales[best]

    def _write(self, model: OnnxModel, scales: Mapping[int, Array], path: Path) -> None:
        """Even out these of the links."""
        graph = Graph(model.path)
        links = self._links(graph)
        for at, scale in scales.items():
            divide_producer(graph, links[at], scale)
            multiply_consumers(graph, links[at], scale)
        graph.save(path)


def _within(scale: Array, reach: Array, activation: Array, weight: Array) -> Array:
    """A scale [channels] of at most 1, and no smaller than the share of a Clip's bound that the channel reaches."""
    living = alive(activation, weight)
    if not living.any():
        return scale
    bounded = np.clip(scale / scale[living].max(), np.maximum(reach, 1e-3), 1.0)
    return np.where(living, bounded, 1.0).astype(np.float32)


def _seen(path: Path, links: list[Link], data: Dataset, progress: Progress) -> dict[str, Seen]:
    """What each consumer's input and each Clip's output is like on the data."""
    axes: dict[str, int] = {}
    tried: set[str] = set()
    for link in links:
        axes |= dict.fromkeys([*(node.input[0] for node in link.consumers), *link.clips], link.axis)
        tried |= set() if link.convolves or link.clips else {link.consumers[0].input[0]}
    found: dict[str, Seen] = {}
    done = 0
    if not axes:
        return found
    for tensors, samples in observe(path, list(axes), data):
        done += samples
        for name, axis in axes.items():
            values = np.moveaxis(tensors[name], axis, -1).reshape(-1, tensors[name].shape[axis])
            seen = found.setdefault(name, Seen.of(values.shape[1]))
            if len(values):
                seen.add(values, math.ceil(ROWS * done / len(data)) - seen.kept if name in tried else 0)
        progress(done, len(data), "calibrating")
    return found
