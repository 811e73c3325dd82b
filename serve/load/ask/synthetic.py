"""Made-up requests: a model's own example or random values, in the batches and shapes asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compress.errors import ServerError
from serve.gateway.oip.metadata import ModelMetadata, TensorMetadata
from serve.gateway.oip.tensors import DATATYPES, Tensor
from serve.load.ask.inputs import Item, batches_of, weighted
from serve.load.options import LoadOptions

__all__ = ["synthetic"]

FREE = 64
"""A length to show where the model takes any."""


def synthetic(metadata: ModelMetadata, own: tuple[Tensor, ...], options: LoadOptions) -> list[Item]:
    """The model's own example (`own`) or random values, in the batches and shapes asked for.

    Raises:
        ServerError: a shape that the model can't take.
    """
    generator = np.random.default_rng(options.seed)
    if options.shape:
        found: list[Item] = []
        for text in options.shape:
            shapes, weight = _shapes(text, metadata)
            for _ in range(options.distinct):
                inputs = tuple(_random(each, shapes[each.name], generator) for each in metadata.inputs)
                rows = inputs[0].shape[0] if metadata.batched and inputs and inputs[0].shape else 1
                found.append(Item(inputs, rows=rows, weight=weight))
        return found
    single = [own]
    if not metadata.example and (options.distinct > 1 or not own):
        shape = {each.name: tuple(max(dim, 1) for dim in each.shape) for each in metadata.inputs}
        single = [
            tuple(_random(each, shape[each.name], generator) for each in metadata.inputs)
            for _ in range(options.distinct)
        ]
    return [
        Item(_tiled(inputs, rows, metadata), rows=rows if metadata.batched else 1, weight=weight)
        for rows, weight in batches_of(options.batch)
        for inputs in single
    ]


def _random(wanted: TensorMetadata, shape: Sequence[int], generator: np.random.Generator) -> Tensor:
    dtype = DATATYPES[wanted.datatype]
    if wanted.datatype == "BYTES":
        data = np.empty(shape, dtype=np.object_)
        for at in np.ndindex(*shape):
            data[at] = bytes(generator.integers(97, 123, 8, dtype=np.uint8))
    elif dtype.kind == "f":
        data = generator.random(shape, dtype=np.float32).astype(dtype)
    else:
        data = generator.integers(0, 2, shape).astype(dtype)  # 0 and 1 are in every vocabulary
    return Tensor(wanted.name, wanted.datatype, data)


def _tiled(inputs: tuple[Tensor, ...], rows: int, metadata: ModelMetadata) -> tuple[Tensor, ...]:
    if rows == 1:
        return inputs
    if not metadata.batched:
        raise ServerError(
            f"can't send batches of {rows}", why="the model takes one item at a time", mend="leave --batch out"
        )
    if 0 < metadata.max_batch_size < rows:
        raise ServerError(
            f"can't send batches of {rows}",
            why=f"the model takes up to {metadata.max_batch_size}",
            mend="give --batch less",
        )
    return tuple(Tensor(each.name, each.datatype, np.concatenate([each.data[:1]] * rows, axis=0)) for each in inputs)


def _example(metadata: ModelMetadata) -> str:
    """A shape as --shape takes it, that the model takes."""
    parts = []
    for each in metadata.inputs:
        sizes = [dim if dim > 0 else FREE for dim in each.shape]
        if metadata.batched:
            sizes[:1] = [1]
        parts.append(f"{each.name}={','.join(map(str, sizes))}")
    return "+".join(parts)


def _shapes(text: str, metadata: ModelMetadata) -> tuple[dict[str, tuple[int, ...]], float]:
    mend = f"write it as in {_example(metadata)}"
    shape, weight = weighted(text)
    found: dict[str, tuple[int, ...]] = {}
    for part in shape.split("+"):
        name, equals, dims = part.rpartition("=")
        try:
            sizes = tuple(int(dim) for dim in dims.split(","))
        except ValueError:
            sizes = ()
        if not equals and len(metadata.inputs) == 1:
            name = metadata.inputs[0].name
        if not sizes or min(sizes) < 1:
            raise ServerError(f"can't read the shape {text!r}", why=f"{dims!r} is none", mend=mend)
        found[name] = sizes
    for each in metadata.inputs:
        sizes = found.get(each.name, tuple(max(dim, 1) for dim in each.shape))
        fits = len(sizes) == len(each.shape) and all(
            dim in (-1, size) for dim, size in zip(each.shape, sizes, strict=True)
        )
        if not fits:
            raise ServerError(f"can't send the shape {text!r}", why=f"the model takes {each}", mend=mend)
        found[each.name] = sizes
    if odd := found.keys() - {each.name for each in metadata.inputs}:
        raise ServerError(f"can't send the shape {text!r}", why=f"there is no input {odd.pop()!r}", mend=mend)
    return found, weight
