"""A network run a part at a time: up to a layer with all of the data, and on from there once that layer is settled.

All batches stand at the same node of the graph, so every layer is met once, with all that comes into it, and nothing
before it is run again. What stands between is held in memory up to a limit, the rest in files.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from compress.errors import StageError
from compress.formats.native.graph import GraphError, traced_of

__all__ = ["Shelf", "Walk", "traced"]

HELD_BYTES = 1_500_000_000  # of values between two layers; beyond, they lie in files
Values = dict[int, Any]

IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.iand, operator.ior}


def traced(module: nn.Module, inputs: int) -> fx.GraphModule:
    """The module's graph, with its own layers.

    Raises:
        StageError: its forward can't be traced.
    """
    try:
        return traced_of(module, inputs)
    except GraphError as err:
        raise StageError(
            "can't follow what this model computes", why=str(err), mend="give --no-repair, and train it instead"
        ) from err


class Walk:
    """The nodes of a graph in an order, each run when it is reached.

    Args:
        graph: in eval mode.
        after: nodes that have to wait for others, by their numbers in the graph.
        order: in place of its own, that of a graph in which as much, or more, hangs on what comes before.

    Attributes:
        nodes: of the graph, by number.
        order: numbers of the nodes, as they are run.
    """

    def __init__(
        self, graph: fx.GraphModule, after: Mapping[int, int] | None = None, order: list[int] | None = None
    ) -> None:
        self.graph = graph
        self.nodes: list[fx.Node] = list(graph.graph.nodes)
        self.number = {node: number for number, node in enumerate(self.nodes)}
        self.order = self._ordered(after or {}) if order is None else order
        place = {number: at for at, number in enumerate(self.order)}
        self.place = place
        last = {self.number[node]: max((place[self.number[user]] for user in node.users), default=place[at])
                for at, node in enumerate(self.nodes)}  # fmt: skip
        self._dead: dict[int, list[int]] = {}
        for number, at in last.items():
            self._dead.setdefault(at, []).append(number)

    def begin(self, tensors: Sequence[torch.Tensor]) -> Values:
        """The values of the inputs, by the numbers of their nodes."""
        places = [number for number, node in enumerate(self.nodes) if node.op == "placeholder"]
        return dict(zip(places, tensors, strict=False))

    @torch.no_grad()
    def advance(self, values: Values, start: int, stop: int) -> None:
        """Run the nodes at places of the order from `start` to before `stop`; what is not read again is dropped."""
        for at in range(start, stop):
            number = self.order[at]
            node = self.nodes[number]
            if node.op != "placeholder":
                values[number] = self.run(node, values)
            elif number not in values:
                values[number] = node.args[0] if node.args else None
            for dead in self._dead.get(at, ()):
                if self.nodes[dead].op != "output":
                    values.pop(dead, None)

    def run(self, node: fx.Node, values: Values) -> Any:
        """What a node gives."""
        args: Any = fx.node.map_arg(node.args, lambda one: values[self.number[one]])
        kwargs: Any = fx.node.map_arg(node.kwargs, lambda one: values[self.number[one]])
        if node.op == "output":
            return args[0]
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self.graph)
        if node.op == "call_module":
            return self.graph.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            first, *rest = args
            return getattr(first, str(node.target))(*rest, **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def depends(self, node: fx.Node, on: fx.Node) -> bool:
        """Whether a node is computed from another."""
        seen, stack = set(), [node]
        while stack:
            one = stack.pop()
            if one is on:
                return True
            if one not in seen and self.number[one] > self.number[on]:
                seen.add(one)
                stack += one.all_input_nodes
        return False

    def _ordered(self, after: Mapping[int, int]) -> list[int]:
        """The graph's order, but for those that wait; what changes a value in place keeps its turn among readers."""
        waits = {number: {self.number[one] for one in node.all_input_nodes} for number, node in enumerate(self.nodes)}
        for number, first in after.items():
            waits[number].add(first)
        for number, node in enumerate(self.nodes):
            if node.all_input_nodes and self.in_place(node):
                for reader in map(self.number.__getitem__, node.all_input_nodes[0].users):
                    if reader != number:
                        waits[max(reader, number)].add(min(reader, number))
        followers: dict[int, list[int]] = {}
        for number, firsts in waits.items():
            for first in firsts:
                followers.setdefault(first, []).append(number)
        left = {number: len(firsts) for number, firsts in waits.items()}
        ready = [number for number, count in left.items() if not count]
        order: list[int] = []
        while ready:
            order.append(heapq.heappop(ready))
            for number in followers.get(order[-1], ()):
                left[number] -= 1
                if not left[number]:
                    heapq.heappush(ready, number)
        return order if len(order) == len(self.nodes) else list(range(len(self.nodes)))

    def in_place(self, node: fx.Node) -> bool:
        """Whether a node changes its first input."""
        if node.op == "call_module":
            return bool(getattr(self.graph.get_submodule(str(node.target)), "inplace", False))
        called = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
        if called.endswith("_") and not called.endswith("__"):
            return True
        return node.op == "call_function" and (node.target in IN_PLACE or bool(node.kwargs.get("inplace")))


class Shelf:
    """Values of batches that wait; beyond a limit in files, which are read once and go.

    Args:
        folder: for the files.
        limit: bytes in memory.
    """

    def __init__(self, folder: Path, limit: int = HELD_BYTES) -> None:
        self._folder, self._limit, self._held = folder, limit, 0
        self._kept: dict[int, tuple[Sequence[Values], int]] = {}

    def put(self, batch: int, values: Sequence[Values]) -> None:
        """Keep the values of a batch."""
        size = sum(tensor.nbytes for one in values for tensor in _tensors(one))
        if self._held + size > self._limit:
            for at, one in enumerate(values):
                for number, value in one.items():
                    if isinstance(value, torch.Tensor) and value.nbytes:
                        path = self._folder / f"held-{batch}-{at}-{number}.pt"
                        torch.save(value.contiguous().clone(), path)
                        one[number] = path
            size = sum(tensor.nbytes for one in values for tensor in _tensors(one))
        self._held += size
        self._kept[batch] = values, size

    def take(self, batch: int) -> Sequence[Values]:
        """The values of a batch, which are no longer kept."""
        values, size = self._kept.pop(batch)
        self._held -= size
        for one in values:
            for number, value in one.items():
                if isinstance(value, Path):
                    one[number] = torch.load(value, weights_only=True)
                    value.unlink()
        return values


def _tensors(values: Values) -> Iterator[torch.Tensor]:
    return (value for value in values.values() if isinstance(value, torch.Tensor))
