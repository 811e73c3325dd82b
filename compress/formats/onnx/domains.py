"""Domains of operators: ONNX's own has two names, and what a runtime has an operator for is no function's to say."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from onnx import ModelProto, NodeProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from compress.formats.onnx.newest import newest
from compress.formats.onnx.scope import inner_nodes

__all__ = ["STANDARD", "all_nodes", "has_operator", "import_all", "named_once", "one_version"]

STANDARD = ("", "ai.onnx")


def named_once(model: ModelProto) -> None:
    """Call ONNX's own domain by the empty one of its two names, in place: onnx itself takes these for two.

    Where a model gives both an opset, the last one holds, as in ONNX Runtime.
    """
    for each in (*all_nodes(model), *model.functions):
        if each.domain != _plain(each.domain):  # what is set to its default is written down, too
            each.domain = ""
    for holder in (model, *model.functions):
        if not any(entry.domain == "ai.onnx" for entry in holder.opset_import):
            continue
        versions = {_plain(entry.domain): entry.version for entry in holder.opset_import}
        del holder.opset_import[:]
        holder.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in versions.items())


def one_version(model: ModelProto) -> None:
    """Have functions import the versions that the model does, in place: ONNX Runtime runs them in these.

    Of a domain that the model does not import, it takes the newest version.
    """
    versions = {entry.domain: entry.version for entry in model.opset_import}
    for function in model.functions:
        for entry in function.opset_import:
            entry.version = versions.setdefault(entry.domain, newest(entry.domain) or entry.version)


def import_all(model: ModelProto) -> None:
    """Have a model import ONNX's own domain, and each that nodes of its graph are of, in the version that they run in.

    In place.
    """
    known = {entry.domain for entry in model.opset_import}
    told = {entry.domain: entry.version for function in model.functions for entry in function.opset_import}
    for domain in dict.fromkeys(("", *(node.domain for node in (*model.graph.node, *inner_nodes(model.graph))))):
        if domain not in known and (version := newest(domain) or told.get(domain)):
            model.opset_import.append(helper.make_opsetid(domain, version))


def all_nodes(model: ModelProto) -> Iterator[NodeProto]:
    """Nodes of a model's graph, of its functions, and of the bodies in both, at any depth."""
    for holder in (model.graph, *model.functions):
        yield from holder.node
        yield from inner_nodes(holder)


def has_operator(domain: str, name: str) -> bool:
    """Whether ONNX Runtime runs an operator where that is called, though a file holds a function of the name.

    In ONNX's own domain it takes no function at all; in another that it has, such as com.microsoft, those of no
    operator's name.
    """
    return domain in STANDARD or (domain, name) in _operators()


@functools.cache
def _operators() -> frozenset[tuple[str, str]]:
    return frozenset((schema.domain, schema.name) for schema in get_all_operator_schema())


def _plain(domain: str) -> str:
    return "" if domain in STANDARD else domain
