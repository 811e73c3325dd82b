"""Channels really go, as many as asked for, and the model stays usable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.model import TorchModel, call, example_inputs, infer_outputs, sample_inputs
from compress.prune.prune_channels import TOLERANCE, PruneChannels, bearable
from compress.runtime.measure import torch_macs, torch_params
from tests.families import FAMILIES, Made, family
from tests.models import ZOO, build


def loaded(name: str, zoo: dict[str, Made] = ZOO) -> TorchModel:
    module, inputs = family(name) if zoo is FAMILIES else build(name)
    return wrapped(module, *inputs)


def wrapped(module: nn.Module, *inputs: str) -> TorchModel:
    specs = tuple(TensorSpec.parse(text) for text in inputs)
    return TorchModel(module.eval(), Signature(specs, infer_outputs(module.eval(), specs)))


def quiet(_done: int, _total: int, _note: str) -> None:
    pass


@pytest.mark.parametrize("name", ["residual", "depthwise", "concat", "hourglass"])
@pytest.mark.parametrize("fraction", [0.3, 0.7])
def test_the_fraction_is_reached_and_the_outputs_keep_their_shapes(name: str, fraction: float, tmp_path: Path) -> None:
    model = loaded(name)
    before = torch_macs(model.module, model.signature), torch_params(model.module)
    given = PruneChannels(fraction).run(model, tmp_path, quiet)
    assert isinstance(given.model, TorchModel)
    after = torch_macs(given.model.module, model.signature), torch_params(given.model.module)
    assert abs(1 - after[0] / before[0] - fraction) <= TOLERANCE
    assert after[1] < before[1]
    assert given.details["macs_removed"] == pytest.approx(1 - after[0] / before[0])
    for batch in (1, 4):
        outputs = call(
            given.model.module, model.signature.inputs, example_inputs(model.signature.inputs, {"batch": batch})
        )
        for spec, tensor in zip(model.signature.outputs, outputs.values(), strict=True):
            assert tuple(tensor.shape) == spec.at({"batch": batch})


def test_the_input_is_left_as_it_was(tmp_path: Path) -> None:
    model = loaded("residual")
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    PruneChannels(0.5).run(model, tmp_path, quiet)
    after = model.module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_the_weakest_channels_go_first(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))
    with torch.no_grad():
        module.get_parameter("0.weight")[::2] *= 1e-3
        module.get_parameter("2.weight")[:, ::2] *= 1e-3
        module.get_parameter("0.bias")[::2] = 0
    strong = module.get_parameter("0.weight")[1::2].clone()
    given = PruneChannels(0.5).run(wrapped(module, "x:float32[batch,4]"), tmp_path, quiet)
    assert torch.equal(given.model.module.get_parameter("0.weight"), strong)  # type: ignore[union-attr]


def test_channel_counts_are_round_where_the_fraction_allows_it(tmp_path: Path) -> None:
    given = PruneChannels(0.7).run(loaded("residual"), tmp_path, quiet)
    rounded = given.details["round_to"]
    assert rounded >= 4
    assert all(after % rounded == 0 for name, (_, after) in given.details["channels"].items() if name != "head")


@pytest.mark.parametrize("round_to", [1, 4])
def test_channel_counts_are_multiples_of_what_was_asked_for(tmp_path: Path, round_to: int) -> None:
    given = PruneChannels(0.6, round_to=round_to).run(loaded("residual"), tmp_path, quiet)
    assert given.details["round_to"] == round_to
    assert all(after % round_to == 0 for name, (_, after) in given.details["channels"].items() if name != "head")


def test_layers_that_make_the_outputs_are_named_as_left_alone(tmp_path: Path) -> None:
    given = PruneChannels(0.5).run(loaded("residual"), tmp_path, quiet)
    assert list(given.details["left_alone"]) == ["head"]


def test_a_random_choice_depends_on_the_seed_alone(tmp_path: Path) -> None:
    def weights(seed: int) -> torch.Tensor:
        given = PruneChannels(0.5, "random", seed).run(loaded("residual"), tmp_path, quiet)
        return given.model.module.get_parameter("stem.0.weight")  # type: ignore[union-attr]

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_model_that_can_lose_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="nothing was pruned"):
        PruneChannels(0.5).run(wrapped(nn.Linear(4, 3), "x:float32[batch,4]"), tmp_path, quiet)


def test_sizes_written_into_the_forward_are_no_reason_to_give_a_broken_model(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16 * 16, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.conv(x).view(-1, 16 * 16))  # type: ignore[no-any-return]

    with pytest.raises(StageError, match="nothing was pruned"):
        PruneChannels(0.5).run(wrapped(Fixed(), "x:float32[batch,3,4,4]"), tmp_path, quiet)


def test_a_fraction_beyond_reach_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(StageError) as caught:
        PruneChannels(0.999).run(loaded("mlp"), tmp_path, quiet)
    assert "the nearest" in caught.value.why
    assert "--prune 0.88" in caught.value.mend


@pytest.mark.parametrize("fraction", [-0.1, 0.0, 1.0, 70.0])
def test_a_fraction_outside_0_to_1_is_refused_before_any_work(fraction: float) -> None:
    with pytest.raises(RecipeError, match="can't prune"):
        PruneChannels(fraction).check(loaded("mlp"))


def test_by_sensitivity_a_delicate_layer_keeps_more(tmp_path: Path) -> None:
    steep, flat = ((0.25, 20.0), (0.5, 40.0), (0.75, 80.0)), ((0.25, 0.0), (0.5, 1.0), (0.75, 2.0))
    curves = {"stem.0": flat, "b.0": flat, "a.0": flat, "down.0": flat, "c.0": steep}
    given = PruneChannels(0.4, round_to=1, curves=curves).run(loaded("residual"), tmp_path, quiet)
    channels = given.details["channels"]
    assert channels["c.0"][1] == channels["down.0"][1] > 64 * 0.8, "a group bears what its most delicate layer does"
    assert channels["a.0"][1] < 24


def test_a_sensitivity_of_layers_that_are_not_there_is_a_warning(tmp_path: Path) -> None:
    given = PruneChannels(0.5, curves={"nowhere": ((0.5, 1.0),)}).run(loaded("residual"), tmp_path, quiet)
    assert "nowhere" in given.warnings[0]


@pytest.mark.parametrize(
    ("drop", "share"), [(0.0, 0.25), (0.5, 0.375), (1.0, 0.5), (4.5, 0.625), (8.0, 0.75), (99.0, 0.75), (-1.0, 0.0)]
)
def test_between_two_shares_the_line_of_their_drops_is_followed(drop: float, share: float) -> None:
    assert bearable(((0.25, 0.0), (0.5, 1.0), (0.75, 8.0)), drop) == pytest.approx(share)


def test_locally_each_layer_loses_the_same_share(tmp_path: Path) -> None:
    given = PruneChannels(0.5, scope="local", round_to=1).run(loaded("unet", FAMILIES), tmp_path, quiet)
    shares = {after / before for name, (before, after) in given.details["channels"].items() if name != "head"}
    assert max(shares) - min(shares) < 0.07


def test_taylor_keeps_the_channels_that_the_answers_hang_on(tmp_path: Path) -> None:
    """Large weights that no answer depends on mislead the magnitude, not the gradient."""
    module = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))
    with torch.no_grad():
        module.get_parameter("0.weight")[::2] *= 10
        module.get_parameter("0.bias")[::2] = -100  # never active
        module.get_parameter("0.bias")[1::2] = 5  # always active
    strong = module.get_parameter("0.weight")[1::2].clone()
    rng = np.random.default_rng(0)
    data = Dataset("", {"x": rng.standard_normal((100, 4)).astype(np.float32)}, rng.integers(0, 3, 100), "")
    model = wrapped(module, "x:float32[batch,4]")
    by = {
        kind: PruneChannels(0.5, kind, data=data).run(model, tmp_path, quiet).model.module.get_parameter("0.weight")  # type: ignore[union-attr]
        for kind in ("magnitude", "taylor")
    }
    assert torch.equal(by["taylor"], strong)
    assert not torch.equal(by["magnitude"], strong)


@pytest.mark.parametrize("name", ["mlp", "encoder", "unet"])
def test_gradients_come_with_labels_or_without(name: str, tmp_path: Path) -> None:
    model = loaded(name, FAMILIES)
    inputs = sample_inputs(model.signature, 40)
    for labels in (None, np.arange(40) % 3):
        data = Dataset("", inputs, labels, "")
        given = PruneChannels(0.3, "taylor", data=data).run(model, tmp_path, quiet)
        assert given.details["macs_removed"] > 0.2
        assert all(parameter.grad is None for parameter in given.model.module.parameters())  # type: ignore[union-attr]


def test_taylor_without_data_is_refused() -> None:
    with pytest.raises(RecipeError, match="by taylor"):
        PruneChannels(0.5, "taylor").check(loaded("mlp"))


def test_a_network_that_gives_class_ids_alone_is_told_so(tmp_path: Path) -> None:
    class Ids(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(8, 64), nn.Linear(64, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(torch.relu(self.inner(x)))
            return scores.argmax(1)

    with pytest.raises(StageError, match="whole numbers alone") as caught:
        PruneChannels(0.3).run(wrapped(Ids(), "x:float32[batch,8]"), tmp_path, quiet)
    assert "ends in the scores" in caught.value.mend


def test_a_rounding_that_no_layer_has_the_channels_for_is_told_as_that(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="--round-to 512") as caught:
        PruneChannels(0.4, round_to=512).run(loaded("residual"), tmp_path, quiet)
    assert "--round-to" in caught.value.mend
    given = PruneChannels(0.4, round_to=int(caught.value.mend.split()[2].rstrip(","))).run(
        loaded("residual"), tmp_path, quiet
    )
    assert given.details["macs_removed"] == pytest.approx(0.4, abs=0.05)
