"""Gradient checkpointing: activations inside a segment are computed again in the backward pass.

Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, section 4: about as many segments as the root of the
number of layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from compress.errors import StageError, first_line

__all__ = ["in_segments"]


def in_segments(module: nn.Module) -> nn.Module:
    """A module that shares the layers of this one, and keeps only what goes from segment to segment.

    Raises:
        StageError: its forward can't be traced.
    """
    try:
        graph = module if isinstance(module, fx.GraphModule) else fx.GraphModule(module, _Tracer().trace(module))
    except Exception as err:  # the user's forward: anything may come out of it
        raise StageError(
            "can't keep fewer activations",
            why=f"the model's forward can't be traced: {first_line(err)}",
            mend="leave --gradient-checkpointing out, or take a smaller batch with --accumulate",
        ) from err
    layers = [node for node in graph.graph.nodes if node.op == "call_module"]
    many = max(2, round(math.sqrt(len(layers))))
    place = {node: index for index, node in enumerate(layers)}
    segment = 0
    segments: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        if node in place:
            segment = place[node] * many // len(layers)
        segments[node] = segment
    split = split_module(graph, graph, lambda node: segments[node], keep_original_order=True)
    for child in split.children():
        inner = child.forward
        child.forward = _checkpointed(child, inner)
    return split


class _Tracer(fx.Tracer):
    """Leaves batch normalizations whole, those of several processes, too."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _BatchNorm) or super().is_leaf_module(m, module_qualified_name)


def _checkpointed(segment: nn.Module, inner: Any) -> Any:
    layers = [layer for layer in segment.modules() if isinstance(layer, _BatchNorm)]

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _without_statistics(layers)

    def forward(*tensors: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*tensors)
        return checkpoint(inner, *tensors, use_reentrant=False, context_fn=contexts)

    return forward


@contextmanager
def _without_statistics(layers: list[_BatchNorm]) -> Iterator[None]:
    """The second pass over the same batch leaves running statistics as they are."""
    before = [(layer, layer.momentum) for layer in layers if layer.training and layer.track_running_stats]
    for layer, _ in before:
        layer.momentum = 0.0
    try:
        yield
    finally:
        for layer, momentum in before:
            layer.momentum = momentum
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.sub_(1)
