"""Along which dimension of an output a softmax's shares lie, whatever the network has moved since."""

from __future__ import annotations

import torch

from compress.model import TorchModel, call, sample_inputs

__all__ = ["distribution_axis"]

ROUNDED = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
TOLERANCE = 1e-4
"""Of a sum that is one: shares of other dimensions that are nearly even must not pass for it."""


def distribution_axis(model: TorchModel, index: int, usual: int, *, logarithms: bool = False) -> int | None:
    """Where shares are that sum to one: a view or a permutation after the softmax may have put them anywhere, or apart.

    It is looked at in answers to samples made up, which hold for every way of moving values. None where there is no
    such dimension; where the model can't be run, too, unless its output has one dimension beside the batch.

    Args:
        model: whose output ends in a softmax.
        index: of the output, by order.
        usual: the dimension to take where several fit, or none can be seen.
        logarithms: whether the output has the shares' logarithms.
    """
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            inputs = sample_inputs(model.signature, 1 if model.signature.singly else 2)
            output = list(call(model.module, model.signature.inputs, inputs).values())[index]
    except Exception:  # the user's forward: anything may come out of it
        return usual if len(model.signature.outputs[index].shape) == 2 else None
    shares, off = output.double().exp() if logarithms else output.double(), ROUNDED.get(output.dtype, TOLERANCE)
    sums = {axis: shares.sum(axis) for axis in range(1, shares.ndim)}
    fits = [axis for axis, found in sums.items() if bool(((found - 1).abs() < off).all())]
    return usual if usual % shares.ndim in fits else next(iter(fits), None)
