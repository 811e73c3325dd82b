"""What any model takes: what a request is held against where nobody tells the model's metadata.

What is asked for more than a model's own checks bear (see `contract`) is refused here, too: sizes are exact, texts are
framed, parameters are plain.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from serve.gateway.errors import TooManyElementsError
from serve.gateway.oip.contract import INT64, ITEM_BYTES, MOST_ELEMENTS, MOST_LETTERS, Contract, UnfitError

__all__ = ["BareContract"]

MOST_DIMENSIONS, MOST_TENSORS = 32, 1024


class BareContract(Contract):
    """The contract of a model of which nothing is known.

    Args:
        max_elements: of one input; 0 for as many as it has data for.
    """

    __slots__ = ()

    def __init__(self, max_elements: int = 0) -> None:
        super().__init__({}, {}, frozenset(), batched=False, max_batch_size=0, max_elements=max_elements)

    def check_counts(self, inputs: int, outputs: int) -> None:
        if max(inputs, outputs) > MOST_TENSORS:
            raise UnfitError(f"it has more than {MOST_TENSORS} inputs or outputs")

    def elements(self, name: object, datatype: object, shape: Sequence[object]) -> int:
        if type(name) is not str or not 0 < len(name) <= MOST_LETTERS:
            raise UnfitError("an input has no name")
        if type(datatype) is not str or (datatype not in ITEM_BYTES and datatype != "BYTES"):
            raise UnfitError(f"the input {name[:64]!r} has no datatype of the protocol")
        if len(shape) > MOST_DIMENSIONS:
            raise UnfitError(f"the input {name[:64]!r} has more than {MOST_DIMENSIONS} dimensions")
        if not all(type(size) is int and 0 <= size < INT64 for size in shape):
            raise UnfitError(f"the input {name[:64]!r} has a shape that is none")
        sizes: Sequence[int] = shape  # type: ignore[assignment]
        count = math.prod(sizes)
        if count == 0 and math.prod(size or 1 for size in sizes) > MOST_ELEMENTS:
            raise UnfitError(f"the input {name[:64]!r} is empty, and has a large shape")
        if self.max_elements and count > self.max_elements:
            raise TooManyElementsError(name, count, self.max_elements)
        return count

    def check_together(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:  # noqa: ARG002
        if len(names) != len(set(names)):
            raise UnfitError("an input comes twice")

    def check_outputs(self, names: Collection[str]) -> None:
        if len(set(names)) < len(names):
            raise UnfitError("an output is asked for twice")
        if len(names) > MOST_TENSORS or not all(0 < len(name) <= MOST_LETTERS for name in names):
            raise UnfitError("an output has no name, or there are too many")

    def check_classes(self, output: str, classes: object, *, empty: bool) -> None:  # noqa: ARG002
        raise UnfitError(f"nobody tells whether the output {output[:64]!r} has classes to rank")
