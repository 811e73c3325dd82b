"""Blocks that go whole: which can, that their going is their silence, and which of them go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from compress.data.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.model import TorchModel, call
from compress.options.training import TrainingOptions
from compress.prune.blocks.find_blocks import Block, blocks_of, shapes_of
from compress.prune.blocks.prove_blocks import BlockProof
from compress.prune.blocks.without_blocks import silenced, without
from compress.prune.drop_blocks import DropBlocks
from compress.prune.heads.open_heads import plain_trace
from compress.prune.prune_channels import PruneChannels
from compress.prune.repair.walk import Walk
from compress.prune.repair_channels import RepairChannels
from compress.runtime.measure import torch_macs, torch_params
from compress.training.finetune import Finetune
from tests.families import FAMILIES, family
from tests.residual_networks import (
    IMAGE_STEPS,
    TOKEN_STEPS,
    Basic,
    Before,
    Inverted,
    Nested,
    OneForAll,
    PreNorm,
    ReadElsewhere,
    Residuals,
    Spoils,
    TwoSided,
    branches_of,
)
from tests.unit.compress.prune.test_prune_channels import quiet, wrapped
from tests.unit.compress.prune.test_repair import data_for


def found(model: TorchModel) -> tuple[fx.GraphModule, list[Block], dict[str, str]]:
    graph, inputs = plain_trace(model)
    walk = Walk(graph)
    return graph, *blocks_of(walk, shapes_of(walk, inputs))


def residuals(*steps: Any, seed: int = 0) -> TorchModel:
    module = Residuals(steps, seed=seed)
    return wrapped(module, module.inputs)


def answers(module: nn.Module, model: TorchModel, seed: int = 3) -> torch.Tensor:
    with torch.no_grad():
        return call(module, model.signature.inputs, data_for(model, 5, seed).inputs)["output"]


# Of each family that tests use, the blocks that can go.
BLOCKS = {
    "residual": ["a.0 to b.1", "c"],
    "grouped": ["a"],
    "squeeze_excite": ["a.0 to excite"],
    "convnext": ["filter to scale"],
    "inverted": ["a"],
    "bert": ["attention", "wide to narrow"],
    "gqa": ["attention", "wide to narrow"],
    "fused_qkv": ["qkv to out", "wide to narrow"],
    "encoder": ["layer.self_attn", "layer"],
    "vit": [
        f"layers.{at} ({part})" for at in (0, 1) for part in ("norm1 to self_attn.out_proj", "norm2 to linear2")
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_familys_blocks_are_found_and_their_going_is_their_silence(name: str) -> None:
    module, inputs = family(name)
    model = wrapped(module, *inputs)
    graph, blocks, _ = found(model)
    assert [block.name for block in blocks] == BLOCKS.get(name, [])
    proof = BlockProof(graph, model.signature, None)
    for some in ([block] for block in blocks):
        assert proof.difference({block.end: block.shortcut for block in some}) == ""
    if blocks:
        every = {block.end: block.shortcut for block in blocks}
        assert proof.difference(every) == ""
        assert torch_params(without(graph, every)) < torch_params(module)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_residual_network_without_blocks_is_the_one_written_without_them(data: st.DataObject) -> None:
    kinds = data.draw(st.sampled_from((IMAGE_STEPS, TOKEN_STEPS)))
    steps = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=5))
    model = residuals(*steps, seed=data.draw(st.integers(0, 100)))
    graph, blocks, left_alone = found(model)
    branches = branches_of(steps)
    assert len(blocks) == len(branches)
    assert all(left_alone.values()), "each with a reason"
    gone = data.draw(st.sets(st.sampled_from(range(len(branches))))) if branches else set()
    ends = {blocks[at].end: blocks[at].shortcut for at in gone}
    inside = {number for at in gone for number in blocks[at].inside}
    ends = {end: shortcut for end, shortcut in ends.items() if end not in inside}
    written = model.module.without([branches[at] for at in gone])  # type: ignore[operator]
    made = without(graph, ends)
    want = answers(written, model)
    assert torch.equal(answers(made, model), want)
    assert torch.equal(answers(silenced(graph, ends), model), want)
    assert BlockProof(graph, model.signature, None).difference(ends, made) == ""
    assert torch_macs(made, model.signature) == torch_macs(written, model.signature)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (TwoSided, "neither is a shortcut"),
        (ReadElsewhere, "read elsewhere"),
        (OneForAll, "another shape"),
        (Spoils, "in place"),
    ],
)
def test_what_can_not_go_is_left_alone_by_name(step: Any, why: str) -> None:
    _, blocks, left_alone = found(residuals(step))
    assert blocks == []
    assert len(left_alone) == 1
    (name, said), = left_alone.items()  # fmt: skip
    assert name.startswith("steps.0")
    assert why in said


class Masked(nn.Module):
    """Of its second input only the block knows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.a(x) * mask)  # type: ignore[no-any-return]


class Positions(nn.Module):
    """What is added hangs on the size of the other side alone: that is no block."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.size(1)).expand(x.size(0), x.size(1))
        return self.head(x + self.table(places))  # type: ignore[no-any-return]


class MaskedTwice(Masked):
    """Of its second input two blocks know, through what both are given."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen = 1 - mask
        x = x + self.a(x) * seen
        return self.head(x + self.b(x) * seen)  # type: ignore[no-any-return]


def test_an_input_that_only_blocks_read_keeps_one_of_them(tmp_path: Path) -> None:
    model = wrapped(MaskedTwice(), "x:float32[batch,6]", "mask:float32[batch,6]")
    assert [block.name for block in found(model)[1]] == ["a", "b"]
    assert len(DropBlocks(1, data_for(model, 64)).run(model, tmp_path, quiet).details["blocks"]) == 1
    with pytest.raises(StageError, match="can't drop 2 blocks") as caught:
        DropBlocks(2, data_for(model, 64)).run(model, tmp_path, quiet)
    assert caught.value.why.startswith("1 can go: ")


def test_an_input_that_only_a_block_reads_keeps_it() -> None:
    _, blocks, left_alone = found(wrapped(Masked(), "x:float32[batch,6]", "mask:float32[batch,6]"))
    assert blocks == []
    assert left_alone == {"a": "nothing else reads the input mask"}


def test_positions_that_are_added_are_no_block() -> None:
    assert found(wrapped(Positions(), "x:float32[batch,8,6]"))[1:] == ([], {})


def faint(model: TorchModel, *steps: int) -> TorchModel:
    """The last layer of some steps' branches hardly counts."""
    with torch.no_grad():
        for at in steps:
            layers = [layer for layer in model.module.steps[at].modules() if isinstance(layer, nn.BatchNorm2d)]  # type: ignore[index,union-attr]
            layers[-1].weight.mul_(0.02)
            layers[-1].bias.zero_()
            layers[-1].running_mean.zero_()  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize("repair", [True, False])
def test_what_the_outputs_need_least_goes_first(repair: bool, tmp_path: Path) -> None:
    model = faint(residuals(Basic, Inverted, Basic, Basic, TwoSided), 1, 3)
    stage = DropBlocks(2, data_for(model, 96), repair)
    given = stage.run(model, tmp_path, quiet)
    assert set(given.details["blocks"]) == {"steps.1.inside", "steps.3"}
    errors = [each["error"] for each in given.details["blocks"].values()]
    assert errors[0] <= errors[1] < 0.05
    assert isinstance(given.model, TorchModel)
    assert torch.equal(
        answers(given.model.module, model), answers(model.module.without([(1, 0), (3, 0)]), model)  # type: ignore[operator]
    )  # fmt: skip
    gone = 1 - torch_macs(given.model.module, model.signature) / torch_macs(model.module, model.signature)
    assert given.details["macs_removed"] == pytest.approx(gone) == given.model.macs_gone
    assert sum(each["macs"] for each in given.details["blocks"].values()) == pytest.approx(gone)
    assert "steps.4" in " ".join(given.details["left_alone"])
    assert json.loads(json.dumps(dict(stage.options))) == dict(stage.options)


@pytest.mark.parametrize("steps", [(Basic, Basic, Before), (PreNorm, PreNorm), (Nested, Basic)])
def test_the_repair_behind_it_brings_the_outputs_nearer(steps: Any, tmp_path: Path) -> None:
    model = residuals(*steps)
    data = data_for(model, 256)
    dropped = DropBlocks(2, data).run(model, tmp_path, quiet).model
    assert isinstance(dropped, TorchModel)
    given = RepairChannels(data).run(dropped, tmp_path, quiet)
    assert given.details["kept"], given.did
    assert given.details["error_repaired"]["mean"] < 0.8 * given.details["error_pruned"]["mean"]
    assert "head" in given.details["layers"]
    assert isinstance(given.model, TorchModel)
    assert given.model.macs_gone == dropped.macs_gone


def test_a_linear_layer_behind_takes_up_a_linear_block_whole(tmp_path: Path) -> None:
    """x + a(x), then a layer that reads it: the layer can do both."""
    torch.manual_seed(0)

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x + self.a(x))  # type: ignore[no-any-return]

    model = wrapped(Linear(), "x:float32[batch,6]")
    data = data_for(model, 128)
    dropped = DropBlocks(1, data).run(model, tmp_path, quiet).model
    given = RepairChannels(data, ridge=1e-9).run(dropped, tmp_path, quiet)  # type: ignore[arg-type]
    torch.testing.assert_close(answers(given.model.module, model), answers(model.module, model), rtol=1e-4, atol=1e-4)  # type: ignore[union-attr]


def test_a_training_behind_it_is_taught_by_the_whole(tmp_path: Path) -> None:
    model = residuals(Basic, Basic, TwoSided)
    data = data_for(model, 64)
    dropped = DropBlocks(1, data).run(model, tmp_path, quiet).model
    asked = TrainingOptions(epochs=1, batch_size=16, feature_weight=0.5)
    given = Finetune(data, model, asked).run(dropped, tmp_path, quiet).model  # type: ignore[arg-type]
    assert isinstance(given, TorchModel)
    before, after = (dict(each.module.named_parameters()) for each in (dropped, given))  # type: ignore[union-attr]
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_channels_are_pruned_to_a_share_of_the_whole_model(tmp_path: Path) -> None:
    model = residuals(Basic, Basic, Basic)
    data = data_for(model, 64)
    dropped = DropBlocks(1, data).run(model, tmp_path, quiet).model
    assert isinstance(dropped, TorchModel)
    repaired = RepairChannels(data).run(dropped, tmp_path, quiet).model
    given = PruneChannels(0.6).run(repaired, tmp_path, quiet)  # type: ignore[arg-type]
    whole = torch_macs(model.module, model.signature)
    assert 1 - torch_macs(given.model.module, model.signature) / whole == pytest.approx(0.6, abs=0.02)  # type: ignore[union-attr]
    assert "with the blocks that went before" in given.did
    enough = PruneChannels(dropped.macs_gone).run(dropped, tmp_path, quiet)
    assert enough.did.startswith("nothing: ")
    assert enough.model.module is dropped.module  # type: ignore[union-attr]


def test_auto_drops_what_keeps_the_budget_better_than_channels(tmp_path: Path) -> None:
    model = faint(residuals(Basic, Basic, Basic, Basic), 1, 2)
    data = data_for(model, 128)
    given = DropBlocks("auto", data, prune=PruneChannels(0.4, round_to=1)).run(model, tmp_path, quiet)
    assert {"steps.1", "steps.2"} >= set(given.details["blocks"]) != set()
    errors = [each["error"] for each in given.details["tried"]]
    kept = len(given.details["blocks"])
    assert errors[: kept + 1] == sorted(errors[: kept + 1], reverse=True), "each that went brought it nearer"
    assert len(errors) == kept + 1 or errors[kept + 1] >= errors[kept], "what came next did not"


def test_auto_drops_nothing_where_channels_cost_less(tmp_path: Path) -> None:
    """Half of the channels are silent, and every block is needed."""
    model = residuals(Basic, Basic, Basic)
    with torch.no_grad():
        for step in model.module.steps:  # type: ignore[union-attr]
            step.a[0].weight[4:], step.a[1].bias[4:], step.a[1].running_mean[4:] = 0.0, 0.0, 0.0
            step.b[1].weight.mul_(4)
    given = DropBlocks("auto", data_for(model, 128), prune=PruneChannels(0.4, round_to=1)).run(model, tmp_path, quiet)
    assert given.did.startswith("nothing: channels alone")
    assert given.model is model
    assert len(given.details["tried"]) == 2


def test_blocks_that_there_are_not_are_refused(tmp_path: Path) -> None:
    model = residuals(Basic, Basic, TwoSided)
    data = data_for(model, 64)
    with pytest.raises(StageError, match="can't drop 3 blocks") as caught:
        DropBlocks(3, data).run(model, tmp_path, quiet)
    assert "2 can go: steps.0, steps.1" in caught.value.why
    assert "steps.2" in caught.value.why
    assert "--drop-blocks 2" in caught.value.mend
    plain = residuals(TwoSided)
    with pytest.raises(StageError, match="no block can go") as caught:
        DropBlocks(1, data_for(plain, 64)).run(plain, tmp_path, quiet)
    assert "neither is a shortcut" in caught.value.why
    straight = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "x:float32[batch,4]")
    with pytest.raises(StageError, match="no block can go") as caught:
        DropBlocks("auto", data_for(straight, 64), prune=PruneChannels(0.5)).run(straight, tmp_path, quiet)
    assert "no residual blocks" in caught.value.why


def test_a_forward_that_can_not_be_traced_and_outputs_that_never_vary_are_told(tmp_path: Path) -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.a(x) if float(x.sum()) > 0 else x

    model = wrapped(Decides(), "x:float32[batch,4]")
    with pytest.raises(StageError, match="can't look for blocks"):
        DropBlocks(1, data_for(model, 32)).run(model, tmp_path, quiet)
    model = residuals(Basic)
    data = data_for(model, 32)
    data.inputs["x"][:] = 1.0
    with pytest.raises(StageError, match="can't choose blocks"):
        DropBlocks(1, data).run(model, tmp_path, quiet)


@pytest.mark.parametrize(("count", "what"), [(0, "can't drop 0 blocks"), (-1, "can't drop"), ("auto", "can't weigh")])
def test_counts_that_make_no_sense_are_refused_before_any_work(count: Any, what: str) -> None:
    model = residuals(Basic)
    with pytest.raises(RecipeError, match=what):
        DropBlocks(count, data_for(model, 8)).check(model)


def test_numbers_are_the_same_by_the_bit_or_the_proof_fails() -> None:
    model = residuals(Basic, Basic)
    graph, blocks, _ = found(model)
    ends = {blocks[0].end: blocks[0].shortcut}
    other = without(graph, {blocks[1].end: blocks[1].shortcut})
    assert "adds zeros" in BlockProof(graph, model.signature, None).difference(ends, other)
    assert bool(answers(other, model).isfinite().all())


class Gated(nn.Module):
    """A mean over the sequence, and what is added to it has the whole sequence: at a length of 1 none can tell."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        m = h.mean(1, keepdim=True)
        y = m + self.b(h * torch.sigmoid(m))
        return self.d(y + self.c(torch.relu(y)))  # type: ignore[no-any-return]


def test_what_brings_the_shape_of_its_sum_is_no_block_at_any_size() -> None:
    model = wrapped(Gated(), "x:float32[batch,seq,16]")
    one = TorchModel(model.module, model.signature.sized({"seq": 1}))
    x = np.random.default_rng(0).standard_normal((50, 1, 16)).astype(np.float32)
    stage = DropBlocks(1, Dataset("", {"x": x}, None, ""))
    _, blocks, left_alone, _ = stage._found(one, quiet)
    assert [block.name for block in blocks] == ["c"]
    assert list(left_alone) == ["b"]
