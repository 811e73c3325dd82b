"""Representative sizes of what varies, from the data that a model is to be used on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from compress.data.dataset import Dataset
from compress.errors import RecipeError
from compress.model import OnnxModel, TorchModel
from compress.model.infer import proven
from compress.model.inputs import Arrays, sample_inputs
from compress.signature import Signature

__all__ = ["batches_of", "call_size", "samples_of", "sized_by", "sizes_in", "typical_inputs"]


def sizes_in(data: Dataset, signature: Signature) -> dict[str, int]:
    """The size of each dimension of the inputs that varies, the batch apart; the samples of a dataset are of one."""
    return {
        dim: int(data.inputs[spec.name].shape[axis])
        for spec in signature.inputs
        for axis, dim in enumerate(spec.shape)
        if isinstance(dim, str) and dim not in signature.batches
    }


def batches_of(signature: Signature, asked: Sequence[int]) -> tuple[int, ...]:
    """The batch sizes that are asked for; where the number of samples is fixed, the one that there is.

    That is what all inputs and outputs begin with; where these begin otherwise, a call is one sample.

    Raises:
        RecipeError: another is asked for than the model takes.
    """
    if signature.batches:
        return tuple(asked)
    leading = {spec.shape[0] if spec.shape else 1 for spec in (*signature.inputs, *signature.outputs)}
    first = leading.pop() if len(leading) == 1 else 1
    only = first if isinstance(first, int) else 1
    if wrong := [batch for batch in asked if batch not in (1, only)]:
        raise RecipeError(
            f"can't measure at batch {wrong[0]}",
            why=f"the sizes of {', '.join(map(str, signature.inputs))} are fixed: each call takes them",
            mend="leave --batches out, or give the model an input whose batch varies",
        )
    return (only,)


def call_size(signature: Signature) -> int:
    """The samples of one call as it is timed: 1, or what a model whose number of samples is fixed takes."""
    (size,) = batches_of(signature, (1,))
    return size


def samples_of(signature: Signature, batch: int) -> int:
    """The samples of the call that stands for so many: as many, or what a model whose number is fixed takes."""
    return batch if signature.batches else call_size(signature)


_Model = TypeVar("_Model", bound=TorchModel | OnnxModel)


def sized_by(model: _Model, data: Dataset, use: str) -> _Model:
    """A model whose sizes are those of the data, where neither user nor file gave one.

    Args:
        model: is left as it is.
        data: fits its inputs.
        use: what it is for, as "calibration".

    Raises:
        SignatureError: the model does not run at these sizes.
    """
    found = {dim: size for dim, size in sizes_in(data, model.signature).items() if dim in model.signature.unsaid}
    if not found:
        return model
    signature = model.signature.sized(found, f"from the {use} data")
    return dataclasses.replace(model, signature=proven(model.module, signature))


def typical_inputs(signature: Signature, data: Dataset | None, batch: int) -> Arrays:
    """So many inputs of representative sizes: samples of the data where it has these sizes, else random ones.

    Args:
        signature: of the model.
        data: fits its inputs; is taken from the first again where it has too few samples.
        batch: samples.
    """
    sizes = signature.at(batch)
    if data is not None:
        places = [at % len(data) for at in range(data.whole(batch))]
        taken = data.take(np.array(places))[0]
        if all(taken[spec.name].shape == spec.at(sizes) for spec in signature.inputs):
            return taken
    return sample_inputs(signature, batch)
