"""A pruned network computes what the whole one does with the same channels silent, whatever it is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from compress.artifact import Signature, TensorSpec
from compress.errors import StageError
from compress.measure import torch_params
from compress.model import TorchModel, infer_outputs
from compress.stages.prune_channels import PruneChannels
from tests.pruning_oracle import distinct, embedded
from tests.random_networks import IMAGES, TOKENS, OfImages, OfTokens, networks


def double(module: nn.Module, text: str) -> TorchModel:
    """A model in double precision, every weight of it a number of its own."""
    spec = TensorSpec.parse(text.replace("float32", "float64"))
    module = distinct(module)
    return TorchModel(module, Signature((spec,), infer_outputs(module, (spec,))))


def inputs_of(model: TorchModel, seed: int) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    specs = model.signature.inputs
    return [
        torch.as_tensor(
            rng.standard_normal(spec.fixed(3)) if spec.dtype.startswith("f") else rng.integers(0, 40, spec.fixed(3))
        )
        for spec in specs
    ]


def check(model: TorchModel, fraction: float, **options: Any) -> None:
    try:
        given = PruneChannels(fraction, **options).run(model, None, lambda *_: None)  # type: ignore[arg-type]
    except StageError:
        return  # nothing is wrong that is not given
    pruned = given.model
    assert isinstance(pruned, TorchModel)
    assert torch_params(pruned.module) < torch_params(model.module)
    assert ties(pruned.module) == ties(model.module)
    reference = embedded(model.module, pruned.module)
    for seed in (10, 11):
        inputs = inputs_of(model, seed)
        with torch.no_grad():
            have, want = pruned.module(*inputs), reference(*inputs)
        assert float((have - want).abs().max()) <= 1e-9 * float(want.abs().max()), given.details


def ties(module: nn.Module) -> set[frozenset[str]]:
    by_id: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), set()).add(name)
    return {frozenset(names) for names in by_id.values()}


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(networks(), st.sampled_from((0.15, 0.3, 0.5)), st.sampled_from((None, 1)), st.sampled_from(("magnitude", "random")))
def test_a_network_of_any_blocks(drawn: tuple[nn.Module, str], fraction: float, round_to: int, importance: str) -> None:
    check(double(*drawn), fraction, round_to=round_to, importance=importance)
