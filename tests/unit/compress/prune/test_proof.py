"""A pruned network computes what the whole one does with the same channels silent, whatever it is made of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import given as given_by
from hypothesis import strategies as st
from torch import nn

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.model import Arrays, TorchModel, call, infer_outputs
from compress.prune.channels import Channels
from compress.prune.choose_channels import MOST, chosen
from compress.prune.cut_layers import Layers
from compress.prune.follow_channels import ChannelGroup
from compress.prune.importance import squared_changes
from compress.prune.prove_channels import Proof
from compress.prune.prune_channels import PruneChannels
from compress.prune.prune_to_budget import PruneToBudget
from compress.runtime.measure import torch_params
from tests.modern_networks import MODERN
from tests.pruning_oracle import distinct, embedded
from tests.random_networks import Block, Free, OfImages, OfTokens, conv, networks
from tests.unit.compress.prune.test_prune_channels import wrapped


def double(module: nn.Module, *texts: str) -> TorchModel:
    """A model in double precision, every weight of it a number of its own."""
    specs = tuple(TensorSpec.parse(text.replace("float32", "float64")) for text in texts)
    module = distinct(module)
    return TorchModel(module, Signature(specs, infer_outputs(module, specs)))


def inputs_of(model: TorchModel, seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    sizes = model.signature.at(3)
    return {
        spec.name: rng.standard_normal(spec.at(sizes)) if spec.dtype[0] == "f" else rng.integers(0, 40, spec.at(sizes))
        for spec in model.signature.inputs
    }


def check(model: TorchModel, fraction: float, **options: Any) -> Mapping[str, Any]:
    """Prune, and compare with what the oracle says; nothing is wrong that is not given."""
    try:
        given = PruneChannels(fraction, **options).run(model, Path(), lambda *_: None)
    except StageError:
        return {}
    pruned, specs = given.model, model.signature.inputs
    assert isinstance(pruned, TorchModel)
    assert torch_params(pruned.module) < torch_params(model.module)
    assert ties(pruned.module) == ties(model.module)
    reference = embedded(model.module, pruned.module)
    torch.backends.mha.set_fastpath_enabled(False)  # it goes past the layers inside
    try:
        with torch.no_grad():
            for seed in (10, 11):
                have, want = (call(module, specs, inputs_of(model, seed)) for module in (pruned.module, reference))
                for name, tensor in want.items():
                    assert float((have[name] - tensor).abs().max()) <= 3e-5 * float(tensor.abs().max()), given.details
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    return given.details


def ties(module: nn.Module) -> set[frozenset[str]]:
    by_id: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), set()).add(name)
    return {frozenset(names) for names in by_id.values()}


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given_by(
    networks(), st.sampled_from((0.15, 0.3, 0.5)), st.sampled_from((None, 1)), st.sampled_from(("magnitude", "random"))
)
def test_a_network_of_any_blocks(drawn: tuple[nn.Module, str], fraction: float, round_to: int, importance: str) -> None:
    check(double(*drawn), fraction, round_to=round_to, importance=importance)


@pytest.mark.parametrize("name", MODERN)
def test_what_torch_pruning_can_not_follow_is_named_and_the_rest_is_pruned(name: str) -> None:
    make, inputs, expected = MODERN[name]
    details = check(double(make(), *inputs), 0.2)
    assert details["macs_removed"] == pytest.approx(0.2, abs=0.02)
    assert set(expected["left"]) <= set(details["left_alone"])
    assert all(details["left_alone"].values()), "each with a reason"


def convolutions(width: int, **more: nn.Module) -> dict[str, nn.Module]:
    return {name: nn.Conv2d(width, width, 3, padding=1) for name in "ab"} | more


# What has to be left alone, since its channels are mixed, counted or moved on the way: by name.
LEFT_ALONE: dict[str, tuple[str, ...]] = {
    "channel mean": ("blocks.0.a.0",),
    "channel softmax": ("stem.0",),
    "flip": ("stem.0",),
    "roll": ("stem.0",),
    "shuffle": ("blocks.0.a.0",),
    "shuffle residual": ("stem.0",),
    "every second": ("stem.0",),
    "split": ("blocks.0.a.0",),
    "maxout": ("blocks.0.a",),
    "pixel shuffle": ("blocks.0.a",),
    "multiplied": ("stem.0",),
    "tied": ("stem.0", "blocks.0.a", "blocks.0.b"),
}
# What can lose channels, and how many units there are to choose from.
CAN_GO: dict[str, dict[str, int]] = {
    "residual": {"stem.0": 16, "blocks.0.a.0": 32},
    "concat": {"stem.0": 16, "blocks.0.a.0": 16, "blocks.0.b.0": 16},
    "grouped twice": {"stem.0": 8, "blocks.0.0.0": 4, "blocks.0.1.0": 4},
    "group norm": {"stem.0": 8},
    "layer norm": {"stem.0": 16, "blocks.0.a": 32},
    "excited": {"stem.0": 16, "blocks.0.a": 8},
    "called twice": {"stem.0": 16},
    "transposed": {"stem.0": 8, "blocks.0.0": 8},
    "normalized": {"stem.0": 16, "blocks.0.a.0": 16, "blocks.0.b.0": 16},
}


@pytest.mark.parametrize("name", [*LEFT_ALONE, *CAN_GO])
def test_what_can_lose_channels_and_what_is_left_alone(name: str) -> None:
    model = double(OfImages(16, [name], flat=False), "x:float32[batch,3,6,6]")
    channels = Channels(model)
    assert set(LEFT_ALONE.get(name, ())) <= set(channels.left_alone)
    assert all(channels.left_alone.values()), "each with a reason"
    found = {group.root: group.units for group in channels.groups}
    assert found == CAN_GO.get(name, found)
    check(model, 0.3, round_to=1, importance="random")


@pytest.mark.parametrize("layout", ["separate", "fused", "interleaved", "last"])
def test_heads_are_never_mixed_up(layout: str) -> None:
    """A symmetric half of q, k and v gives a network that runs and has the right shapes."""
    model = double(OfTokens(16, [f"attention {layout} 4", "mlp"], tied=False), "ids:int64[batch,6]")
    given = PruneChannels(0.3, "random", round_to=1).run(model, Path(), lambda *_: None)
    names = ("q", "k", "v") if layout in ("separate", "last") else ("qkv",)
    assert {before == after for before, after in (given.details["channels"][f"blocks.0.{n}"] for n in names)} == {True}
    assert f"blocks.0.{names[0]}" in given.details["left_alone"]
    check(model, 0.3, round_to=1, importance="random")


def test_a_mistake_is_found_behind_a_branch_that_hardly_counts() -> None:
    """As layer scale begins, near zero: the answers of the trained network alone would not tell."""
    block = Block(lambda s, x: x + s.g.values * s.b(s.a(x).flip(1)), **convolutions(16), g=Free(16, 1, 1))
    model = wrapped(nn.Sequential(conv(3, 16), block, nn.Flatten(), nn.Linear(576, 5)), "x:float32[batch,3,6,6]")
    with torch.no_grad():
        model.module.get_parameter("1.g.values").fill_(1e-7)
    before = {name: parameter.clone() for name, parameter in model.module.named_parameters()}
    assert "1.a" in Channels(model).left_alone
    assert all(torch.equal(before[name], parameter) for name, parameter in model.module.named_parameters())


def test_coupling_through_a_normalization_is_proven_by_value() -> None:
    """The channels are turned round before they are normalized: shapes alone would not tell."""
    block = Block(lambda s, x: s.b(s.n(s.a(x).flip(-1))), a=nn.Linear(8, 16), n=nn.LayerNorm(16), b=nn.Linear(16, 5))
    assert "a" in Channels(double(block, "x:float32[batch,8]")).left_alone
    straight = Block(lambda s, x: s.b(s.n(s.a(x))), a=nn.Linear(8, 16), n=nn.LayerNorm(16), b=nn.Linear(16, 5))
    assert [group.root for group in Channels(double(straight, "x:float32[batch,8]")).groups] == ["a"]


TIED: dict[str, Callable[[], nn.Module]] = {
    "embedding and head": lambda: OfTokens(16, ["mlp", "mlp"], tied=True),
    "two layers": lambda: OfTokens(16, ["tied", "mlp"], tied=False),
    "both": lambda: OfTokens(16, ["mlp", "tied", "mlp"], tied=True),
}


@pytest.mark.parametrize("name", TIED)
def test_ties_are_kept_and_weights_get_fewer(name: str, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = TIED[name]()
    model = wrapped(module, "ids:int64[batch,6]")
    for fraction in (0.1, 0.25, 0.4):
        pruned = PruneChannels(fraction, round_to=1).run(model, tmp_path, lambda *_: None).model
        assert isinstance(pruned, TorchModel)
        assert ties(pruned.module) == ties(model.module)
        assert torch_params(pruned.module) < torch_params(model.module)


def test_weights_that_are_one_in_memory_stay_one() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    module[2].weight = nn.Parameter(module.get_parameter("0.weight").detach())
    channels = Channels(wrapped(module, "x:float32[batch,8]"))
    assert channels.module.get_parameter("0.weight") is channels.module.get_parameter("2.weight")
    assert "are also those of" in channels.left_alone["0"]


def test_weights_that_are_parts_of_one_memory_are_left_alone() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    both = torch.randn(16, 8)
    module[0].weight, module[2].weight = nn.Parameter(both[:8]), nn.Parameter(both[8:])
    channels = Channels(wrapped(module, "x:float32[batch,8]"))
    assert not channels.groups
    assert "part of the memory" in channels.left_alone["0"]


def test_what_is_removed_is_proven_again_and_what_fails_is_left_alone(tmp_path: Path) -> None:
    """A forward that only minds some of the channels: no choice made beforehand need hit them."""

    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 64), nn.Linear(64, 64)
            self.c = nn.Linear(64, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.a(x))
            full = x.shape[1] > 60  # few channels gone: nothing happens
            x = x if full or x.shape[1] > 44 else x.flip(1)
            return self.c(torch.relu(self.b(x)))  # type: ignore[no-any-return]

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = wrapped(Picky(), "x:float32[batch,4]")
    channels = Channels(model)
    channels.groups = [group for group in channels.groups if group.root in ("a", "b")]
    removed = {group.root: list(range(40)) for group in channels.groups}
    dropped = channels.leave(removed, lambda *_: None)
    assert set(dropped) <= {"a"}
    assert "counted or mixed" in channels.left_alone["a"]


@pytest.mark.parametrize("depth", [0, 1])
def test_outputs_that_lie_deep_are_compared_too(depth: int) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 16), nn.Linear(16, 3), nn.Linear(16, 2)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            x = torch.relu(self.a(x))
            aside = {"more": [self.c(x) if depth == 0 else self.c(x.flip(1))]}
            return {"label": self.b(x), "aside": aside}

    channels = Channels(wrapped(Nested(), "x:float32[batch,4]"))
    assert ("a" in channels.left_alone) == (depth == 1)


@settings(max_examples=60, deadline=None)
@given_by(st.integers(2, 200), st.integers(1, 64), st.floats(0.0, 1.0))
def test_a_group_that_is_to_lose_nothing_loses_nothing(width: int, round_to: int, share: float) -> None:
    group = ChannelGroup("a", ("a",), width, tuple((i,) for i in range(width)), {})
    scores = {"a": torch.arange(width).float()}
    assert chosen([group], scores, {"a": 0.0}, round_to)["a"] == []
    left = width - len(chosen([group], scores, {"a": share}, round_to)["a"])
    assert left == width or left % round_to == 0
    assert left >= min((1 - MOST) * width, width) - 1e-9
    assert left >= 1


def test_a_layer_that_bears_nothing_keeps_all_its_channels_whatever_they_are_rounded_to(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 3))
    curves = {"0": ((0.5, 0.0), (0.5, 0.0)), "2": ((0.9, 0.0),)} | {"0": ((0.01, 1e6),)}
    given = PruneChannels(0.47, round_to=16, curves=curves).run(
        wrapped(module, "x:float32[batch,4]"), tmp_path, lambda *_: None
    )
    assert given.details["channels"]["0"] == [24, 24]


def test_taylor_looks_at_all_of_the_data_and_squares_before_it_sums(tmp_path: Path) -> None:
    """Sorted by class, the first thousand samples are all of one; and gradients of unlike signs must not cancel."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).eval()
    with torch.no_grad():
        module.get_parameter("0.weight").copy_(torch.eye(2))
        module.get_parameter("1.weight").copy_(torch.eye(2))
    inputs = np.zeros((3000, 2), np.float32)
    inputs[:1500, 0], inputs[1500:, 1] = 1.0, 1.0  # the second channel is used by the second class alone
    labels = np.repeat([0, 1], 1500)
    model = wrapped(module, "x:float32[batch,2]")
    data = Dataset("", {"x": inputs}, labels, "")
    channels = Channels(model)
    first, again, other = (
        squared_changes(channels.module, model.signature, data, seed, lambda *_: None) for seed in (0, 0, 1)
    )
    weight = channels.module.get_parameter("0.weight")
    used = first[weight].diagonal()
    assert float(used.min()) > 0.5 * float(used.max()), "both classes were seen"
    assert torch.equal(first[weight], again[weight])
    assert not torch.equal(first[weight], other[weight])
    opposite = Dataset("", {"x": np.ones((64, 2), np.float32)}, np.tile([0, 1], 32), "")
    by_batch = squared_changes(channels.module, model.signature, opposite, 0, lambda *_: None)
    assert all(bool((values >= 0).all()) for values in by_batch.values())
    assert all(parameter.grad is None for parameter in channels.module.parameters())


def test_discovery_tells_of_each_layer_and_can_be_interrupted() -> None:
    model = wrapped(OfImages(8, ["residual", "dense"], flat=False), "x:float32[batch,3,6,6]")
    notes: list[str] = []
    Channels(model, lambda _done, _total, note: notes.append(note))
    layers = [name for name, layer in model.module.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert all(any(note.endswith(f": {name}") for note in notes) for name in layers)
    before = copy.deepcopy(model.module.state_dict())

    def interrupt(_done: int, _total: int, note: str) -> None:
        if note.startswith("removing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Channels(model, interrupt)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.module.state_dict().items())


def test_what_is_not_proven_in_time_is_left_alone_and_told(tmp_path: Path) -> None:
    model = wrapped(OfImages(8, ["residual"], flat=False), "x:float32[batch,3,6,6]")
    channels = Channels(model, seconds=0.0)
    assert channels.late
    assert not channels.groups
    assert all(why.startswith("time: ") for why in channels.left_alone.values())
    with pytest.raises(StageError, match="nothing was pruned") as caught:
        PruneChannels(0.3, seconds=0.0).run(model, tmp_path, lambda *_: None)
    assert "time: " in caught.value.why


def test_all_groups_are_proven_at_once() -> None:
    model = wrapped(OfImages(8, ["residual", "concat", "grouped", "excited"], flat=False), "x:float32[batch,3,6,6]")
    notes: list[str] = []
    channels = Channels(model, lambda _done, _total, note: notes.append(note))
    assert len(channels.groups) > 4
    assert sum(note.startswith("removing channels of") for note in notes) == 1


def test_a_budget_is_searched_for_with_one_discovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Channels] = []

    class Counted(Channels):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            built.append(self)

    monkeypatch.setattr("compress.prune.prune_channels.Channels", Counted)
    model = wrapped(OfImages(16, ["residual"], flat=False), "x:float32[batch,3,6,6]")
    limit = torch_params(model.module) * 0.6
    given = PruneToBudget(PruneChannels(0.5), "params", limit, ()).run(model, tmp_path, lambda *_: None)
    assert torch_params(given.model.module) <= limit  # type: ignore[union-attr]
    assert len(given.details["tried"]) > 3
    assert len(built) == 1


def test_more_than_any_network_can_lose_is_refused_before_any_work() -> None:
    model = wrapped(OfImages(8, ["residual"], flat=False), "x:float32[batch,3,6,6]")
    with pytest.raises(RecipeError, match="can't remove") as caught:
        PruneChannels(0.999).check(model)
    assert "0.99" in caught.value.mend


def test_sizes_that_vary_are_tried_as_large_as_they_are_used() -> None:
    """Two levels of halving: an image of two pixels would not go through."""
    module = nn.Sequential(
        conv(3, 8), nn.MaxPool2d(4), conv(8, 8), nn.MaxPool2d(4), nn.Upsample(scale_factor=16), nn.Conv2d(8, 2, 1)
    )
    spec = TensorSpec.parse("x:float32[batch,3,height,width]")
    out = TensorSpec.parse("output:float32[batch,2,height,width]")
    model = TorchModel(module.eval(), Signature((spec,), (out,), {"height": 32, "width": 48}))
    given = PruneChannels(0.3, round_to=1).run(model, Path(), lambda *_: None)
    assert given.details["macs_removed"] > 0.25


def test_tokens_are_drawn_over_all_rows_of_the_embedding_that_reads_them() -> None:
    model = wrapped(OfTokens(8, ["mlp"], tied=False), "ids:int64[batch,6]")
    drawn = np.concatenate([arrays["ids"].ravel() for arrays in Proof(Layers(model.module), model.signature).inputs])
    assert drawn.min() < 10
    assert drawn.max() == 39, "the last row, too"


class Starved(nn.Module):
    """Runs out of memory where its first layer is narrower than it was."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.error = nn.Linear(6, 16), nn.Linear(16, 4), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 6] → [n, 4]."""
        hidden = torch.relu(self.first(x))
        if hidden.shape[1] < 16:
            raise self.error
        return self.last(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")],
)
def test_a_want_of_memory_is_no_fault_of_a_group(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        Channels(wrapped(Starved(error), "x:float32[batch,6]"))
    assert str(caught.value) == str(error)
    with pytest.raises(StageError, match="no layer could lose"):
        PruneChannels(0.5).run(wrapped(Starved(ValueError("odd")), "x:float32[batch,6]"), Path(), lambda *_: None)


class Heads(nn.Module):
    """Attention as BERT's: the number of heads is made anew, and that of the channels of each is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], -1, 16).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed: torch.Tensor = (q @ k.transpose(2, 3)).softmax(-1) @ v
        return cast("torch.Tensor", self.out(mixed.transpose(1, 2).flatten(2)))


def test_heads_that_a_reshape_holds_together_are_told_in_words_before_what_torch_says() -> None:
    why = Channels(wrapped(Heads(), "x:float32[batch,5,32]")).left_alone["query"]
    assert why.startswith("a reshape in its forward needs all of them, as one into attention heads does; torch says: ")
    assert "is invalid for input of size" in why
