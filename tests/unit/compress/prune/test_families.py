"""Whatever family a model is of: what can go goes, what can't is named, and the rest works as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compress
from compress.errors import StageError
from compress.model import TorchModel, call, sample_inputs
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.prune.channels import Channels
from compress.prune.prune_channels import PruneChannels
from compress.runtime.measure import torch_macs
from tests.families import FAMILIES, family
from tests.unit.compress.prune.test_prune_channels import quiet, wrapped

# What each family must at least be able to lose, and what must be named as left alone.
PRUNABLE = {
    "grouped": (0.38, ()),
    "shuffle": (0.4, ("a.0",)),
    "squeeze_excite": (0.42, ()),
    "convnext": (0.4, ()),
    "unet": (0.4, ()),
    "bert": (0.4, ()),
    "gqa": (0.4, ()),
    "fused_qkv": (0.38, ()),
    "vit": (0.4, ()),
    "encoder": (0.4, ()),
    "lstm": (0.4, ()),
    "recurrent": (0.375, ()),
    "inverted": (0.4, ()),
    "two_towers": (0.38, ("label", "box")),
}


def as_loaded(name: str, folder: Path) -> TorchModel:
    """Through a file, as a user's model comes."""
    module, inputs = family(name)
    return compress.load(compress.save(module, folder / "model.pt", inputs=list(inputs)))


@pytest.mark.parametrize("name", PRUNABLE)
def test_a_family_is_pruned_and_exported(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = as_loaded(name, tmp_path)
    fraction, left_alone = PRUNABLE[name]
    given = PruneChannels(fraction).run(model, tmp_path, quiet)
    assert isinstance(given.model, TorchModel)
    assert torch_macs(given.model.module, model.signature) < (1 - fraction + 0.03) * torch_macs(
        model.module, model.signature
    )
    assert set(left_alone) <= set(given.details["left_alone"])
    assert all(given.details["left_alone"].values()), "each with a reason"
    assert "head" in given.details["left_alone"] or name == "two_towers"
    exported = OnnxFromTorch().run(given.model, tmp_path, quiet)
    assert set(exported.details["parity"]) == {"1", "2", "5"}
    assert capfd.readouterr().err == "", "what was tried in vain is told in the report, not on the terminal"


@pytest.mark.parametrize("name", ["two_inputs"])
def test_a_model_of_which_nothing_can_go_says_why(name: str, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="nothing was pruned") as caught:
        PruneChannels(0.4).run(as_loaded(name, tmp_path), tmp_path, quiet)
    assert "left alone: " in caught.value.why


PLAIN = (
    "residual",
    "depthwise",
    "concat",
    "hourglass",
    "grouped",
    "squeeze_excite",
    "unet",
    "inverted",
    "two_towers",
    "lstm",
)


@pytest.mark.parametrize("name", PLAIN)
def test_removing_channels_that_are_zero_changes_nothing(name: str) -> None:
    """The law that proves the coupling: through additions, concatenations, groups, gates and flattening."""
    module, inputs = family(name)
    model = wrapped(module, *inputs)
    channels = Channels(model)
    arrays = sample_inputs(model.signature, 3)
    for group in channels.groups:
        if isinstance(model.module.get_submodule(group.root), nn.RNNBase):
            continue  # its units are read inside, too: test_hidden_units.py
        units = range(0, group.units, 4)
        silent = copy.deepcopy(model.module)
        for layer in group.layers:
            made_by(silent, layer).register_forward_hook(silencing(group.channels(units)))
        expected = call(silent, model.signature.inputs, arrays)
        with channels.without({group.root: units}) as pruned:
            got = call(pruned, model.signature.inputs, arrays)
        for output, tensor in expected.items():
            torch.testing.assert_close(got[output], tensor, rtol=1e-4, atol=1e-5)


def made_by(module: nn.Module, layer: str) -> nn.Module:
    """Where a layer's channels are made: the layer, or the batch normalization right after it."""
    prefix, _, index = layer.rpartition(".")
    if index.isdigit():
        after = dict(module.named_modules()).get(f"{prefix}.{int(index) + 1}")
        if isinstance(after, nn.BatchNorm2d):
            return after
    return module.get_submodule(layer)


def silencing(at: list[int]) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
    def hook(layer: nn.Module, _given: Any, output: torch.Tensor) -> torch.Tensor:
        return output.index_fill(-1 if isinstance(layer, nn.Linear) else 1, torch.tensor(at), 0.0)

    return hook


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"two_inputs"}))
def test_a_model_that_lost_channels_for_a_while_is_as_it_was(name: str) -> None:
    module, inputs = family(name)
    channels = Channels(wrapped(module, *inputs))
    before = copy.deepcopy(channels.module.state_dict())
    shape = repr(channels.module)
    for group in channels.groups * 2:
        with channels.without({group.root: range(0, group.units, 2)}) as pruned:
            assert repr(pruned) != shape
        assert repr(channels.module) == shape
    after = channels.module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_coupling_that_the_graph_gets_wrong_is_found_by_trying() -> None:
    """The channels are interleaved between two grouped convolutions: shapes alone would not tell."""
    module, inputs = family("shuffle")
    channels = Channels(wrapped(module, *inputs))
    assert "a.0" not in {layer for group in channels.groups for layer in group.layers}
    assert "counted or mixed" in channels.left_alone["a.0"]
