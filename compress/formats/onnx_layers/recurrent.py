"""LSTM, GRU and RNN of ONNX as those of torch.nn, where these compute the same."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from compress.formats.onnx_layers.shapes import Handler
from compress.formats.onnx_layers.values import Graph, Live, NotTakenBackError, in_file, samples

__all__ = ["RECURRENT"]

# What of zeros gives zeros.
_MOVES = {"expand", "reshape", "permute", "to", "unsqueeze", "squeeze", "select", "getitem", "split"}
_DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}


@dataclass(frozen=True)
class _Kind:
    """How ONNX writes a recurrent layer.

    Attributes:
        layer: torch's.
        gates: ONNX's place of each of torch's gates.
        usual: the activations that torch's layer has, too.
        states: how many it passes on.
    """

    layer: type[nn.RNNBase]
    gates: tuple[int, ...]
    usual: tuple[str, ...]
    states: int = 1

    def __call__(self, g: Graph, x: list[Any], a: Mapping[str, Any]) -> Any:
        x = [*x, *[None] * 8][:8]
        in_file(x, 1, 2, 3)
        direction = a.get("direction", b"forward").decode()
        count = _DIRECTIONS[direction]
        more = self._form(g, x, a, count)
        width, size = int(x[2].shape[2]), int(x[1].shape[2])
        form = (size, width, 1, *more, x[3] is not None, False, 0.0, count == 2)
        value, back = g.tensor(x[0]), direction == "reverse"
        out = g.layer(
            self.layer, form, self._weights(g, x, count), g.call(torch.flip, value, (0,)) if back else value,
            *self._begin(g, x[5 : 5 + self.states]),
        )  # fmt: skip
        every, states = (g.call(operator.getitem, out, at) for at in (0, 1))
        if back:
            every = g.call(torch.flip, every, (0,))
        if count == 1:
            steps = g.call(torch.unsqueeze, every, 1)
        else:  # no number of hidden units stands here, some of which may go
            apart = g.call("reshape", every, (g.size(every, 0), g.size(every, 1), 2, -1))
            steps = g.call("permute", apart, (0, 2, 1, 3))
        if self.states == 1:
            return [steps, states]
        return [steps, *(g.call(operator.getitem, states, at) for at in range(self.states))]

    def _form(self, g: Graph, x: list[Any], a: Mapping[str, Any], count: int) -> tuple[Any, ...]:
        """What else the layer is made with, behind its sizes.

        Raises:
            NotTakenBackError: it does what torch's does not.
        """
        named = [each.decode().lower() for each in a.get("activations", [])]
        own = tuple(named[: len(self.usual)]) if named else self.usual
        told = {
            "it has other activations than torch's layer": named and (
                own * count != tuple(named) or (own != self.usual and not (self.layer is nn.RNN and own == ("relu",)))
            ),
            "it clips what its activations get": "clip" in a,
            "it couples its input and forget gates": a.get("input_forget", 0),
            "its batch comes first (layout)": a.get("layout", 0),
            "it resets before the product with the state (linear_before_reset=0), torch's behind it": (
                self.layer is nn.GRU and not a.get("linear_before_reset", 0)
            ),
            "its sequences have lengths of their own": x[4] is not None,
            "its gates look at the cell (peepholes)": x[7] is not None and not is_zero(g, x[7]),
            "it computes in another type than FP32": samples(x[0]).dtype != torch.float32,
        }  # fmt: skip
        for why, so in told.items():
            if so:
                raise NotTakenBackError(why)
        return own if self.layer is nn.RNN else ()

    def _begin(self, g: Graph, states: list[Any]) -> list[Any]:
        """The states that it begins with, as its layer takes them: none, where they are zeros."""
        if all(is_zero(g, each) for each in states):
            return []
        given = next(each for each in states if each is not None)
        whole = [g.call(torch.zeros_like, given) if each is None else g.tensor(each) for each in states]
        return whole if self.states == 1 else [tuple(whole)]

    def _weights(self, g: Graph, x: list[Any], count: int) -> dict[str, torch.Tensor | None]:
        held: dict[str, torch.Tensor | None] = {}
        for part, end in enumerate(("", "_reverse")[:count]):
            for name, at, half in (("weight_ih", 1, 0), ("weight_hh", 2, 0), ("bias_ih", 3, 0), ("bias_hh", 3, 1)):
                whole = x[at]
                if whole is None:
                    held[f"{name}_l0{end}"] = None
                    continue
                rows = whole[part].chunk(2)[half] if at == 3 else whole[part]
                held[f"{name}_l0{end}"] = g.once((name, part, self.gates), whole, self._turned(rows))
        return held

    def _turned(self, rows: torch.Tensor) -> torch.Tensor:
        """The gates in torch's order."""
        gates = rows.reshape(len(self.gates), -1, *rows.shape[1:])
        return gates[list(self.gates)].flatten(0, 1).contiguous()


def is_zero(g: Graph, value: Any) -> bool:
    """Whether a tensor is 0 everywhere, whatever comes in; of what is not there, too."""
    if not isinstance(value, Live):
        return value is None or (isinstance(value, torch.Tensor) and not bool(value.any()))
    return _of_zeros(g, value.node)


def _of_zeros(g: Graph, node: Any) -> bool:
    if not isinstance(node, fx.Node):
        return False
    if node.op == "get_attr":
        return not bool(operator.attrgetter(str(node.target))(g.placed.root).any())
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "full":
        return bool(node.args[1] == 0)
    if name == "cat":
        return all(_of_zeros(g, each) for each in node.args[0])  # type: ignore[union-attr]
    return name in _MOVES and _of_zeros(g, node.args[0])


RECURRENT: Mapping[str, Handler] = {
    "LSTM": _Kind(nn.LSTM, (0, 2, 3, 1), ("sigmoid", "tanh", "tanh"), 2),
    "GRU": _Kind(nn.GRU, (1, 0, 2), ("sigmoid", "tanh")),
    "RNN": _Kind(nn.RNN, (0,), ("tanh",)),
}
