"""A quantized graph with some of its nodes back in float: Q/DQ nodes are taken away, nothing is quantized again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from onnx import ModelProto, NodeProto

from compress.formats.onnx.scope import captured, drop_dead, fresh, names_in, sort
from compress.quantize.onward import Onward
from compress.quantize.unrounded import ROUNDED, in_float, read_rounded

__all__ = ["Mixed", "UnmatchedError"]


class UnmatchedError(Exception):
    """The quantized graph rounds what the float graph has not."""


@dataclass(frozen=True)
class _Pair:
    """A tensor that is quantized and restored: its QuantizeLinear, and each DequantizeLinear by what it gives."""

    quantize: NodeProto
    restored: Mapping[str, NodeProto]


class Mixed:
    """A float graph and the same graph quantized, to choose between them node by node.

    A node that goes back takes its float weights. What passes between two nodes that are in float is not rounded any
    more; with all of them back, the graph is the float one. An activation that the quantizer has drawn into the
    range of a layer's output (a Relu) goes with that layer.

    Args:
        plain: the float graph; each node has a name of its own.
        quantized: with Q/DQ nodes, its other nodes named as in the float graph; it may lack activations.
        rounds_outputs: whether an 8-bit node needs its output quantized, as on the CPU; for TensorRT, its inputs do.

    Raises:
        UnmatchedError: the quantized graph is not of this float graph.
    """

    def __init__(self, plain: ModelProto, quantized: ModelProto, *, rounds_outputs: bool) -> None:
        self._plain, self._quantized, self._rounds_outputs = plain, quantized, rounds_outputs
        self._nodes = {node.name: node for node in quantized.graph.node}
        self._made = {name for node in quantized.graph.node for name in node.output}
        # The quantizer may have given a float weight's name to what it restores.
        taken = names_in(plain.graph) | names_in(quantized.graph)
        self._weights = {
            tensor.name: fresh(f"{tensor.name}_float", taken) if tensor.name in self._made else tensor.name
            for tensor in plain.graph.initializer
        }
        self._outputs = {value.name for value in plain.graph.output}
        for node in plain.graph.node:
            self._outputs |= captured(node)
        self._pairs = self._find_pairs()
        self._sources = {given: name for name, pair in self._pairs.items() for given in pair.restored}
        self._owners = self._find_owners()
        self._makers = {name: node.name for node in plain.graph.node for name in node.output}
        self._rounding = {
            name for node in plain.graph.node if node.op_type in ROUNDED for name in (*node.input, *node.output)
        }
        self._onward = Onward(plain.graph)
        self.units = [node.name for node in plain.graph.node if self._in_int8(node)]

    def model(self, back: Collection[str]) -> ModelProto:
        """The quantized graph with these nodes in float; with none, it is as the quantizer left it.

        Args:
            back: names of nodes, of `units`.
        """
        mixed = ModelProto()
        mixed.CopyFrom(self._quantized)
        if not back:
            return mixed
        eight = set(self.units) - set(back)
        if self._rounds_outputs:
            eight -= in_float(self._plain.graph, eight)
        else:
            eight -= self._onward.idle(
                {id(node): self._taken(node) for node in self._onward.nodes if node.name in eight}
            )
        back = set(self.units) - eight
        graph = mixed.graph
        rounded: dict[str, set[str]] = {}  # what is restored for somebody, by tensor
        nodes = [
            made for node in self._plain.graph.node if (made := self._node(node, back, eight, rounded)) is not None
        ]
        nodes += self._links(eight, rounded, nodes)
        mine = {node.name for node in self._plain.graph.node}
        links = {name for pair in self._pairs.values() for name in (pair.quantize.output[0], *pair.restored)}
        nodes += [n for n in self._quantized.graph.node if n.name not in mine and n.output[0] not in links]
        del graph.node[:]
        graph.node.extend(nodes)
        there = {tensor.name for tensor in graph.initializer}
        for tensor in self._plain.graph.initializer:
            if self._weights[tensor.name] not in there:
                graph.initializer.add().CopyFrom(tensor)
                graph.initializer[-1].name = self._weights[tensor.name]
        drop_dead(graph)
        sort(graph)
        del graph.value_info[:]
        return mixed

    def _node(
        self, node: NodeProto, back: Collection[str], eight: Collection[str], rounded: dict[str, set[str]]
    ) -> NodeProto | None:
        """One node of the float graph as it is in the mixture; None for one that the quantizer took away."""
        was = self._nodes.get(node.name)
        owner = self._owners.get(node.name, node.name)
        if was is None and owner not in back:
            return None
        made = NodeProto()
        made.CopyFrom(node if was is None or owner in back else was)
        for at, name in enumerate(node.input):
            given = name if was is None else was.input[at]
            if name in self._weights or not name:
                made.input[at] = self._weights.get(name, name) if owner in back else given
                continue
            tensor = self._sources.get(given)
            if tensor is None or not self._reads_rounded(tensor, node.name, eight):
                made.input[at] = name
            else:
                made.input[at] = given
                rounded.setdefault(tensor, set()).add(given)
        for at, name in enumerate(node.output):
            # By the activation that is drawn into it, or as what is yet to be rounded.
            made.output[at] = was.output[at] if was is not None and node.name in eight else name
        return made

    def _reads_rounded(self, tensor: str, reader: str, eight: Collection[str]) -> bool:
        return read_rounded(reader, self._owner_of(tensor) if self._rounds_outputs else None, eight)

    def _taken(self, node: NodeProto) -> set[str]:
        """The tensors that a node takes in 8 bits."""
        was = self._nodes[node.name]
        return {name for name, given in zip(node.input, was.input, strict=False) if given in self._sources}

    def _links(self, eight: Collection[str], rounded: dict[str, set[str]], nodes: list[NodeProto]) -> list[NodeProto]:
        """Q/DQ nodes of what is read in 8 bits."""
        given = {name for node in nodes for name in node.output}
        taken = names_in(self._quantized.graph)
        links: list[NodeProto] = []
        for tensor, pair in self._pairs.items():
            readers = set(rounded.get(tensor, ()))
            shown = tensor in pair.restored  # the graph's output, which is read rounded where an 8-bit node makes it
            if shown and self._owner_of(tensor) in eight:
                readers.add(tensor)
            if not readers:
                continue
            quantize = NodeProto()
            quantize.CopyFrom(pair.quantize)
            raw = tensor if tensor in given else pair.quantize.input[0]
            quantize.input[0] = raw
            links.append(quantize)
            for name in sorted(readers):
                restore = NodeProto()
                restore.CopyFrom(pair.restored[name])
                if name in given:  # its own float maker gives the name
                    restore.output[0] = fresh(f"{name}_restored", taken)
                    _rename(nodes, name, restore.output[0], set(eight))
                links.append(restore)
        return links

    def _owner_of(self, tensor: str) -> str:
        maker = self._makers.get(tensor, "")
        return str(self._owners.get(maker, maker))

    def _find_pairs(self) -> dict[str, _Pair]:
        nodes = self._quantized.graph.node
        tensors = {name for node in self._plain.graph.node for name in node.output}
        tensors |= {value.name for value in self._plain.graph.input}
        restoring: dict[str, dict[str, NodeProto]] = {}
        for node in nodes:
            if node.op_type == "DequantizeLinear":
                restoring.setdefault(node.input[0], {})[node.output[0]] = node
        found: dict[str, _Pair] = {}
        for node in nodes:
            if node.op_type == "QuantizeLinear" and node.output[0] in restoring:
                given = restoring[node.output[0]]
                name = next((name for name in (node.input[0], *given) if name in tensors), None)
                if name is None:
                    raise UnmatchedError(f"it rounds {node.input[0]!a}, which the original does not have")
                found[name] = _Pair(node, given)
        return found

    def _find_owners(self) -> dict[str, str]:
        """Activations that the quantizer took away, by the node whose range they are in now."""
        makers = {name: node for node in self._plain.graph.node for name in node.output}
        owners: dict[str, str] = {}
        for node in self._plain.graph.node:
            if node.name not in self._nodes:
                maker = makers.get(next(iter(node.input), ""))
                if maker is None:
                    raise UnmatchedError(f"it lacks {node.name!a}, which no layer's range can hold")
                owners[node.name] = owners.get(maker.name, maker.name)
        return owners

    def _in_int8(self, node: NodeProto) -> bool:
        """Whether a node computes in 8 bits: its weights are, or what it takes and (on the CPU) what it gives."""
        was = self._nodes.get(node.name)
        if was is None:
            return False
        pairs = list(zip(node.input, was.input, strict=False))
        if any(name in self._weights and (name != given or given in self._made) for name, given in pairs):
            return True
        takes = any(given in self._sources for _, given in pairs)
        drawn = {name for other, owner in self._owners.items() if owner == node.name for name in self._gives(other)}
        gives = any(name in self._pairs for name in {*node.output, *drawn})
        return takes and (not self._rounds_outputs or (gives and not self._between(node)))

    def _between(self, node: NodeProto) -> bool:
        """Whether it stands between Q/DQ nodes that are all its neighbours': a Tanh after a product, before another.

        It goes back with them, as the quantizer leaves it once they are excluded.
        """
        tensors = {name for name in (*node.input, *node.output) if name in self._pairs}
        return node.op_type not in ROUNDED and tensors <= self._rounding

    def _gives(self, name: str) -> list[str]:
        return [out for node in self._plain.graph.node if node.name == name for out in node.output]


def _rename(nodes: list[NodeProto], old: str, new: str, readers: Collection[str]) -> None:
    for node in nodes:
        if node.name in readers:
            node.input[:] = [new if name == old else name for name in node.input]
