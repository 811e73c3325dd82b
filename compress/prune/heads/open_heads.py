"""A model whose heads can go, and which channels each of them is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from compress.formats.native.graph import GraphError, traced_of
from compress.model import TorchModel
from compress.model.apart import share_of_own_size
from compress.model.drawn import drawn_inputs, indices_of
from compress.model.unfused import unfused
from compress.prune.cut_layers import Place
from compress.prune.follow_channels import ChannelGroup
from compress.prune.heads.free_sizes import Edit, edits_of, free
from compress.prune.heads.plain_layers import MASKS, with_plain_layers
from compress.prune.heads.spans import Block, Span, blocks_of, spans_of
from compress.prune.repair.walk import Walk
from compress.storage.shortages import raise_shortage

__all__ = ["Opened", "is_plain_trace", "opened", "plain_trace"]

SAME = 1e-4  # of its size, which single precision keeps to when the order of sums changes


@dataclass(frozen=True)
class Opened:
    """A model, with the same answers as before, and the groups of its heads, which are still to be proven.

    Attributes:
        model: a traced one where there are heads; else as it was given.
        groups: of each attention, a unit for each head, or for each key and value that several heads share.
    """

    model: TorchModel
    groups: tuple[ChannelGroup, ...] = ()


def opened(model: TorchModel) -> Opened:
    """Find the heads of a model, and free the sizes in its graph that hold them together.

    Args:
        model: left as it is; that it has no heads, or can't be traced, is no error.
    """
    try:
        graph, inputs = plain_trace(model)
        walk = Walk(graph)
        spans = [span for span in spans_of(walk) if _once(walk, span)]
        if not spans:
            return Opened(model)
        values = _values(walk, spans, inputs)
        edits: list[Edit] = []
        groups = []
        for span in spans:
            blocks = blocks_of(span, walk, values)
            if blocks:
                groups.append(_group(span, blocks))
                edits += edits_of(span, blocks, walk, values)
        freed = free(graph, edits) if groups else graph
        if not groups or not _same(freed, model, inputs):
            return Opened(model)
    except GraphError:
        return Opened(model)
    except Exception as err:  # the forward is anybody's: what fails on random values has its layers left alone
        raise_shortage(err)
        return Opened(model)
    return Opened(dataclasses.replace(model, module=freed), tuple(groups))


def plain_trace(model: TorchModel) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The model's graph, in which torch's attention is made of linear layers, where that gives the same; and inputs.

    Raises:
        GraphError: its forward can't be traced.
    """
    indices = indices_of(model.module, model.signature)
    drawn = drawn_inputs(model.signature, model.signature.at(2), indices, 0, lengths=True)
    inputs = [torch.as_tensor(drawn[spec.name]) for spec in model.signature.inputs]
    plain = with_plain_layers(model.module, inputs)
    if plain is not None:
        try:
            graph = fx.symbolic_trace(plain) if isinstance(plain, fx.GraphModule) else traced_of(plain, len(inputs))
            if _same(graph, model, inputs):
                return graph.eval(), inputs
        except Exception as err:  # torch's layers are called in ways that a trace can't follow
            raise_shortage(err)
    return traced_of(model.module, len(inputs)), inputs


def is_plain_trace(module: nn.Module) -> bool:
    """Whether a module is what `plain_trace` would make of it."""
    return isinstance(module, fx.GraphModule) and not any(type(layer) in MASKS for layer in module.modules())


def _group(span: Span, blocks: Sequence[Block]) -> ChannelGroup:
    names = [str(node.target) for node in span.sources]
    given = [(node, name) for node, name in zip(span.sources, names, strict=True) if len(blocks[0].channels[node])]
    root, name = given[0]
    places = {Place(each, "out"): _pairs([block.channels[node] for block in blocks]) for node, each in given}
    places[Place(str(span.end.target), "in")] = _pairs([block.columns for block in blocks])
    members = tuple(tuple(block.channels[root].tolist()) for block in blocks)
    width = sum(map(len, members))
    return ChannelGroup(name, tuple(each for _, each in given), width, members, places)


def _pairs(units: Sequence[torch.Tensor]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Channels, rising, and the unit that each belongs to, int64 [2, n]."""
    channels = torch.cat(list(units)).numpy()
    numbers = np.repeat(np.arange(len(units)), len(units[0]))
    order = channels.argsort()
    return np.stack([channels[order], numbers[order]]).astype(np.int64)


def _once(walk: Walk, span: Span) -> bool:
    """Whether each of its layers is called once."""
    called = [str(node.target) for node in walk.nodes if node.op == "call_module"]
    return all(called.count(str(node.target)) == 1 for node in (span.end, *span.sources))


@torch.no_grad()
def _values(walk: Walk, spans: Sequence[Span], inputs: Sequence[torch.Tensor]) -> dict[fx.Node, Any]:
    """What the nodes give that spans begin from or read from elsewhere; nothing else is held."""
    needed = {given for span in spans for node in span.between for given in node.all_input_nodes}
    needed -= {node for span in spans for node in span.between}
    last = {given: node for node in walk.nodes for given in node.all_input_nodes}
    values = walk.begin(inputs)
    for number, node in enumerate(walk.nodes):
        if node.op != "placeholder":
            values[number] = walk.run(node, values)
        elif number not in values:
            values[number] = node.args[0] if node.args else None
        for given in node.all_input_nodes:
            if last[given] is node and given not in needed:
                values.pop(walk.number[given], None)
    return {node: values[walk.number[node]] for node in needed}


@torch.no_grad()
def _same(freed: fx.GraphModule, model: TorchModel, inputs: Sequence[torch.Tensor]) -> bool:
    with unfused():  # with padding, one operator for all of an encoder gives zeros there, which nobody reads
        have, want = (
            [leaf for leaf in tree_leaves(module(*inputs)) if isinstance(leaf, torch.Tensor)]
            for module in (freed, model.module)
        )
    return len(have) == len(want) and all(
        one.shape == other.shape and share_of_own_size(other.double().numpy(), one.double().numpy()) < SAME
        for one, other in zip(have, want, strict=True)
    )
