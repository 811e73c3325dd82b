"""Parts of a network that are still ONNX, put back into the file of what is around them."""

from __future__ import annotations

import onnx
from onnx import ModelProto, NodeProto
from torch import nn

from compress.artifact import Signature
from compress.errors import StageError
from compress.formats.native.onnx_part import DOMAIN, ROOM, OnnxPart
from compress.formats.onnx.domains import STANDARD, named_once
from compress.formats.onnx.scope import fresh, inner_names, names_in, opset_of, rename
from compress.formats.onnx_layers.opsets import in_opset
from compress.formats.onnx_layers.values import NotTakenBackError
from compress.onnx_export.file import declare

__all__ = ["put_back"]


def put_back(model: ModelProto, module: nn.Module, signature: Signature) -> None:
    """Put each part's own nodes, with its weights, where the exporter has kept room for it; in place.

    Nodes stay as they were in all but the names of tensors, which others of the graph may have, and what another opset
    than the part was made in has in another form.

    Args:
        model: as the exporter wrote it.
        module: that was exported, in which the parts are.
        signature: of the module; what comes from parts alone is as large as it says.

    Raises:
        StageError: a part is of another opset, and can't be written in that of the model.
    """
    parts = {part.digest: part for part in module.modules() if isinstance(part, OnnxPart)}
    if not parts:
        return
    graph = model.graph
    taken = names_in(graph) | inner_names(graph)
    nodes: list[NodeProto] = []
    for node in graph.node:
        if (node.domain, node.op_type) != (DOMAIN, ROOM):
            nodes.append(node)
            continue
        digest = next(a.s.decode() for a in node.attribute if a.name == "digest")
        part = _in_opset_of(model, parts[digest])
        outside = dict(zip((value.name for value in part.graph.input), node.input, strict=True))
        outside |= dict(zip((value.name for value in part.graph.output), node.output, strict=True))
        names = dict(outside)
        for name in sorted((names_in(part.graph) | inner_names(part.graph)) - {*outside, ""}):
            names[name] = fresh(name, taken)
            taken.add(names[name])
        rename(part.graph, names)
        graph.initializer.extend(part.graph.initializer)
        nodes.extend(part.graph.node)
        known = {entry.domain for entry in model.opset_import}
        model.opset_import.extend(entry for entry in part.opset_import if entry.domain not in {*known, *STANDARD})
    del graph.node[:]
    graph.node.extend(nodes)
    for at in reversed(range(len(model.opset_import))):
        if model.opset_import[at].domain == DOMAIN:
            del model.opset_import[at]
    del graph.value_info[:]  # sizes behind a part may be told wrongly
    for spec, value in zip(signature.outputs, graph.output, strict=True):
        declare(value, spec.shape)


def _in_opset_of(model: ModelProto, part: OnnxPart) -> ModelProto:
    """A part in the opset of the model, which may be another than where the model file that holds it was written."""
    made, opset = onnx.load_model_from_string(part.onnx()), opset_of(model)
    named_once(made)
    if {entry.version for entry in made.opset_import if entry.domain in STANDARD} <= {opset}:
        return made
    try:
        return in_opset(made, opset)
    except NotTakenBackError as err:
        raise StageError(
            f"can't write {part.told}, which stays in ONNX",
            why=str(err),
            mend="start from the ONNX file that it was of",
        ) from err
