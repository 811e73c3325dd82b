"""Cross-layer equalization: give the weights of one layer and of the next the same range, channel by channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from compress.model import Model, OnnxModel
from compress.stages import Given, Progress
from compress.stages.onnx_graph import Graph
from compress.stages.scale_links import divide_producer, find_links, multiply_consumers

__all__ = ["EqualizeOnnx"]


@dataclass(frozen=True)
class EqualizeOnnx:
    """s = sqrt(r1 / r2) for the ranges r1, r2 of a channel's weights on both sides; Nagel et al., Data-Free
    Quantization Through Weight Equalization and Bias Correction, ICCV 2019, section 4.1, equation 11. Not across Clip.
    """

    rounds: int = 10

    name: ClassVar[str] = "equalize_onnx"
    takes: ClassVar[type] = OnnxModel
    gives: ClassVar[type] = OnnxModel

    @property
    def options(self) -> Mapping[str, Any]:
        return {"rounds": self.rounds}

    def check(self, model: Model) -> None:
        """Any ONNX file will do."""

    def run(self, model: OnnxModel, folder: Path, progress: Progress) -> Given:
        graph = Graph(model.path)
        links = [link for link in find_links(graph) if not link.clips and graph.is_layer(link.producer)]
        for turn in range(self.rounds):
            for link in links:
                first = np.abs(graph.split(link.producer)).max(axis=(2, 3)).reshape(-1)
                second = np.max(
                    [np.abs(graph.split(node)).max(axis=(1, 3)).reshape(-1) for node in link.consumers], axis=0
                )
                alive = (first > 0) & (second > 0)
                scale = np.where(alive, np.sqrt(np.where(alive, first, 1) / np.where(alive, second, 1)), 1.0)
                divide_producer(graph, link, scale.astype(np.float32))
                multiply_consumers(graph, link, scale.astype(np.float32))
            progress(turn + 1, self.rounds, "equalizing")
        path = folder / "model.onnx"
        graph.save(path)
        return Given(OnnxModel(path, model.signature), f"{len(links)} pairs of layers equalized")
