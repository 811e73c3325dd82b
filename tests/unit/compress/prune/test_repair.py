"""What pruning costs comes back from unlabelled data, or nothing is changed, and the report says so."""

from __future__ import annotations

import copy
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from compress.data.dataset import Dataset
from compress.model import Lost, TorchModel, call
from compress.model.drawn import drawn_inputs, indices_of
from compress.prune.prune_channels import PruneChannels
from compress.prune.repair.columns import columns_of, fits, outputs_of, put_weights, weights_of
from compress.prune.repair.judge import Judge
from compress.prune.repair.moments import Moments, solved
from compress.prune.repair.samples import Samples
from compress.prune.repair.walk import Shelf, Walk, traced
from compress.prune.repair_channels import RepairChannels
from tests.families import FAMILIES, family
from tests.modern_networks import Translator
from tests.unit.compress.prune.test_prune_channels import loaded, quiet, wrapped


def data_for(model: TorchModel, samples: int = 64, seed: int = 5) -> Dataset:
    """Random inputs that the model takes."""
    arrays = drawn_inputs(model.signature, model.signature.at(samples), indices_of(model.module, model.signature), seed)
    return Dataset("made up", {name: np.asarray(array) for name, array in arrays.items()}, None, f"seed {seed}")


LAYERS = {
    "linear": (nn.Linear(6, 5), (4, 6)),
    "linear over tokens": (nn.Linear(6, 5), (4, 7, 6)),
    "strided": (nn.Conv2d(6, 8, 3, 2, 1), (4, 6, 9, 8)),
    "dilated, padded as it is": (nn.Conv2d(6, 8, 3, padding="same", dilation=2), (4, 6, 9, 8)),
    "reflected": (nn.Conv2d(6, 8, 3, padding=1, padding_mode="reflect"), (4, 6, 9, 8)),
    "grouped": (nn.Conv2d(6, 8, 3, padding=(1, 0), groups=2), (4, 6, 9, 8)),
    "depthwise": (nn.Conv2d(6, 6, 5, padding=2, groups=6, bias=False), (4, 6, 9, 8)),
    "1-D": (nn.Conv1d(6, 8, 3, 2), (4, 6, 11)),
    "3-D": (nn.Conv3d(2, 3, (1, 3, 2)), (2, 2, 3, 5, 4)),
    "transposed": (nn.ConvTranspose2d(6, 8, 3, 2, 1, 1), (4, 6, 5, 4)),
    "transposed, grouped, dilated": (nn.ConvTranspose1d(6, 8, 3, 3, 1, 0, 2, dilation=2), (4, 6, 7)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_is_its_weights_times_its_columns(kind: str) -> None:
    layer: Any
    layer, shape = LAYERS[kind]
    x = torch.randn(shape)
    assert fits(layer, x)
    made = torch.einsum("npgc,goc->npgo", columns_of(layer, x).double(), weights_of(layer))
    bias = 0 if layer.bias is None else layer.bias.detach().view(made.shape[2:])
    torch.testing.assert_close(made + bias, outputs_of(layer, layer(x).detach()).double(), rtol=1e-5, atol=1e-5)
    again = copy.deepcopy(layer)
    put_weights(again, 2 * weights_of(layer))
    torch.testing.assert_close(again.weight, 2 * layer.weight)


def test_moments_tell_the_error_of_any_weights_as_the_rows_themselves_do() -> None:
    x, t = torch.randn(500, 2, 5) * 3 + 40, torch.randn(500, 2, 4) - 7
    moments = Moments()
    for part in range(0, 500, 120):
        moments.add(x[part : part + 120], t[part : part + 120])
    weights, bias = torch.randn(2, 4, 5).double(), torch.randn(2, 4).double()
    left = torch.einsum("rgc,goc->rgo", x.double(), weights) + bias - t
    assert moments.error(weights, bias) == pytest.approx(float(left.square().sum()), rel=1e-6)
    found = solved(moments, weights, 1e-9, intercept=True)
    assert found is not None
    exact = torch.linalg.lstsq(torch.cat([x[:, 0], torch.ones(500, 1)], 1).double(), t[:, 0].double()).solution
    torch.testing.assert_close(found.weights[0], exact[:-1].T, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(1, 6), st.booleans())
def test_channels_that_others_stand_in_for_exactly_cost_nothing(seed: int, keep: int, more: int, images: bool) -> None:
    """A linear network whose dropped channels are combinations of those that are kept gives what it gave."""
    torch.manual_seed(seed)
    width = keep + more
    made: list[Any] = (
        [nn.Conv2d(8, width, 1), nn.Conv2d(width, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 16, 3)]
        if images
        else [nn.Linear(8, width), nn.Linear(width, 6), nn.Linear(6, 3)]
    )
    module = nn.Sequential(*made).eval()
    first: Any = module[0]
    with torch.no_grad():
        mixed = torch.randn(more, keep)
        first.weight[keep:] = torch.einsum("mk,k...->m...", mixed, first.weight[:keep])
        first.bias[keep:] = mixed @ first.bias[:keep] + (0.0 if images else 1.0)  # at a border there is no constant
    model = wrapped(module, "x:float32[batch,8,4,4]" if images else "x:float32[batch,8]")
    gone = frozenset(range(keep, width))
    small: Any = copy.deepcopy(module)
    with torch.no_grad():
        small[0].weight, small[0].bias = (nn.Parameter(t[:keep].clone()) for t in (first.weight, first.bias))
        small[1].weight = nn.Parameter(made[1].weight[:, :keep].clone())
    lost = Lost(model, {("0", "out", 0): gone, ("1", "in", 0): gone})
    data = data_for(model, 96, seed)
    with tempfile.TemporaryDirectory() as folder:
        stage = RepairChannels(data, ridge=1e-12)
        repaired = stage.run(TorchModel(small, model.signature, lost=lost), Path(folder), quiet)
    assert isinstance(repaired.model, TorchModel)
    if not repaired.details["kept"]:  # the network is as it was without those
        assert repaired.details["error_pruned"]["mean"] < 1e-9
        return
    other = data_for(model, 50, seed + 1).inputs
    want, have = (call(one.module, model.signature.inputs, other)["output"] for one in (model, repaired.model))
    assert float((have - want).detach().abs().max()) < 1e-4 * max(1.0, float(want.detach().abs().max()))


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"two_inputs"}))
@pytest.mark.parametrize("importance", ["magnitude", "obs"])
def test_every_family_is_nearer_to_the_original_or_as_it_was(name: str, importance: str, tmp_path: Path) -> None:
    model = loaded(name, FAMILIES)
    data = data_for(model)
    prune = PruneChannels(0.375 if name in ("mlp", "recurrent") else 0.34, importance, calibration=data)  # type: ignore[arg-type]
    pruned = prune.run(model, tmp_path, quiet).model
    assert isinstance(pruned, TorchModel)
    before = copy.deepcopy(pruned.module.state_dict())
    found = RepairChannels(data).run(pruned, tmp_path, quiet)
    assert isinstance(found.model, TorchModel)
    after = pruned.module.state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items()), "the input is left as it was"
    if found.details["kept"]:
        assert found.details["error_repaired"]["mean"] < found.details["error_pruned"]["mean"]
        assert found.details["error_repaired"]["worst"] <= found.details["error_pruned"]["worst"]
        assert found.details["layers"]
    else:
        assert found.model.module is pruned.module
        assert any("not kept" in warning for warning in found.warnings)
    call(found.model.module, model.signature.inputs, data.take(slice(0, 3))[0])
    assert not list(tmp_path.glob("**/held-*"))


@pytest.mark.parametrize("name", ["residual", "inverted", "unet", "bert"])
def test_most_of_what_pruning_cost_comes_back(name: str, tmp_path: Path) -> None:
    model = loaded(name, FAMILIES)
    data = data_for(model, 128)
    pruned = PruneChannels(0.38).run(model, tmp_path, quiet).model
    found = RepairChannels(data).run(pruned, tmp_path, quiet)  # type: ignore[arg-type]
    assert found.details["error_repaired"]["mean"] < 0.7 * found.details["error_pruned"]["mean"]


def test_layers_inside_a_step_that_cannot_be_followed_are_left_alone_by_name(tmp_path: Path) -> None:
    model = wrapped(Translator(), "x:float32[batch,5,8]", "y:float32[batch,6,8]")
    pruned = PruneChannels(0.2).run(model, tmp_path, quiet).model
    found = RepairChannels(data_for(model)).run(pruned, tmp_path, quiet)  # type: ignore[arg-type]
    assert found.details["left_alone"]["both.encoder.layers.0.linear2"] == "it is inside both, which is one step"


class Hidden(nn.Module):
    """A network as torch's words have it: its mask is True where there is padding."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens, ~padding)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["attention_mask", "src_key_padding_mask", "tokens first"])
def test_padding_tells_nothing(kind: str, tmp_path: Path) -> None:
    """What stands behind the end of a text may be anything, and the fit is the same."""
    module, (tokens_spec, mask_spec) = family("bert")
    torch_s = kind == "src_key_padding_mask"
    spec = f"{kind}:bool[batch,seq]" if torch_s else mask_spec.replace("mask:", "attention_mask:")
    module = Hidden(module) if torch_s else TokensFirst() if kind == "tokens first" else module
    model = wrapped(module, tokens_spec, spec)
    pruned = PruneChannels(0.38).run(model, tmp_path, quiet).model
    random = np.random.default_rng(0)
    tokens, lengths = random.integers(0, 50, (64, 12)), random.integers(3, 10, (64, 1))
    mask = np.arange(12) < lengths
    weights = []
    for behind in (0, 7):
        given = ~mask if torch_s else mask.astype(np.int64)
        arrays = {"tokens": np.where(mask, tokens, behind).astype(np.int64), spec.partition(":")[0]: given}
        found = RepairChannels(Dataset("made up", arrays, None, str(behind))).run(pruned, tmp_path, quiet)  # type: ignore[arg-type]
        assert isinstance(found.model, TorchModel)
        names = [name for name, _ in found.model.module.named_parameters() if name.endswith("narrow.weight")]
        weights.append(found.model.module.get_parameter(names[0]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)


class TokensFirst(nn.Module):
    """A feed-forward over [tokens, samples, width], whose answers lie so, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.wide, self.narrow = nn.Embedding(50, 16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).transpose(0, 1)
        x = x * mask.t()[:, :, None].to(x.dtype)
        return self.narrow(self.wide(x).relu()) * mask.t()[:, :, None].to(x.dtype)  # type: ignore[no-any-return]


def test_answers_with_tokens_first_are_judged_by_sample(tmp_path: Path) -> None:
    """33 samples that judge are two batches of unlike sizes; one of the samples is far worse than its tokens are."""
    model = wrapped(TokensFirst(), "tokens:int64[batch,12]", "attention_mask:int64[batch,12]")
    random = np.random.default_rng(0)
    arrays = {"tokens": random.integers(1, 50, (264, 12)), "attention_mask": np.ones((264, 12), np.int64)}
    samples = Samples(Dataset("made up", arrays, None, "0"), model.module, model.signature)
    judge = Judge(model, samples)
    odd: Any = copy.deepcopy(model.module)
    with torch.no_grad():
        odd.embed.weight[int(arrays["tokens"][7, 0])] += 5.0
        tokens, mask = (torch.as_tensor(arrays[name][7::8]) for name in ("tokens", "attention_mask"))
        want, have = (each(tokens, mask).transpose(0, 1).double().flatten(1) for each in (model.module, odd))
    errors = (have - want).square().sum(1) / (want - want.mean(0)).square().sum(1).mean()
    assert judge.apart(odd).mean == pytest.approx(float(errors.mean()), rel=1e-4)
    assert judge.apart(odd).worst == pytest.approx(float(errors.max()), rel=1e-4)


@pytest.mark.parametrize(
    ("value", "told"),
    [(0.0, "never vary"), (3.0, "never vary"), (1e25, "too large to be squared"), (np.inf, "not finite"),
     (np.nan, "not finite")],
)  # fmt: skip
def test_data_that_can_repair_nothing_is_told_by_what_is_wrong_with_it(value: float, told: str, tmp_path: Path) -> None:
    model = loaded("residual")
    pruned = PruneChannels(0.5).run(model, tmp_path, quiet).model
    image = data_for(model, 32).inputs["image"][:] * value if value == 1e25 else np.full((32, 3, 16, 16), value)
    data = Dataset("made up", {"image": image.astype(np.float32)}, None, "odd")
    found = RepairChannels(data).run(pruned, tmp_path, quiet)  # type: ignore[arg-type]
    assert not found.details.get("kept")
    assert not found.details.get("constant")
    assert found.model.module is pruned.module  # type: ignore[union-attr]
    assert any(told in warning for warning in found.warnings), found.warnings


def test_an_output_that_never_varies_leaves_the_judging_to_the_others(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 3)
            self.still = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.b(self.a(x).relu())
            return y, y * 0 + self.still

    model = wrapped(Both().eval(), "x:float32[batch,8]")
    pruned = PruneChannels(0.5).run(model, tmp_path, quiet).model
    found = RepairChannels(data_for(model)).run(pruned, tmp_path, quiet)  # type: ignore[arg-type]
    assert found.details["kept"]
    assert 0 < found.details["error_repaired"]["mean"] < found.details["error_pruned"]["mean"] < 10


class Masks(nn.Module):
    """Scores, of which those are masked whose input is negative."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.fill = nn.Linear(8, 32), nn.Linear(32, 8), fill

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x).relu())
        return y if self.fill == 0 else y.masked_fill(x < 0, self.fill)


@pytest.mark.parametrize("fill", [-1e9, -3.4e38, -1e4])
def test_a_masks_fills_are_no_spread_that_an_error_is_a_share_of(fill: float) -> None:
    far = []
    for each in (0.0, fill):
        model = wrapped(Masks(each).eval(), "x:float32[batch,8]")
        judge = Judge(model, Samples(data_for(model), model.module, model.signature))
        other: Any = copy.deepcopy(model.module)
        with torch.no_grad():
            other.b.weight.mul_(-1)
        far.append(judge.apart(other).mean)
        assert not judge.untold
    assert far[1] == pytest.approx(far[0], rel=0.9)


def test_fewer_rows_than_columns_are_warned_of_with_what_it_costs(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 4))
    model = wrapped(module, "x:float32[batch,16]")
    pruned = PruneChannels(0.4).run(model, tmp_path, quiet).model
    found = RepairChannels(data_for(model, 24)).run(pruned, tmp_path, quiet)  # type: ignore[arg-type]
    assert any("2 (21 for " in warning and "give more samples" in warning for warning in found.warnings)


@pytest.mark.parametrize(("samples", "spared"), [(3, False), (15, False), (16, True), (24, True)])
def test_held_out_is_said_of_samples_that_were(tmp_path: Path, samples: int, spared: bool) -> None:
    module = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 4))
    model = wrapped(module, "x:float32[batch,16]")
    pruned = PruneChannels(0.4).run(model, tmp_path, quiet).model
    found = RepairChannels(data_for(model, samples)).run(pruned, tmp_path, quiet)  # type: ignore[arg-type]
    told = " ".join([found.did, *map(str, found.warnings), *found.details["left_alone"].values()])
    assert ("held out" in told) is spared
    assert ("the samples themselves" in told) is not spared
    assert any("too few to hold some out" in str(warning) for warning in found.warnings) is not spared


def test_what_was_not_pruned_is_not_repaired(tmp_path: Path) -> None:
    model = loaded("mlp")
    found = RepairChannels(data_for(model)).run(model, tmp_path, quiet)
    assert found.model is model
    assert found.did == "nothing: neither channels nor blocks went"


def test_obs_takes_the_channels_that_others_stand_in_for(tmp_path: Path) -> None:
    """Every second channel is the one before it, and larger: by its weights it would stay."""
    module: Any = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 6)).eval()
    with torch.no_grad():
        module[0].weight[1::2], module[0].bias[1::2] = 3 * module[0].weight[::2], 3 * module[0].bias[::2]
        module[2].weight[:, 1::2] *= 2
    model = wrapped(module, "x:float32[batch,8]")
    data = data_for(model, 256)
    errors = {}
    for importance in ("obs", "magnitude"):
        stage = PruneChannels(0.5, importance, round_to=1, calibration=data)
        pruned = stage.run(model, tmp_path, quiet).model
        found = RepairChannels(data).run(pruned, tmp_path, quiet)  # type: ignore[arg-type]
        errors[importance] = found.details["error_repaired"]["mean"] if found.details["kept"] else 1.0
        gone = pruned.lost.channels["0", "out", 0]  # type: ignore[union-attr]
        pairs = sum({at, at + 1} <= gone for at in range(0, 32, 2))
        assert importance != "obs" or pairs <= 1, "of each pair one is enough"
    assert errors["obs"] < 0.01


def test_a_walk_in_parts_gives_what_the_forward_gives_also_through_files(tmp_path: Path) -> None:
    module, inputs = family("unet")
    model = wrapped(module, *inputs)
    arrays = data_for(model, 3).take(slice(0, 3))[0]
    walk, shelf = Walk(traced(module, 1)), Shelf(tmp_path, limit=0)
    values = walk.begin([torch.from_numpy(arrays["image"])])
    stops = [*range(0, len(walk.order), 5), len(walk.order)]
    for start, stop in itertools.pairwise(stops):
        walk.advance(values, start, stop)
        shelf.put(0, (values,))
        (values,) = shelf.take(0)
    assert len(values) == 1, "nothing is held but the output"
    torch.testing.assert_close(next(iter(values.values())), module(torch.from_numpy(arrays["image"])))
    assert not list(tmp_path.iterdir())


class Branches(nn.Module):
    """torch.fx can't trace it: it looks at sizes, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(4, 32, 3, padding=1), nn.BatchNorm1d(32)
        self.second, self.end = nn.Conv1d(32, 32, 3, padding=1), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] != 4:
            raise ValueError("4 channels are taken")
        h = self.norm(self.first(x)).relu_()
        if x.size(-1) > 4:
            h = torch.relu(self.second(h))
        h[:, 0] = 0.5
        return self.end(h.mean(-1))  # type: ignore[no-any-return]


class DataDependent(nn.Module):
    """Neither torch.fx nor torch.export can."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.end = nn.Linear(8, 32), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.end(h * 2 if h.sum() > 0 else h)  # type: ignore[no-any-return]


def test_what_torch_fx_cannot_trace_is_repaired_by_torch_export(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = wrapped(Branches(), "x:float32[batch,4,16]")
    data = data_for(model, 128)
    pruned = PruneChannels(0.38).run(model, tmp_path, quiet).model
    assert isinstance(pruned, TorchModel)
    before = copy.deepcopy(pruned.module.state_dict())
    found = RepairChannels(data).run(pruned, tmp_path, quiet)
    assert all(torch.equal(pruned.module.state_dict()[key], tensor) for key, tensor in before.items())
    assert found.details["error_repaired"]["mean"] < 0.7 * found.details["error_pruned"]["mean"]
    assert any("torch.export gives" in warning for warning in found.warnings)
    assert isinstance(found.model, TorchModel)
    assert {"first", "norm", "second", "end"} <= dict(found.model.module.named_modules()).keys()
    assert found.model.signature == pruned.signature
    call(found.model.module, model.signature.inputs, data.take(slice(0, 5))[0])


class OneByItself(nn.Module):
    """What it does with one sample no graph of two has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.end = nn.Linear(16, 64), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.end(torch.relu(self.first(x)))
        return y * 2 if x.shape[0] == 1 else y  # type: ignore[no-any-return]


def test_what_a_forward_decides_by_sizes_it_decides_after_the_repair(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = wrapped(OneByItself(), "x:float32[batch,16]")
    data = data_for(model, 128)
    pruned = PruneChannels(0.38).run(model, tmp_path, quiet).model
    assert isinstance(pruned, TorchModel)
    found = RepairChannels(data).run(pruned, tmp_path, quiet)
    assert isinstance(found.model, TorchModel)
    assert any("torch.export gives" in warning for warning in found.warnings)
    own = found.model.module
    assert not torch.equal(own.state_dict()["end.weight"], pruned.module.state_dict()["end.weight"])
    x = torch.randn(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(own(x[:1]), 2 * own(x)[:1])


def test_what_neither_can_follow_is_told(tmp_path: Path) -> None:
    model = wrapped(DataDependent(), "x:float32[batch,8]")
    pruned = PruneChannels(0.3).run(model, tmp_path, quiet).model
    found = RepairChannels(data_for(model)).run(pruned, tmp_path, quiet)  # type: ignore[arg-type]
    assert any(warning.startswith("Nothing was repaired: can't follow") for warning in found.warnings)
