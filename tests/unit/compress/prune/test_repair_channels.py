"""What pruning costs comes back from unlabelled samples, or the network stays as pruning made it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import compress
from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.errors import RecipeError
from compress.model import Lost, TorchModel, infer_outputs, sample_inputs
from compress.prune.prune_channels import PruneChannels
from compress.prune.repair_channels import RepairChannels
from tests.families import FAMILIES, family


def quiet(_done: int, _total: int, _note: str) -> None:
    pass


def of_family(name: str) -> TorchModel:
    module, inputs = family(name)
    specs = tuple(TensorSpec.parse(text) for text in inputs)
    return TorchModel(module, Signature(specs, infer_outputs(module, specs)))


def typical(model: TorchModel, samples: int = 64) -> Dataset:
    return Dataset("", sample_inputs(model.signature, samples), None, "typical")


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), kept=st.integers(2, 6), more=st.integers(1, 5))
def test_channels_that_follow_from_those_that_stay_are_made_up_for_exactly(
    tmp_path_factory: pytest.TempPathFactory, seed: int, kept: int, more: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = nn.Sequential(nn.Linear(8, kept + more), nn.Linear(kept + more, 3)).eval()
    with torch.no_grad():
        for tensor in whole.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        mixed = torch.randn(more, kept, generator=generator)
        whole[0].weight[kept:] = mixed @ whole[0].weight[:kept]  # type: ignore[index, operator]
        whole[0].bias[kept:] = mixed @ whole[0].bias[:kept]  # type: ignore[index, operator]
        cut = nn.Sequential(nn.Linear(8, kept), nn.Linear(kept, 3)).eval()
        cut[0].load_state_dict({name: tensor[:kept] for name, tensor in whole[0].state_dict().items()})
        cut[1].weight.copy_(whole[1].weight[:, :kept])  # type: ignore[operator, index]
        cut[1].bias.copy_(whole[1].bias)  # type: ignore[operator, arg-type]
    specs = (TensorSpec.parse("x:float32[batch,8]"),)
    signature = Signature(specs, infer_outputs(whole, specs))
    gone = frozenset(range(kept, kept + more))
    lost = Lost(TorchModel(whole, signature), {("0", "out", 0): gone, ("1", "in", 0): gone})
    x = np.random.default_rng(seed).standard_normal((256, 8)).astype(np.float32)
    stage = RepairChannels(Dataset("", {"x": x}, None, ""), ridge=0)
    told = stage.run(TorchModel(cut, signature, lost=lost), tmp_path_factory.mktemp("work"), quiet)
    assert isinstance(told.model, TorchModel)
    with torch.no_grad():
        wanted, have = whole(torch.from_numpy(x)), told.model.module(torch.from_numpy(x))
    assert float((wanted - have).abs().max()) <= 1e-4 * float(wanted.abs().max())


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"recurrent", "two_inputs"}))  # no channel of these can go
def test_a_network_of_any_family_comes_nearer_to_the_original_or_stays(name: str, tmp_path: Path) -> None:
    model = of_family(name)
    pruned = PruneChannels({"squeeze_excite": 0.277}.get(name, 0.3)).run(model, tmp_path, quiet).model
    assert isinstance(pruned, TorchModel)
    before = {key: tensor.clone() for key, tensor in pruned.module.state_dict().items()}
    told = RepairChannels(typical(model)).run(pruned, tmp_path, quiet)
    assert isinstance(told.model, TorchModel)
    assert all(torch.equal(pruned.module.state_dict()[key], tensor) for key, tensor in before.items())
    after = told.model.module.state_dict()
    if told.details.get("kept"):
        assert told.details["error_repaired"]["mean"] < told.details["error_pruned"]["mean"]
        assert told.details["error_repaired"]["worst"] <= told.details["error_pruned"]["worst"]
    else:
        assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
        assert told.warnings or told.did.startswith("nothing")


@pytest.mark.parametrize("name", ["residual", "depthwise", "concat", "grouped", "bert"])
def test_the_usual_families_are_repaired(name: str, tmp_path: Path) -> None:
    model = of_family(name)
    pruned = PruneChannels(0.3).run(model, tmp_path, quiet).model
    assert isinstance(pruned, TorchModel)
    told = RepairChannels(typical(model, 256)).run(pruned, tmp_path, quiet)
    assert told.details["kept"], told.warnings
    assert told.details["error_repaired"]["mean"] < 0.7 * told.details["error_pruned"]["mean"]


def test_channels_chosen_by_obs_lie_nearer_after_the_repair_than_those_chosen_at_random(tmp_path: Path) -> None:
    model = of_family("mlp")
    data = typical(model, 256)
    apart = {}
    for importance in ("obs", "random"):
        cut = PruneChannels(0.375, importance, calibration=data).run(model, tmp_path, quiet).model
        assert isinstance(cut, TorchModel)
        apart[importance] = RepairChannels(data).run(cut, tmp_path, quiet).details["error_repaired"]["mean"]
    assert apart["obs"] < apart["random"]


def test_nothing_is_repaired_where_nothing_went(tmp_path: Path) -> None:
    model = of_family("mlp")
    told = RepairChannels(typical(model)).run(model, tmp_path, quiet)
    assert told.model is model


@pytest.fixture
def files(tmp_path: Path) -> Path:
    module, inputs = family("mlp")
    compress.save(module, tmp_path / "model.pt", inputs=inputs)
    x = np.random.default_rng(0).standard_normal((96, *module_shape(inputs))).astype(np.float32)
    np.savez(tmp_path / "typical.npz", x=x)
    return tmp_path


def module_shape(inputs: tuple[str, ...]) -> tuple[int, ...]:
    return TensorSpec.parse(inputs[0]).at({"batch": 1})[1:]


@pytest.mark.parametrize(("repair", "repaired"), [(None, True), (False, False)])
def test_an_export_repairs_by_default_where_there_is_calibration_data(
    files: Path, repair: bool | None, repaired: bool
) -> None:
    options = compress.ExportOptions(
        output=files / "out", prune=0.375, calibration=str(files / "typical.npz"), int8="static", repair=repair
    )
    _, report = compress.export(files / "model.pt", options)
    assert ("repair_channels" in [row.stage for row in report.stages]) is repaired


def test_obs_without_the_repair_is_refused(files: Path) -> None:
    options = compress.ExportOptions(
        output=files / "out", prune=0.4, calibration=str(files / "typical.npz"), int8="static", importance="obs",
        repair=False,
    )  # fmt: skip
    with pytest.raises(RecipeError, match="can't choose channels by obs without the repair"):
        compress.export(files / "model.pt", options)
