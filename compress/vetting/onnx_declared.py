"""The inputs and outputs that an ONNX file declares, taken from its bytes as they are looked through.

Standard library alone, as `compress.vetting.onnx_wire`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from compress.vetting.onnx_fields import DTYPES

__all__ = ["Declared", "Ends"]

MOST = 2048  # inputs and outputs that are kept, without the weights that old files name among them
HELD, TAKEN, GIVEN, SPARSE = 5, 11, 12, 15  # fields of a graph
Fields = dict[int, list[Any]]


@dataclass(frozen=True)
class Declared:
    """An input or an output.

    Attributes:
        name: of it.
        dtype: of its elements, of `DTYPES`; "" of what is no tensor, or of another type.
        shape: -1 for a size that varies; None where none is told.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None

    def __str__(self) -> str:
        sizes = "any" if self.shape is None else ", ".join("any" if size < 0 else str(size) for size in self.shape)
        return f"{self.name}:{self.dtype or 'no tensor'}[{sizes}]"


@dataclass
class Ends:
    """What a graph takes and gives, as its fields come.

    Args:
        text: of a field of a message, by its number.
    """

    text: Callable[[Fields, int], str]
    held: set[str] = field(default_factory=set)  # names of weights: one that is an input, too, need not be given
    taken: list[Declared] = field(default_factory=list)
    given: list[Declared] = field(default_factory=list)

    def add(self, number: int, found: Fields) -> None:
        """Take a field of the graph."""
        if number == HELD:
            self.held.add(self.text(found, 8))
        elif number == SPARSE:  # the name is that of its values
            self.held.update(self.text(values, 8) for values in found.get(1, ()))
        kept = {TAKEN: self.taken, GIVEN: self.given}.get(number)
        if kept is None or len(kept) >= MOST:
            return
        declared = self._declared(found)
        if number != TAKEN or declared.name not in self.held:  # weights come first in what protobuf writes
            kept.append(declared)

    def _declared(self, found: Fields) -> Declared:
        tensor: Fields = next((kind[1][0] for kind in found.get(2, ()) if 1 in kind), {})
        dtype = DTYPES.get(next(iter(tensor.get(1, ())), 0), "")
        shape = next((tuple(map(_size, each.get(1, ()))) for each in tensor.get(2, ())), None)
        return Declared(self.text(found, 1), dtype, shape)


def _size(dim: Fields) -> int:
    size = next(iter(dim.get(1, ())), -1)
    return size if size > 0 else -1
