"""What a hook's annotations say about Triton's tensors."""

from __future__ import annotations

import keyword
import re
import typing
from collections import Counter
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np

from compress.artifact import Signature, TensorSpec
from compress.errors import SignatureError
from serve.config.model_config import TRITON_TYPE_OF, DataType

__all__ = ["HookTensor", "item_shape", "of_annotation", "of_spec", "outputs_of"]

SCALARS: dict[Any, DataType] = {
    bytes: "TYPE_STRING", str: "TYPE_STRING", int: "TYPE_INT64", float: "TYPE_FP32", bool: "TYPE_BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class HookTensor:
    """One argument or result of a hook, for one item.

    Attributes:
        name: of the argument, or of the result.
        data_type: Triton's.
        dims: the item's shape without the batch, -1 for a dimension that varies; () for a bare number of a network.
        kind: how a value becomes a tensor, see serve.hooks.packed.values.
        tensor: the network's name for it, where it is the network's.
        batchwise: whether the annotation speaks of a whole batch.
    """

    name: str
    data_type: DataType
    dims: tuple[int, ...]
    kind: str
    tensor: str = ""
    batchwise: bool = False


BATCH = "batch"


def of_annotation(name: str, annotation: Any) -> HookTensor:
    """The tensor that an annotation describes.

    bytes and str are TYPE_STRING, int is TYPE_INT64, float is TYPE_FP32, bool is TYPE_BOOL, numpy's scalar types are
    their own, each with dims [1]; Annotated[np.ndarray, "uint8[28,28]"] is an array of that dtype and shape, where a
    name stands for a dimension that varies. list[bytes] and its like, and an array whose first dimension is named
    "batch", are those of a whole batch.

    Raises:
        SignatureError: it says nothing about a tensor.
    """
    if isinstance(annotation, type) and annotation in SCALARS:
        return HookTensor(name, SCALARS[annotation], (1,), annotation.__name__)
    if isinstance(annotation, type) and issubclass(annotation, np.generic):
        dtype = np.dtype(annotation).name
        if dtype in TRITON_TYPE_OF:
            return HookTensor(name, TRITON_TYPE_OF[dtype], (1,), "scalar")
    if typing.get_origin(annotation) is list and len(typing.get_args(annotation)) == 1:
        inner = of_annotation(name, typing.get_args(annotation)[0])
        if not inner.batchwise:
            return replace(inner, batchwise=True)
    if typing.get_origin(annotation) is Annotated:
        text = next((item for item in annotation.__metadata__ if isinstance(item, str)), None)
        if text is not None:
            spec = TensorSpec.parse(f"{name}:{text}")
            whole = spec.shape[:1] == (BATCH,)
            shape = spec.shape[1:] if whole else spec.shape
            if shape or whole:
                return HookTensor(name, TRITON_TYPE_OF[spec.dtype], _dims(shape), "array", batchwise=whole)
    if annotation is dict or typing.get_origin(annotation) is dict or typing.is_typeddict(annotation):
        raise SignatureError(
            f"{name!r} is annotated as {getattr(annotation, '__name__', annotation)}",
            why="a dict does not say which tensors it holds",
            mend="write a class: `class Answer(NamedTuple):`, with `label: str` and `score: float` below it, and give "
            "`-> Answer`; each field becomes a tensor",
        )
    raise SignatureError(
        f"{name!r} is annotated as {getattr(annotation, '__name__', annotation)}",
        why="that does not say which tensor it is",
        mend='annotate it as bytes, str, int, float, bool, a numpy scalar, or Annotated[np.ndarray, "uint8[28,28]"]',
    )


def item_shape(spec: TensorSpec, *, batched: bool) -> tuple[int | str, ...]:
    """The shape of one item of a network's tensor: without the batch when there is one."""
    return spec.shape[1:] if batched else spec.shape


def of_spec(name: str, spec: TensorSpec, *, batched: bool) -> HookTensor:
    """A tensor of the network, as a hook sees it: one item, without the batch when there is one."""
    return HookTensor(name, TRITON_TYPE_OF[spec.dtype], _dims(item_shape(spec, batched=batched)), "array", spec.name)


def outputs_of(signature: Signature) -> tuple[HookTensor, ...]:
    """The network's outputs under the names that postprocess knows them by, each its own.

    What is no Python name has an underscore for each character that is none, and one behind a keyword. Where two come
    to one name, neither has it: they are numbered by their places among the outputs, as in a_b_0 and a_b_1.
    """
    plain = [re.sub(r"\W", "_", spec.name) for spec in signature.outputs]
    plain = [f"{name}_" if keyword.iskeyword(name) else name for name in plain]
    count = Counter(plain)
    taken = {name for name in plain if count[name] == 1}
    found = []
    for number, (name, spec) in enumerate(zip(plain, signature.outputs, strict=True)):
        own = name if count[name] == 1 else f"{name}_{number}"
        while count[name] > 1 and own in taken:
            own += "_"
        taken.add(own)
        found.append(of_spec(own, spec, batched=signature.batched))
    return tuple(found)


def _dims(shape: tuple[int | str, ...]) -> tuple[int, ...]:
    return tuple(-1 if isinstance(dim, str) else dim for dim in shape)
