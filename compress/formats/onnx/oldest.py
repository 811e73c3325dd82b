"""The oldest form that a model can be written in: what reads the newest only would refuse it for nothing."""

from __future__ import annotations

import itertools

import onnx
from onnx import ModelProto, helper

from compress.formats.onnx.domains import STANDARD
from compress.formats.onnx.scope import inner_nodes

__all__ = ["in_oldest_form"]


def in_oldest_form(model: ModelProto) -> None:
    """Tell the first opset that defines each operator as the model's does, and the first IR with that opset, in place.

    A model with functions of its own keeps its opset, which they refer to.
    """
    for entry in model.opset_import:
        if entry.domain in STANDARD and not model.functions:
            entry.version = _first(model, entry.version)
    model.ir_version = min(
        model.ir_version,
        helper.find_min_ir_version_for(
            [entry for entry in model.opset_import if entry.domain in STANDARD], ignore_unknown=True
        ),
    )


def _first(model: ModelProto, opset: int) -> int:
    nodes = itertools.chain(model.graph.node, inner_nodes(model.graph))
    kinds = {node.op_type for node in nodes if node.domain in STANDARD}
    try:
        return max((int(onnx.defs.get_schema(kind, opset, "").since_version) for kind in kinds), default=opset)
    except onnx.defs.SchemaError:
        return opset
