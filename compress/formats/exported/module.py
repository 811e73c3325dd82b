"""A module as layers and functions by way of torch.export, where torch.fx can't follow its forward."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import warnings
from collections.abc import Iterator

import torch
from torch.export import Dim

from compress.errors import first_line
from compress.formats.exported.layers import NoLayersError, layered
from compress.model import TorchModel, call, sample_inputs
from compress.model.apart import share_of_own_size
from compress.model.inputs import as_bound

__all__ = ["as_layers"]

BATCH, OTHER_BATCH = 2, 3
APART = 1e-4


def as_layers(model: TorchModel) -> TorchModel:
    """The same model as a graph of its layers, under their names and with their very parameters.

    torch.export takes branches on sizes, and what is done in place, that torch.fx does not. What was decided by a size
    is as it was at the model's representative ones.

    Args:
        model: in eval mode.

    Raises:
        NoLayersError: torch.export can't follow it either, or the graph has no form of layers or answers otherwise.
    """
    specs = model.signature.inputs
    arrays = sample_inputs(model.signature, BATCH)
    args = tuple(torch.as_tensor(arrays[spec.name]) for spec in specs)
    shapes = tuple({axis: Dim.DYNAMIC for axis, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in specs)
    try:
        with torch.no_grad(), _quiet():
            program = torch.export.export(
                model.module, args, dynamic_shapes=as_bound(model.module, shapes), strict=False
            )
            found = layered(program)
            for batch in (BATCH, *([] if model.signature.singly else [OTHER_BATCH])):
                tried = sample_inputs(model.signature, batch, seed=1)
                wanted, given = call(model.module, specs, tried), call(found, specs, tried)
                for (name, want), have in zip(wanted.items(), given.values(), strict=True):
                    if (
                        want.shape != have.shape
                        or share_of_own_size(want.double().numpy(), have.double().numpy()) > APART
                    ):
                        raise NoLayersError(f"what torch.export gives answers otherwise: {name!r}")
    except NoLayersError:
        raise
    except Exception as err:  # the user's forward: anything may come out of it
        raise NoLayersError(f"torch.export can't follow it: {first_line(err)[:200]}") from err
    return dataclasses.replace(model, module=found)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.export tells of itself, and torch.fx prints what fails."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
