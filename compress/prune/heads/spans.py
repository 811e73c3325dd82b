"""The parts of a graph between linear layers that mix channels in blocks, as attention does in heads.

Which channels make up a block is not read off the operations' names, but told by what moves what: the gradient of some
columns that the last layer reads says from which channels they come, and other values in these channels say which
columns they reach. Back and forth until neither grows is one block: a head, or of grouped queries those that share a
key. So it does not matter how q, k and v are laid out: one matrix or three, interleaved, chunked or permuted.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from compress.prune.layer_kinds import PRUNABLE
from compress.prune.repair.walk import Values, Walk

__all__ = ["RESHAPES", "Block", "Span", "blocks_of", "called", "spans_of"]

RESHAPES = {"view", "reshape", "unflatten"}
MIXES = {"matmul", "bmm", "baddbmm", "einsum", "softmax", "scaled_dot_product_attention"}  # or it is no attention
SIZES = [("shape",), ("dtype",), ("device",), ("ndim",)]
SAME = 1e-6  # share of the largest value: what moves less has not moved


@dataclass(frozen=True)
class Span:
    """From the layers whose outputs are mixed to the one that reads the mixture.

    Attributes:
        end: the linear layer that reads it.
        sources: linear layers that it is computed from.
        between: nodes from these to what `end` reads, in the graph's order; the last is what it reads.
    """

    end: fx.Node
    sources: tuple[fx.Node, ...]
    between: tuple[fx.Node, ...]

    @torch.no_grad()
    def drawn(self, values: Mapping[fx.Node, Any]) -> dict[fx.Node, torch.Tensor]:
        """Random outputs of the sources, small enough that a softmax lets all of them through."""
        random = torch.Generator().manual_seed(0)
        return {node: 0.5 * torch.randn(values[node].shape, generator=random) for node in self.sources}

    def run(
        self, walk: Walk, values: Mapping[fx.Node, Any], sources: Mapping[fx.Node, torch.Tensor]
    ) -> dict[fx.Node, Any]:
        """What the nodes between give with these outputs of the sources; what comes from elsewhere is as it was."""
        needed = {given for node in self.between for given in node.all_input_nodes}
        held: Values = {walk.number[node]: values[node] for node in needed if node in values}
        held |= {walk.number[node]: tensor for node, tensor in sources.items()}
        for node in self.between:
            held[walk.number[node]] = walk.run(node, held)
        return {node: held[walk.number[node]] for node in self.between}


@dataclass(frozen=True)
class Block:
    """What can only go together: columns that the last layer reads, and channels of each source."""

    columns: torch.Tensor
    channels: Mapping[fx.Node, torch.Tensor]


def spans_of(walk: Walk) -> Iterator[Span]:
    """Of each linear layer that is called once and reads what was reshaped since other linear layers."""
    for end in walk.nodes:
        if not _linear(walk, end) or len(end.all_input_nodes) != 1:
            continue
        seen: set[fx.Node] = set()
        sources: set[fx.Node] = set()
        stack = list(end.all_input_nodes)
        while stack:
            node = stack.pop()
            if _linear(walk, node):
                sources.add(node)
            elif node not in seen and not _size(node):
                seen.add(node)
                stack += node.all_input_nodes
        moved: list[fx.Node] = []
        reached = set(sources)
        for node in walk.nodes:
            if node in seen and any(given in reached for given in node.all_input_nodes):
                reached.add(node)
                moved.append(node)
        convolved = any(
            node.op == "call_module" and isinstance(walk.graph.get_submodule(str(node.target)), PRUNABLE)
            for node in moved
        )
        mixes = any(called(node) in RESHAPES for node in moved) and any(called(node) in MIXES for node in moved)
        if not convolved and mixes and moved[-1] is end.all_input_nodes[0]:
            yield Span(end, tuple(node for node in walk.nodes if node in sources), tuple(moved))


def blocks_of(span: Span, walk: Walk, values: Mapping[fx.Node, Any]) -> list[Block]:
    """The blocks, in the order of their columns; none where columns are not moved in equal blocks of several.

    Args:
        span: of the graph.
        walk: of the graph.
        values: of its sources, and of what it reads from elsewhere, for some inputs.
    """
    drawn = span.drawn(values)
    leaves = {node: tensor.clone().requires_grad_() for node, tensor in drawn.items()}
    with torch.enable_grad():
        mixed = span.run(walk, values, leaves)[span.between[-1]]
    random = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(1))
    width = mixed.shape[-1]
    whole = mixed.detach()
    left = torch.ones(width, dtype=torch.bool)
    found: list[Block] = []
    while bool(left.any()):
        columns = torch.zeros(width, dtype=torch.bool)
        columns[int(left.nonzero()[0])] = True
        while True:
            asked = (mixed * random)[..., columns].sum()
            grads = torch.autograd.grad(asked, list(leaves.values()), retain_graph=True, allow_unused=True)
            channels = {
                node: torch.zeros(drawn[node].shape[-1], dtype=torch.bool) if grad is None else _moved(grad, 0.0)
                for node, grad in zip(leaves, grads, strict=True)
            }
            others = {
                node: torch.where(channels[node], tensor.flip(0) + 0.25, tensor) for node, tensor in drawn.items()
            }
            with torch.no_grad():
                change = span.run(walk, values, others)[span.between[-1]] - whole
            reached = columns | _moved(change, SAME * float(whole.abs().max()))
            if bool((reached == columns).all()):
                break
            columns = reached
        # What is no block of several, as large as the first, makes none of the others one: don't look at each column.
        size = int(columns.sum())
        first = len(found[0].columns) if found else size
        if size == 1 or size == width or size != first or width % size or bool((columns & ~left).any()):
            return []
        left &= ~columns
        found.append(Block(columns.nonzero()[:, 0], {node: at.nonzero()[:, 0] for node, at in channels.items()}))
    return found if _alike(found) else []


def _alike(blocks: Sequence[Block]) -> bool:
    """Whether they have as many channels each, and share none."""
    for node in blocks[0].channels:
        every = torch.cat([block.channels[node] for block in blocks])
        if len({len(block.channels[node]) for block in blocks}) > 1 or len(every.unique()) < len(every):  # type: ignore[no-untyped-call]
            return False
    return True


def _moved(tensor: torch.Tensor, more_than: float) -> torch.Tensor:
    """Which channels, the last axis, have a value beyond it, bool [channels]."""
    return (tensor.abs() > more_than).flatten(0, -2).any(0)


def _linear(walk: Walk, node: fx.Node) -> bool:
    return node.op == "call_module" and isinstance(walk.graph.get_submodule(str(node.target)), nn.Linear)


def _size(node: fx.Node) -> bool:
    """Whether it tells of a tensor what is no value of it."""
    if node.op == "call_method":
        return node.target in ("size", "dim")
    return node.op == "call_function" and node.target is not operator.getitem and node.args[-1:] in SIZES


def called(node: fx.Node) -> str:
    """The name of the method or function; "" for other nodes."""
    if node.op not in ("call_method", "call_function"):
        return ""
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))
