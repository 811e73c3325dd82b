"""A model beside another that names the same inputs and outputs, perhaps in another order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from compress.errors import SignatureError
from compress.model import TorchModel
from compress.model.inputs import call
from compress.signature import Signature, TensorSpec

__all__ = ["InOrder", "in_order_of", "places_of"]


class InOrder(nn.Module):
    """A model that takes and gives what it does in another order; its layers keep their names in `original`.

    Args:
        model: as it is.
        inputs: for each that the model takes, its place among what is given here.
        outputs: for each that is given here, its place among what the model gives.
    """

    def __init__(self, model: TorchModel, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        super().__init__()
        self.original = model.module
        self.outputs = tuple(outputs)
        self._specs, self._inputs = model.signature.inputs, tuple(inputs)

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All outputs."""
        taken: dict[str, Any] = {spec.name: given[place] for spec, place in zip(self._specs, self._inputs, strict=True)}
        found = list(call(self.original, self._specs, taken).values())
        return tuple(found[place] for place in self.outputs)


def in_order_of(model: TorchModel, signature: Signature) -> TorchModel:
    """A model with the inputs and outputs of a signature, matched by name; by place where no name is the same.

    Raises:
        SignatureError: they don't fit.
    """
    inputs = places_of(model.signature.inputs, signature.inputs)
    outputs = places_of(signature.outputs, model.signature.outputs)
    if list(inputs) == sorted(inputs) and list(outputs) == sorted(outputs):
        return dataclasses.replace(model, signature=signature)
    return dataclasses.replace(model, module=InOrder(model, inputs, outputs), signature=signature)


def places_of(wanted: Sequence[TensorSpec], there: Sequence[TensorSpec]) -> tuple[int, ...]:
    """For each tensor of one model its place among another's: by name, or by place where the names are all others.

    What a dimension that varies is called says nothing: it has to vary in both.

    Raises:
        SignatureError: there are more or fewer, some names alone are the same, or types or shapes differ.
    """
    names = [spec.name for spec in there]
    shared = {spec.name for spec in wanted} & set(names)
    if len(wanted) != len(there) or (shared and len(shared) < len(names)):
        raise SignatureError(
            "the names don't fit",
            why=f"there are {', '.join(names)}, and {', '.join(spec.name for spec in wanted)}",
            mend="give both models the same names of inputs and outputs",
        )
    places = tuple(names.index(spec.name) for spec in wanted) if shared else tuple(range(len(names)))
    for spec, place in zip(wanted, places, strict=True):
        if not _alike(spec, there[place]):
            raise SignatureError(
                "the shapes don't fit",
                why=f"there is {there[place]}, and {spec}",
                mend="give models that take and give the same",
            )
    return places


def _alike(mine: TensorSpec, its: TensorSpec) -> bool:
    """Whether types and fixed dimensions are the same, and the same dimensions vary."""
    sizes = ([size if isinstance(size, int) else None for size in spec.shape] for spec in (mine, its))
    mine_sizes, its_sizes = sizes
    return mine.dtype == its.dtype and mine_sizes == its_sizes
