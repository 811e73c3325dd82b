"""Splits into equal parts of an axis of which inference of shapes does not tell whether its size varies."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from compress.formats.native.onnx_part import ANY, OnnxPart
from compress.storage.shortages import raise_shortage

__all__ = ["UNKNOWN", "varying"]

UNKNOWN = "size_unknown"
"""Key in the meta of a node that splits by the sizes of the sample."""


def varying(module: fx.GraphModule, runs_on: Sequence[Sequence[torch.Tensor]]) -> set[fx.Node]:
    """Those splits whose axis has another size at other sizes of the inputs than in the sample.

    Args:
        module: taken back by one sample.
        runs_on: inputs of other sizes, that the file takes.
    """
    if not any(UNKNOWN in node.meta for node in module.graph.nodes):
        return set()
    found: set[fx.Node] = set()
    for part in module.modules():
        if isinstance(part, OnnxPart):  # at any size, until it is known which vary
            part.inputs = tuple((dtype, *(ANY for _ in sizes)) for dtype, *sizes in part.inputs)
    for sample in runs_on:
        try:
            with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):  # where torch.fx prints what fails
                _Watching(module, found).run(*sample)
        except Exception as err:  # of what comes behind one, and ONNX Runtime's own classes
            raise_shortage(err)
    return found


class _Watching(fx.Interpreter):
    """Runs a graph, and splits into equal parts what was to be split so."""

    def __init__(self, module: fx.GraphModule, found: set[fx.Node]) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self._found = found

    def run_node(self, n: fx.Node) -> Any:
        if UNKNOWN in n.meta:
            (value, sizes, axis), _ = self.fetch_args_kwargs_from_env(n)
            if value.shape[axis] != sum(sizes):
                self._found.add(n)
                return torch.split(value, max(1, -(-value.shape[axis] // len(sizes))), axis)
        return super().run_node(n)
