"""Fold constants and infer shapes, so that the quantizer sees plain layers; drop what only takes room."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import onnx

from compress.console.wording import counted
from compress.errors import StageError
from compress.evaluate.parity import differences
from compress.formats.onnx.outline import outline
from compress.formats.onnx.scope import fill_gaps, inner_nodes, name_nodes
from compress.model import Arrays, Model, OnnxModel, sample_inputs
from compress.model.inputs import telling
from compress.onnx_export.file import checked, save
from compress.onnx_export.folding import folded
from compress.onnx_export.shown import without_choices
from compress.onnx_export.tied import share
from compress.runtime.backends import OnnxBackend
from compress.runtime.memory import give_back
from compress.stage import Given, Progress

__all__ = ["OURS", "FoldOnnx", "stripped"]

OURS = "compress."  # begins the keys of a file's metadata that this project writes


@dataclass(frozen=True)
class FoldOnnx:
    """ONNX Runtime's basic graph optimizations and shape inference; the answers stay.

    Attributes:
        unfuse: whether to write an addition before a LayerNormalization as Sum, which is the same: ONNX Runtime would
            fuse an Add into SkipLayerNormalization, whose kernel for the CPU takes many times as long as the two.
    """

    unfuse: bool = False

    name: ClassVar[str] = "fold_onnx"
    takes: ClassVar[type] = OnnxModel
    gives: ClassVar[type] = OnnxModel

    @property
    def options(self) -> Mapping[str, Any]:
        return {"unfuse": True} if self.unfuse else {}

    def check(self, model: Model) -> None:
        """Any ONNX file can be folded."""

    def run(self, model: OnnxModel, folder: Path, progress: Progress) -> Given:
        path = folder / "model.onnx"
        before = len(outline(model.path).graph.node)
        progress(0, 2, "folding")
        made = folded(model.path)
        without_choices(made.graph)
        kept_apart = _unfuse(made.graph) if self.unfuse else 0
        fill_gaps(made.graph)
        name_nodes(made)
        shared = share(made)
        save(stripped(made), path)
        after = len(made.graph.node)
        del made  # as large as the file, and sessions are opened next
        give_back()
        given = OnnxModel(path, model.signature, model.ranges)
        progress(1, 2, "comparing")
        inputs, expected = _expected(model)  # a session is as large as the file: one at a time
        for name, apart in differences(expected, OnnxBackend(given, threads=1).infer(inputs)).items():
            if not apart.fits:
                raise StageError(
                    "folding changed the answers", why=f"the output {name!r} is {apart}", mend="report this model"
                )
        did = f"{counted(before, 'nodes')} " + ("as before" if before == after else f"became {after}")
        did += f"; {counted(kept_apart, 'additions')} kept from a slow fusion" if kept_apart else ""
        did += f"; {counted(shared, 'shared weights')} stored once" if shared else ""
        progress(2, 2, did)
        nodes = [before, after]
        return Given(given, did=did, details={"nodes": nodes, "unfused": kept_apart, "shared_weights": shared})


def _expected(model: OnnxModel) -> tuple[Arrays, Arrays]:
    """Inputs whose answers tell something, and these answers."""
    backend = OnnxBackend(model, threads=1)
    inputs = telling(sample_inputs(model.signature, 3), lambda given: backend.infer(given).values())
    return inputs, backend.infer(inputs)


def _unfuse(graph: onnx.GraphProto) -> int:
    """Write each Add of two activations that a LayerNormalization takes as Sum, in place; how many there were."""
    weights = {tensor.name for tensor in graph.initializer}
    normalized = {node.input[0] for node in graph.node if node.op_type == "LayerNormalization"}
    found = [
        node
        for node in graph.node
        if node.op_type == "Add" and node.output[0] in normalized and not weights & set(node.input)
    ]
    for node in found:
        node.op_type = "Sum"
    return len(found)


def stripped(model: onnx.ModelProto) -> onnx.ModelProto:
    """Drop documentation, metadata (but what begins with `OURS`) and unused opset imports, in place: they can outweigh
    an INT8 model.
    """
    graph = model.graph
    inside = list(inner_nodes(graph))
    values = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
    for item in (model, graph, *graph.node, *inside, *values):
        item.ClearField("doc_string")
        if "metadata_props" in item.DESCRIPTOR.fields_by_name:
            kept = [each for each in item.metadata_props if item is model and each.key.startswith(OURS)]
            item.ClearField("metadata_props")
            item.metadata_props.extend(kept)
    used = {node.domain for node in (*graph.node, *inside)}
    used |= {node.domain for function in model.functions for node in function.node} | {""}
    imports = [entry for entry in model.opset_import if entry.domain in used or entry.domain == "ai.onnx"]
    del model.opset_import[:]
    model.opset_import.extend(imports)
    checked(model)
    return model
