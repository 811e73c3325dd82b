"""What a model takes and gives: tensors by name, dtype and shape, and a representative size for what varies.

Standard library and numpy only, as `compress.artifact`, which hands this to `serve`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from compress.errors import SignatureError

__all__ = ["Signature", "TensorSpec", "parse_sizes", "refuse_shared_names"]

# Names are numpy's; "string" is Triton's BYTES and ONNX's string tensor.
DTYPES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64", "string",
)  # fmt: skip

# What else people write: Python's, torch's and Triton's words.
_WORDS = {
    "str": "string", "bytes": "string", "object": "string", "BYTES": "string", "STRING": "string",
    "int": "int64", "long": "int64", "float": "float32", "double": "float64", "half": "float16",
    "FP16": "float16", "FP32": "float32", "FP64": "float64", "BOOL": "bool",
    **{name.upper(): name for name in DTYPES if "int" in name},
}  # fmt: skip

# What a symbolic dimension is taken as where nothing says: a sentence's length, an image's height or width.
ASSUMED_SIZE, ASSUMED_SIDE = 32, 224
MOST_DIMENSIONS = 64
MOST_TENSORS = 1024  # of a description that is read: what looks at each beside the others takes the square of it
GIVEN, ASSUMED, FIRST_THAT_RUNS = "as given", "assumed", "the first that runs"

# The name goes up to the last colon: those of other frameworks have colons, brackets and slashes in them (input:0).
_SEVERAL = re.compile(r":\w+\[[^\[\]]*\](?=[\s,;]|$)")
_SPEC = re.compile(r"^\s*(?P<name>[^\s].*?)\s*:\s*(?P<dtype>\w+)\s*\[(?P<shape>[^\[\]]*)\]\s*$")


@dataclass(frozen=True)
class TensorSpec:
    """One named tensor: dtype (numpy's name, or "string") and shape; a symbolic dimension is a string.

    Raises:
        SignatureError: the name has control characters, the dtype is unknown, or a dimension is neither a name nor
            positive.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def __post_init__(self) -> None:
        if not self.name.isprintable():
            raise SignatureError(
                f"can't take a tensor by the name {self.name[:80]!r}",
                why="it has control characters, which a terminal obeys",
                mend="give it a plain name, as in 'x:float32[batch,3,224,224]'",
            )
        if self.dtype not in DTYPES:
            raise SignatureError(
                f"tensor {self.name!r} has an unknown dtype {self.dtype!r}",
                why="it is none of " + ", ".join(DTYPES),
                mend="write the dtype by numpy's name, as in 'x:float32[batch,3,224,224]'",
            )
        if len(self.shape) > MOST_DIMENSIONS:
            raise SignatureError(
                f"tensor {self.name!r} has too many dimensions: {len(self.shape):,}",
                why=f"neither torch nor numpy has arrays of more than {MOST_DIMENSIONS}",
                mend="write the shape as in 'x:float32[batch,3,224,224]'",
            )
        for dim in self.shape:
            if not 0 < dim < 1 << 63 if isinstance(dim, int) else not dim.isidentifier():
                raise SignatureError(
                    f"tensor {self.name!r} has the dimension {dim!r}",
                    why="a dimension is a positive number, or a name for one that varies",
                    mend="write the shape as in 'x:float32[batch,3,224,224]'",
                )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read 'name:dtype[batch,3,224,224]', its dtype by numpy's word, Python's, torch's or Triton's (half, FP32)."""
        match = _SPEC.match(text)
        if len(_SEVERAL.findall(text)) > 1:
            raise SignatureError(
                f"can't read the tensor {text!r}",
                why="it looks like several",
                mend="give each by itself: inputs=['x:float32[batch,8]', 'mask:int64[batch]'], or an --input each",
            )
        if match is None:
            raise SignatureError(
                f"can't read the tensor {text!r}",
                why="it is not of the form name:dtype[dimensions]",
                mend="write it as in 'x:float32[batch,3,224,224]'",
            )
        dims = [dim.strip() for dim in match["shape"].split(",")] if match["shape"].strip() else []
        shape = tuple(int(dim) if re.fullmatch(r"-?\d+", dim) else dim for dim in dims)
        word = match["dtype"].removeprefix("TYPE_")
        return cls(match["name"], _WORDS.get(word, match["dtype"]), shape)

    def __str__(self) -> str:
        return f"{self.name}:{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def batched(self) -> bool:
        """Whether the first dimension is symbolic."""
        return bool(self.shape) and isinstance(self.shape[0], str)

    def at(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape with each symbolic dimension at its size."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)

    def check(self, array: np.ndarray[Any, Any], *, source: str) -> None:
        """Raise SignatureError unless the array has this dtype and a shape that fits.

        Args:
            array: any array.
            source: where it came from, for the message ("calibration.npz").
        """
        dtype = "string" if array.dtype.kind in "OSU" else array.dtype.name
        fits = len(array.shape) == len(self.shape) and all(
            isinstance(want, str) or want == have for want, have in zip(self.shape, array.shape, strict=True)
        )
        if dtype != self.dtype or not fits:
            raise SignatureError(
                f"{source} does not fit the model's input {self.name!r}",
                why=f"it holds {dtype}{list(array.shape)}, the model takes {self}",
                mend=f"give {self.name!r} as {self.dtype} with shape [{', '.join(map(str, self.shape))}]",
            )


def parse_sizes(texts: Iterable[str]) -> dict[str, int]:
    """Read 'seq=128', once for each dimension.

    Raises:
        SignatureError: one is not of that form, or a dimension is given twice.
    """
    found: dict[str, int] = {}
    for text in texts:
        name, _, size = (part.strip() for part in text.partition("="))
        if not name.isidentifier() or not re.fullmatch(r"[0-9]{1,12}", size) or name in found:
            raise SignatureError(
                f"can't read the size {text!r}",
                why=f"{name!r} is given twice" if name in found else "it is not of the form dimension=number",
                mend="write it as in --size seq=128",
            )
        found[name] = int(size)
    return found


@dataclass(frozen=True)
class Signature:
    """A model's inputs and outputs, in the order of its forward.

    The leading dimension of an input, where it is symbolic, counts samples; the others are measured, counted and tried
    at one representative size each.

    Attributes:
        inputs, outputs: by position.
        sizes: of symbolic dimensions of the inputs, the size that stands for them all. It is no part of what the model
            takes: signatures that differ in it are equal. A leading dimension that is given one counts no samples.
        sources: where each size is from, as "as given"; a size without one is as given.

    Raises:
        SignatureError: a size is not positive, of a dimension that no input has, or none is left to count samples.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    sizes: Mapping[str, int] = field(default_factory=dict, compare=False)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        known = {dim for spec in self.inputs for dim in spec.shape if isinstance(dim, str)}
        leading = {str(spec.shape[0]) for spec in self.inputs if spec.batched}
        mend = "name one of these as in seq=128, or leave the size out"
        for name, size in self.sizes.items():
            if name not in known:
                there = ", ".join(sorted(known - leading)) or "none but that of the samples"
                raise SignatureError(
                    f"can't set a size for {name!r}", why=f"the inputs' dimensions that vary are {there}", mend=mend
                )
            if size < 1:
                why = "a dimension holds 1 or more"
                raise SignatureError(f"can't set {name!r} to {size}", why=why, mend="give a size that is usual")
        if leading and leading <= self.sizes.keys():
            raise SignatureError(
                f"can't set a size for {', '.join(sorted(leading))}",
                why="it counts samples, whose number is the batch size",
                mend="give sizes for the other dimensions that vary",
            )

    @property
    def batched(self) -> bool:
        """Whether every tensor starts with a symbolic dimension that counts samples."""
        others = {dim for spec in self.inputs for dim in spec.shape if isinstance(dim, str)} - self.batches
        tensors = (*self.inputs, *self.outputs)
        return all(spec.batched and spec.shape[0] not in others for spec in tensors)

    @property
    def singly(self) -> bool:
        """Whether a call takes one sample: every tensor starts with a dimension that is fixed at 1."""
        return bool(self.inputs) and all(spec.shape[:1] == (1,) for spec in (*self.inputs, *self.outputs))

    @property
    def batches(self) -> set[str]:
        """Names of the dimensions that count samples."""
        return {str(spec.shape[0]) for spec in self.inputs if spec.batched} - self.sizes.keys()

    @property
    def call(self) -> int:
        """Samples that a call takes, no more and no fewer: the fixed number that all inputs begin with; else 1."""
        leading = {spec.shape[0] if spec.shape else "" for spec in self.inputs}
        first = leading.pop() if len(leading) == 1 else 1
        return first if isinstance(first, int) else 1

    def samples_axis(self, output: int) -> int:
        """The dimension of an output, by its place, that counts samples: the first, where none is named so."""
        shape = self.outputs[output].shape if output < len(self.outputs) else ()
        return next((axis for axis, dim in enumerate(shape) if dim in self.batches), 0)

    @property
    def assumed(self) -> dict[str, int]:
        """Sizes of the inputs' symbolic dimensions that nothing was said of, the batch apart."""
        batches = self.batches
        return {
            dim: ASSUMED_SIDE if len(spec.shape) == 4 and axis >= 2 else ASSUMED_SIZE
            for spec in self.inputs
            for axis, dim in enumerate(spec.shape)
            if isinstance(dim, str) and dim not in batches and dim not in self.sizes
        }

    def at(self, batch: int) -> dict[str, int]:
        """The representative size of each symbolic dimension of the inputs, for so many samples."""
        return self.assumed | dict(self.sizes) | dict.fromkeys(self.batches, batch)

    def sized(self, sizes: Mapping[str, int], source: str = GIVEN) -> Self:
        """With these sizes in place of those that it has of the same dimensions.

        Args:
            sizes: by dimension; see the class.
            source: where they are from.

        Raises:
            SignatureError: see the class.
        """
        sources = dict(self.sources) | dict.fromkeys(sizes, source)
        return dataclasses.replace(self, sizes=dict(self.sizes) | dict(sizes), sources=sources)

    @property
    def settled(self) -> Self:
        """With the assumed sizes written down, for whoever gets it without the rules by which they are assumed."""
        return self.sized(self.assumed, ASSUMED)

    @property
    def told(self) -> dict[str, tuple[int, str]]:
        """The representative size of each dimension but the batch, and where it is from, in the inputs' order."""
        found = self.at(1)
        order = [dim for spec in self.inputs for dim in spec.shape if isinstance(dim, str) and dim not in self.batches]
        return {dim: (found[dim], self.sources.get(dim, GIVEN) if dim in self.sizes else ASSUMED) for dim in order}

    @property
    def sizes_told(self) -> dict[str, dict[str, Any]]:
        """The same as JSON values: `size` and `source` by dimension."""
        return {dim: {"size": size, "source": source} for dim, (size, source) in self.told.items()}

    @property
    def unsaid(self) -> dict[str, int]:
        """Those of `told` that neither the user nor data gave."""
        return {dim: size for dim, (size, source) in self.told.items() if source in (ASSUMED, FIRST_THAT_RUNS)}

    @property
    def identity(self) -> str:
        """What decides a run's results: everything but where the sizes are from; that some are a guess is told of."""
        specs = "; ".join(", ".join(map(str, side)) for side in (self.inputs, self.outputs))
        return f"{specs}; {sorted(self.at(1).items())}; {sorted(self.unsaid)}"

    @property
    def sizes_text(self) -> str:
        """'seq = 128 (from the calibration data), height = 224 (assumed)'; nothing where only the batch varies."""
        return ", ".join(f"{dim} = {size} ({source})" for dim, (size, source) in self.told.items())

    def to_dict(self) -> dict[str, Any]:
        written: dict[str, Any] = {
            "inputs": [str(spec) for spec in self.inputs],
            "outputs": [str(spec) for spec in self.outputs],
        }
        if self.sizes:
            written["sizes"] = dict(self.sizes)
            written["size_sources"] = {dim: source for dim, (_, source) in self.told.items() if dim in self.sizes}
        return written

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What `to_dict` gave.

        Raises:
            ValueError, KeyError, TypeError: it is something else, or of more tensors than any model has.
        """
        if len(data["inputs"]) > MOST_TENSORS or len(data["outputs"]) > MOST_TENSORS:
            raise ValueError(f"it has more than {MOST_TENSORS} inputs or outputs")
        return cls(
            tuple(TensorSpec.parse(text) for text in data["inputs"]),
            tuple(TensorSpec.parse(text) for text in data["outputs"]),
            {str(name): _whole(size) for name, size in data.get("sizes", {}).items()},
            {str(name): _printable(str(source)[:60]) for name, source in data.get("size_sources", {}).items()},
        )


def refuse_shared_names(signature: Signature) -> None:
    """Raise SignatureError where two tensors have one name: in an ONNX file a name is one tensor's."""
    sides = {"input": [spec.name for spec in signature.inputs], "output": [spec.name for spec in signature.outputs]}
    every = [(name, side) for side, names in sides.items() for name in names]
    for name, side in every:
        others = [other for named, other in every if named == name]
        if len(others) > 1:
            both = f"two {side}s" if len({*others}) == 1 else "an input and an output"
            raise SignatureError(
                f"can't call {both} {name!r}",
                why="an ONNX file, and whoever feeds it, knows tensors by their names: each is one tensor's",
                mend="name each otherwise: with --input, or inputs= and outputs= of compress.save",
            )


def _whole(size: Any) -> int:
    if type(size) is not int:
        raise ValueError(f"the size {str(size)[:20]!r} is no whole number")
    return size


def _printable(text: str) -> str:
    """Without what moves a terminal's cursor."""
    return "".join(letter for letter in text if letter.isprintable())
