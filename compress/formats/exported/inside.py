"""How large the tensors inside a program get, by the sizes of its inputs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from compress.formats.exported.guards import Place

__all__ = ["WORD", "Inside", "inside_of"]

WORD = 8  # bytes of an element at most


@dataclass(frozen=True)
class Inside:
    """The tensors of a program, by their symbolic shapes alone, so that the program itself can go.

    Attributes:
        symbols: the dimension that each of torch's own symbols is.
        products: how many elements tensors have, in symbols.
    """

    symbols: Mapping[Any, str] = field(default_factory=dict)
    products: Collection[Any] = ()

    def largest(self, sizes: Mapping[str, int]) -> int:
        """Bytes of the largest at some sizes of dimensions; 0 where that is not known."""
        return WORD * max((found for found in self._elements(sizes) if found is not None), default=0)

    def empty(self, sizes: Mapping[str, int]) -> bool:
        """Whether one is known to have no element."""
        return 0 in self._elements(sizes)

    def _elements(self, sizes: Mapping[str, int]) -> list[int | None]:
        here = {symbol: sizes[dim] for symbol, dim in self.symbols.items()}
        return [_number(product, here) for product in self.products]


def inside_of(program: ExportedProgram, places: Mapping[Place, str]) -> Inside:
    """The tensors inside a program of torch.export.

    Args:
        program: that torch.export wrote.
        places: dimensions, by the program's input and its axis.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    symbols: dict[Any, str] = {}
    for (name, axis), dim in places.items():
        size = getattr(values.get(name), "shape", ())[axis : axis + 1]
        if size and not isinstance(size[0], int):
            symbols[size[0].node.expr] = dim
    shapes = [tuple(value.shape) for value in values.values() if isinstance(value, torch.Tensor)]
    shapes += filter(None, map(_of_attention, program.graph.nodes))
    products = {_product(shape) for shape in shapes}
    return Inside(symbols, {product for product in products if not isinstance(product, int)})


def _of_attention(node: Node) -> tuple[Any, ...]:
    """The shape of the weights that attention holds inside, which are no tensor of the program: [..., L, S]."""
    if "scaled_dot_product" not in str(node.target) or len(node.args) < 2:
        return ()
    query, key = (arg.meta.get("val") if isinstance(arg, Node) else None for arg in node.args[:2])
    if isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor):
        return (*query.shape[:-1], key.shape[-2])
    return ()


def _product(shape: tuple[Any, ...]) -> Any:
    """A number, or an expression of torch's own symbols."""
    return math.prod(size if isinstance(size, int) else size.node.expr for size in shape)


def _number(product: Any, sizes: Mapping[Any, int]) -> int | None:
    """What a product is at some sizes; None where it is undefined there, or holds other symbols."""
    try:
        return int(product.subs(sizes))
    except Exception:  # sympy, and torch's functions for it: 8*T // (T // 4) divides by 0, NaN is no whole number
        return None
