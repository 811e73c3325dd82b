"""Proof that a network without a block is the one in which the block adds zeros."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx, nn

from compress.artifact import Signature
from compress.data.dataset import Dataset
from compress.errors import StageError, first_line
from compress.model.infer import BATCH, elsewhere, runs_at
from compress.model.inputs import example_inputs
from compress.model.unfused import unfused
from compress.prune.blocks.without_blocks import Ends, silenced, without
from compress.prune.cut_layers import Layers
from compress.prune.prove_channels import Proof
from compress.storage.shortages import raise_shortage

__all__ = ["BlockProof"]


class BlockProof:
    """Tries networks without blocks, on a copy.

    Both have to give the very same numbers, since nothing is added where zeros were: on random inputs, on samples, and
    with weights drawn anew, as for channels; and where each dimension that varies has another size, since what is added
    may have brought its shape, which sizes of 1 hide.

    Args:
        graph: the whole, in eval mode.
        signature: of it.
        samples: what it is made for, where there is some.
    """

    def __init__(self, graph: fx.GraphModule, signature: Signature, samples: Dataset | None) -> None:
        layers = Layers(graph)
        assert isinstance(layers.module, fx.GraphModule)  # noqa: S101  a copy of one
        self._whole, self._proof = layers.module, Proof(layers, signature, samples)
        sizes = signature.at(BATCH)
        with unfused():
            other = elsewhere(runs_at(self._whole, signature.inputs), sizes, sizes)
        self._elsewhere = [example_inputs(signature.inputs, other)] if other != sizes else []

    def difference(self, ends: Ends, made: nn.Module | None = None) -> str:
        """Why the network without these blocks is not the one in which they add zeros; empty where it is.

        Args:
            ends: of the blocks.
            made: what is to be handed on, with the weights of the whole; else one is made.
        """
        try:
            silent, gone = silenced(self._whole, ends), without(self._whole, ends)
            for arrays, seed in [*self._proof.trials(thorough=True), *((each, None) for each in self._elsewhere)]:
                with torch.no_grad(), unfused(), self._proof.weights(seed):
                    wanted = self._proof.run(arrays, silent)
                    have = [self._proof.run(arrays, gone)]
                    have += [self._proof.run(arrays, made)] if made is not None and seed is None else []
                if not wanted or not all(_same(wanted, each) for each in have):
                    return "the network without it is not the one in which it adds zeros"
        except StageError as err:
            return err.why
        except Exception as err:  # whatever the forward raises
            raise_shortage(err)
            return f"the forward fails without it: {first_line(err)[:160]}"
        return ""


def _same(wanted: Sequence[torch.Tensor], have: Sequence[torch.Tensor]) -> bool:
    """Whether all numbers are, and NaN where there was NaN."""
    return len(wanted) == len(have) and all(
        one.shape == other.shape
        and one.dtype == other.dtype
        and bool(((one == other) | ((one != one) & (other != other))).all())
        for one, other in zip(wanted, have, strict=True)
    )
