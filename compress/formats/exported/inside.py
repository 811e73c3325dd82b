"""How large the tensors inside a program get, by the sizes of its inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram

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
    products: set[Any] = set()
    for value in values.values():
        count: Any = 1
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            count = count * (size if isinstance(size, int) else size.node.expr)
        if not isinstance(count, int):
            products.add(count)
    return Inside(symbols, products)


def _number(product: Any, sizes: Mapping[Any, int]) -> int | None:
    """What a product is at some sizes; None where it is undefined there, or holds other symbols."""
    try:
        return int(product.subs(sizes))
    except Exception:  # sympy, and torch's functions for it: 8*T // (T // 4) divides by 0, NaN is no whole number
        return None
