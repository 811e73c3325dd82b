"""Even out the channels of each activation, so that one 8-bit scale serves them all; the weights take it up."""

from __future__ import annotations

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
from compress.quantize.graph import Array, Graph, observe
from compress.quantize.scale_links import Link, divide_producer, find_links, multiply_consumers
from compress.runtime.backends import OnnxBackend
from compress.stage import Given, Progress

__all__ = ["SmoothOnnx"]

PROVEN = 8  # samples of the calibration data, on which nothing is clipped: the answers have to be those from before


@dataclass(frozen=True)
class SmoothOnnx:
    """Each channel j of an activation X is divided by s_j = max|X_j|^a / max|W_j|^(1-a), its consumers' weights W
    multiplied by it, where a is alpha; s is folded into the producer (Xiao et al., SmoothQuant, 2023, section 4,
    equation 4).

    Where all consumers are depthwise, each channel has a weight scale to itself, and a is 1: the activation is evened
    out wholly, at no cost to the weights. Across a Clip from 0 (ReLU6), s_j stays between the share of the bound that
    the channel reaches on the calibration data and 1: exact on that data; beyond it, a channel is clipped at the
    largest value seen, as the static range of an activation clips, too.

    Attributes:
        calibration: typical inputs.
        alpha: how much of the difficulty moves from activations to weights, from 0 to 1.
        copies: whether a LayerNormalization whose output goes to a residual, too, may be doubled: one more to compute.
    """

    calibration: Dataset
    alpha: float = 0.5
    copies: bool = False

    name: ClassVar[str] = "smooth_onnx"
    takes: ClassVar[type] = OnnxModel
    gives: ClassVar[type] = OnnxModel

    @property
    def options(self) -> Mapping[str, Any]:
        return {"calibration": self.calibration.sha256, "alpha": self.alpha, "copies": self.copies}

    def check(self, model: Model) -> None:
        """Any ONNX file will do; one without links stays as it is, and is told so."""

    def run(self, model: OnnxModel, folder: Path, progress: Progress) -> Given:
        links = self._links(Graph(model.path))
        largest = _maxima(model.path, links, self.calibration, progress)
        path = folder / "model.onnx"
        few = self.calibration.take(np.unique(np.linspace(0, len(self.calibration) - 1, PROVEN).astype(np.int64)))[0]
        expected = OnnxBackend(model, threads=1).infer(few)

        def fails(part: Sequence[int]) -> str | None:
            self._write(model, part, largest, path)
            found = differences(expected, OnnxBackend(OnnxModel(path, model.signature), threads=1).infer(few))
            return next((f"{name} is {apart}" for name, apart in found.items() if not apart.fits), None)

        kept, failed = bearing(range(len(links)), fails)
        kept.sort()
        spreads = self._write(model, kept, largest, path)
        warnings = [] if links else ["no activation is made and taken by layers alone: nothing was evened out"]
        warnings += [f"{links[at].producer.name} is left as it is: evened out, {why}" for at, why in failed.items()]
        return Given(
            OnnxModel(path, model.signature),
            f"the channels of {counted(len(kept), 'activations')} evened out, alpha {self.alpha:g}",
            {
                "links": [
                    {
                        "from": links[at].producer.name,
                        "to": [node.name for node in links[at].consumers],
                        "spread": spread,
                    }
                    for at, spread in zip(kept, spreads, strict=True)
                ]
            },
            tuple(warnings),
        )

    def _links(self, graph: Graph) -> list[Link]:
        return [link for link in find_links(graph) if self.copies or not link.copy]

    def _write(self, model: OnnxModel, part: Sequence[int], largest: Mapping[str, Array], path: Path) -> list[float]:
        """Even out these of the links; by how much the channels of each were apart."""
        graph = Graph(model.path)
        links = self._links(graph)
        spreads = []
        for at in part:
            scale = _scale(graph, links[at], largest, self.alpha)
            divide_producer(graph, links[at], scale)
            multiply_consumers(graph, links[at], scale)
            spreads.append(float(scale.max() / scale.min()))
        graph.save(path)
        return spreads


def _maxima(path: Path, links: list[Link], data: Dataset, progress: Progress) -> dict[str, Array]:
    """Largest absolute value [channels] of each consumer's input and each Clip's output."""
    axes: dict[str, int] = {}
    for link in links:
        axes |= {node.input[0]: 1 if node.op_type == "Conv" else -1 for node in link.consumers}
        axes |= dict.fromkeys(link.clips, 1)
    found: dict[str, Array] = {}
    done = 0
    if not axes:
        return found
    for tensors in observe(path, list(axes), data):
        for name, axis in axes.items():
            values = np.abs(np.moveaxis(tensors[name], axis, 0)).reshape(tensors[name].shape[axis], -1).max(1)
            found[name] = np.maximum(found[name], values) if name in found else values
        done += len(next(iter(tensors.values())))
        progress(done, len(data), "calibrating")
    return found


def _scale(graph: Graph, link: Link, largest: Mapping[str, Array], alpha: float) -> Array:
    """What to divide each channel [channels] by; 1 where it, or its weights, are 0 throughout."""
    names = [node.input[0].removesuffix("_scaled") for node in link.consumers]
    activation = np.max([largest[name] for name in names], axis=0).astype(np.float64)
    weights = [graph.split(node) for node in link.consumers]
    weight = np.max([np.abs(w).max(axis=(1, 3)).reshape(-1) for w in weights], axis=0).astype(np.float64)
    alive = (activation > 0) & (weight > 0) & np.isfinite(activation)  # calibration will tell of an overflow
    if not alive.any():
        return np.ones(link.channels, np.float32)
    if all(w.shape[0] == link.channels for w in weights):
        alpha = 1.0
    raw = np.where(alive, activation, 1.0) ** alpha / np.where(alive, weight, 1.0) ** (1 - alpha)
    if link.clips:
        reach = np.max([largest[name] / bound for name, bound in link.clips.items()], axis=0).astype(np.float64)
        raw = np.clip(raw / raw[alive].max(), np.maximum(reach, 1e-3), 1.0)
    else:
        raw = raw / np.exp(np.log(raw[alive]).mean())
    return np.where(alive, np.clip(raw, 1e-3, 1e3), 1.0).astype(np.float32)
