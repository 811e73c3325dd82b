"""What a model takes, and whether one tensor of a request fits it: HTTP and gRPC are held to the same rules.

Triton makes tensors of the size that a request names before it looks at the data, and hands whatever comes to the
model that other clients' requests are batched with: nothing that does not fit may reach it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serve.gateway.access.slots import Batcher
from serve.gateway.errors import BadRequestError, TooManyElementsError
from serve.gateway.oip.metadata import ModelMetadata, TensorMetadata
from serve.gateway.oip.tensors import DATATYPES

__all__ = [
    "ITEM_BYTES", "Contract", "UnfitError", "check_floats", "check_framing", "check_id", "check_parameters",
    "check_range",
]  # fmt: skip

# Bytes of one element, raw; BYTES elements have lengths of their own.
ITEM_BYTES = {name: 2 if name == "BF16" else dtype.itemsize for name, dtype in DATATYPES.items() if name != "BYTES"}
# The least and the largest number of a datatype; None where whatever carries them has no more.
_ENDS = {name: np.iinfo(dtype) for name, dtype in DATATYPES.items() if dtype.kind in "iu"}
RANGES: Mapping[object, tuple[int | None, int | None]] = {
    name: (None if ends.min == -(2**63) else int(ends.min), None if ends.max == 2**64 - 1 else int(ends.max))
    for name, ends in _ENDS.items()
}
# Of which Triton can name the largest values (TopkClassifications in its core).
RANKED = frozenset(ITEM_BYTES) - {"BOOL", "FP16", "BF16"}
MOST_PARAMETERS, MOST_LETTERS, MOST_CLASSES = 64, 4096, 1_000_000
MOST_ID_LETTERS = 1024
MOST_ELEMENTS = 2**31  # of the dimensions beside one that is 0: what is empty has no data to be held against
INT64 = 2**63
PIECE = 4096  # elements: what they take is no more than about a millisecond
END_FP32 = float(2**128 - 2**103)  # halfway from the largest FP32 to what would come next: rounded to infinity
LARGE_FP32 = 2.0**127
_FLAG, _TEXT, _SIZE = (bool, 0, 0), (str, 0, 0), (int, 0, INT64)
# Triton's own parameters by kind and range; it fails with a status of its servers' where one is of another.
RULES: Mapping[str, tuple[type, int, int]] = {
    "sequence_start": _FLAG, "sequence_end": _FLAG, "binary_data_output": _FLAG, "binary_data": _FLAG,
    "priority": (int, 0, INT64), "timeout": _SIZE,
    "shared_memory_region": _TEXT, "shared_memory_offset": _SIZE, "shared_memory_byte_size": _SIZE,
}  # fmt: skip
RESERVED, FREE = "triton_", frozenset(("triton_enable_empty_final_response", "triton_final_response"))
MOST_ID = 128  # bytes of a sequence's id, in UTF-8
_length = struct.Struct("<I").unpack_from


def _go_on_at_once() -> None:
    """Nobody waits for it."""


class UnfitError(BadRequestError):
    """A request that does not fit the model as it is known; another look at the model may show that it does."""

    def __init__(self, why: str) -> None:
        super().__init__(
            "the request does not fit the model",
            why=why,
            mend="see the model's metadata, and GET .../example (where it has base64, the bytes are sent raw)",
        )


@dataclass(frozen=True, slots=True)
class Contract:
    """A model's inputs and outputs by name.

    Attributes:
        inputs, outputs: as the model's metadata has them.
        required: inputs that every request has.
        batched: whether the first dimension is the batch.
        max_batch_size: items of a request at most; 0 where that is not known.
        max_elements: of one input, whatever its dimensions; 0 for what they allow.
        sequence_texts: whether the id of a sequence may be a text.
        batcher: of its sequences, or of its first step's that has one; None where that is not known.
    """

    inputs: Mapping[str, TensorMetadata]
    outputs: Mapping[str, TensorMetadata]
    required: frozenset[str]
    batched: bool
    max_batch_size: int
    max_elements: int = 0
    sequence_texts: bool = False
    batcher: Batcher | None = None

    @classmethod
    def of(
        cls,
        metadata: ModelMetadata,
        max_elements: int = 0,
        *,
        sequence_texts: bool = False,
        batcher: Batcher | None = None,
    ) -> Contract:
        """The contract of a model that Triton serves.

        Args:
            metadata: of the model.
            max_elements: of one input; 0 for what its dimensions allow.
            sequence_texts: whether the model, and each that it asks, takes ids of sequences that are texts.
            batcher: of the sequences of the model, or of one that it asks.
        """
        return cls(
            {tensor.name: tensor for tensor in metadata.inputs},
            {tensor.name: tensor for tensor in metadata.outputs},
            frozenset(tensor.name for tensor in metadata.inputs if not tensor.optional),
            metadata.batched,
            metadata.max_batch_size,
            max_elements,
            sequence_texts,
            batcher,
        )

    def check_counts(self, inputs: int, outputs: int) -> None:
        """Whether a request may have so many inputs, and ask for so many outputs; raises UnfitError."""
        for count, known, what in ((inputs, self.inputs, "input"), (outputs, self.outputs, "output")):
            if count > len(known):
                raise UnfitError(f"it has {count} {what}s, and the model {len(known)}: {_named(known)}")

    def elements(self, name: object, datatype: object, shape: Sequence[object]) -> int:
        """How many elements an input has, after a look at its name, datatype and shape.

        Raises:
            UnfitError: the model has no such input, or not this datatype or shape.
            TooManyElementsError: it has more than are allowed.
        """
        known = self.inputs.get(name) if type(name) is str else None
        if known is None:
            raise UnfitError(f"it has no input {_short(name)}, but {', '.join(self.inputs)}")
        if datatype != known.datatype:
            raise UnfitError(f"the input {name!r} is {known.datatype}, not {_short(datatype)}")
        if len(shape) != len(known.shape):
            raise UnfitError(f"the input {name!r} has {len(known.shape)} dimensions {list(known.shape)}")
        for size, wanted in zip(shape, known.shape, strict=True):
            if type(size) is not int or not 0 <= size < INT64 or (wanted >= 0 and size != wanted):
                raise UnfitError(f"the input {name!r} has the shape {list(known.shape)}, not {_short(list(shape))}")
        sizes: Sequence[int] = shape  # type: ignore[assignment]
        if self.batched and not 1 <= sizes[0] <= (self.max_batch_size or MOST_ELEMENTS):
            raise UnfitError(f"batch-size must be <= {self.max_batch_size} and at least 1, and it is {sizes[0]}")
        count = math.prod(sizes)
        if count == 0 and math.prod(size or 1 for size in sizes) > MOST_ELEMENTS:
            raise UnfitError(f"the input {name!r} is empty, and has the shape {_short(list(shape))}")
        if self.max_elements and count > self.max_elements:
            raise TooManyElementsError(known.name, count, self.max_elements)
        return count

    def check_together(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Whether these inputs make a request: each once, none missing, all of one batch.

        Raises:
            UnfitError: they don't.
        """
        if len(names) != len(set(names)):
            raise UnfitError("an input comes twice")
        if not self.required.issubset(names):
            raise UnfitError(f"it lacks the input {', '.join(sorted(self.required.difference(names)))}")
        if self.batched and len({shape[0] for shape in shapes}) > 1:
            raise UnfitError("its inputs have batches of different sizes")

    def check_outputs(self, names: Collection[str]) -> None:
        """Whether these outputs may be asked for; raises UnfitError."""
        if len(names) > len(self.outputs) or len(set(names)) < len(names):
            raise UnfitError("an output is asked for twice")
        for name in names:
            if name not in self.outputs:
                raise UnfitError(f"it has no output {_short(name)}, but {', '.join(self.outputs)}")

    def check_classes(self, output: str, classes: object, *, empty: bool) -> None:
        """Whether an output may be asked for as its largest values.

        Triton ends over one that has none (release 24.10, over HTTP). Of a batch it has a row for each of the inputs'.

        Args:
            output: that the model has.
            classes: how many.
            empty: whether an input of the request has no elements: then the output, too, may have no row.

        Raises:
            UnfitError: it may not.
        """
        known = self.outputs[output]
        if known.datatype not in RANKED:
            raise UnfitError(f"the output {output!r} is {known.datatype}, which has no classes to rank")
        # Without max_batch_size the batch is a guess.
        if min(known.shape[1:] if self.batched and self.max_batch_size else known.shape, default=1) < 1:
            raise UnfitError(f"the output {output!r} may be empty by its shape {list(known.shape)}: no classes to rank")
        if empty:
            raise UnfitError(f"an input is empty, and so may be the output {output!r}: no classes to rank")
        if type(classes) is not int or not 1 <= classes <= MOST_CLASSES:
            raise UnfitError(f"classification is a number of classes, not {_short(classes)}")

    def check_sequence(self, sequence: object) -> None:
        """Whether the id of a sequence is of the kind that the model takes.

        Triton copies an id as it lies in its memory into a number that the model asks for.

        Raises:
            UnfitError: it is a text, and that is not what the model takes.
        """
        if sequence and type(sequence) is str and not self.sequence_texts:
            raise UnfitError("the id of its sequence is a text, and the model takes a number")


def check_id(value: object) -> None:
    """Whether it may be a request's own id: Triton copies it into each of its answers; raises UnfitError."""
    if type(value) is not str or len(value) > MOST_ID_LETTERS:
        raise UnfitError(f"its id is no text of up to {MOST_ID_LETTERS} letters")


def check_parameters(parameters: Mapping[Any, Any], *, shared_memory: bool) -> None:
    """Whether a request's parameters, or a tensor's, are a few plain values.

    Args:
        parameters: by name.
        shared_memory: whether regions of shared memory may be named.

    Raises:
        UnfitError: they are not.
    """
    if len(parameters) > MOST_PARAMETERS:
        raise UnfitError(f"it has more than {MOST_PARAMETERS} parameters")
    for name, value in parameters.items():
        kind = type(value)
        if type(name) is not str or len(name) > MOST_LETTERS or kind not in (bool, int, float, str):
            raise UnfitError(f"the parameter {_short(name)} is neither a number nor a text")
        if (kind is int and not -INT64 <= value < INT64) or (kind is str and len(value) > MOST_LETTERS):
            raise UnfitError(f"the parameter {_short(name)} is too large")
        _check_own(name, value)
        if name.startswith("shared_memory") and not shared_memory:
            raise UnfitError("shared memory is for keys with admin")


def _check_own(name: str, value: object) -> None:
    """Whether a parameter that Triton reads itself is what it takes; raises UnfitError."""
    kind = type(value)
    if name == "sequence_id":
        fits = (type(value) is int and 0 <= value < INT64) or (type(value) is str and len(value.encode()) <= MOST_ID)
        if not fits:
            raise UnfitError(f"sequence_id is a whole number or a text of up to {MOST_ID} bytes, not {_short(value)}")
    elif (rule := RULES.get(name)) is not None:
        wanted, least, end = rule
        if kind is not wanted:
            what = {bool: "true or false", str: "a text", int: "a whole number"}[wanted]
            raise UnfitError(f"the parameter {name!r} is {what}, not {_short(value)}")
        if type(value) is int and not least <= value < end:
            raise UnfitError(f"the parameter {name!r} is from {least} to {end - 1}, not {_short(value)}")
    elif name.startswith(RESERVED) and name not in FREE:
        raise UnfitError(f"parameters that begin with {RESERVED} are Triton's own")


def check_range(datatype: object, numbers: Sequence[int], rest: Callable[[], object] = _go_on_at_once) -> None:
    """Whether whole numbers of up to 64 bits are such as a datatype holds.

    Triton fails at some of the others with a status of its servers' (what JSON says beyond 64 bits with a sign, or
    below 0), and takes the rest for what their lower bits say.

    Args:
        rest: as of `check_framing`.

    Raises:
        UnfitError: one is not.
    """
    least, most = RANGES.get(datatype, (None, None))
    for start in range(0, len(numbers) if (least, most) != (None, None) else 0, PIECE):
        piece = numbers[start : start + PIECE] if len(numbers) > PIECE else numbers
        if (least is not None and min(piece) < least) or (most is not None and max(piece) > most):
            raise UnfitError(f"a number is beyond what {datatype} holds")
        rest()


def check_floats(numbers: Sequence[float]) -> None:
    """Whether numbers of JSON are such as FP32 holds: beyond it, Triton takes them for infinite.

    Raises:
        UnfitError: one is not.
    """
    # Their norm is not below any of them, and a tenth of what `max` and `min` take.
    if math.hypot(*numbers) >= LARGE_FP32 and not -END_FP32 < min(numbers) <= max(numbers) < END_FP32:
        raise UnfitError("a number is too large for FP32")


def check_framing(name: str, raw: bytes | memoryview, count: int, rest: Callable[[], object] = _go_on_at_once) -> None:
    """Whether a raw BYTES tensor is so many elements, each after its length, and nothing else.

    Args:
        name, raw, count: of the tensor.
        rest: is called about every millisecond.

    Raises:
        UnfitError: it is not.
    """
    at, last, left = 0, len(raw) - 4, count
    while left:
        piece = min(left, PIECE)
        for _ in range(piece):
            if at > last:
                break
            at += 4 + _length(raw, at)[0]
        else:
            left -= piece
            rest()
            continue
        if at <= last + 4:
            raise UnfitError(f"the raw data of the input {name!r} ends before its {count} elements do")
        break
    if at > last + 4:
        raise UnfitError(f"an element of the input {name!r} is longer than the data that is left")
    if at < last + 4:
        raise UnfitError(f"the raw data of the input {name!r} goes on after its {count} elements")


def _named(tensors: Collection[str]) -> str:
    return ", ".join(tensors) or "none"


def _short(value: object) -> str:
    """A client's value in a message, not at its full length."""
    text = repr(value) if type(value) is not list else repr(value[:8])
    return text if len(text) <= 80 else text[:77] + "..."
