"""Representative sizes of what varies, from the data that a model is to be used on."""

from __future__ import annotations

import dataclasses

import numpy as np

from compress.data.dataset import Dataset
from compress.model import TorchModel
from compress.model.infer import proven
from compress.model.inputs import Arrays, sample_inputs
from compress.signature import Signature

__all__ = ["sized_by", "sizes_in", "typical_inputs"]


def sizes_in(data: Dataset, signature: Signature) -> dict[str, int]:
    """The size of each dimension of the inputs that varies, the batch apart; the samples of a dataset are of one."""
    return {
        dim: int(data.inputs[spec.name].shape[axis])
        for spec in signature.inputs
        for axis, dim in enumerate(spec.shape)
        if isinstance(dim, str) and dim not in signature.batches
    }


def sized_by(model: TorchModel, data: Dataset, use: str) -> TorchModel:
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
        places = [at % len(data) for at in range(batch)]
        taken = data.take(np.array(places))[0]
        if all(taken[spec.name].shape == spec.at(sizes) for spec in signature.inputs):
            return taken
    return sample_inputs(signature, batch)
