"""What is frozen keeps its values, statistics included, on the whole way from a file through pruning and training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compress
from compress.data.dataset import Dataset
from compress.errors import CheckpointError, RecipeError
from compress.formats.checkpoint import load, write
from compress.model import TorchModel
from compress.model.frozen import frozen_names
from compress.options.training import TrainingOptions
from compress.prune.prune_channels import PruneChannels
from compress.quantize.qat.train_quantized import TrainQuantized
from compress.training.finetune import Finetune
from tests.unit.compress.training.networks import data, network, weights

FIRST = ("0.weight", "1.weight", "1.bias")
STATISTICS = ("1.running_mean", "1.running_var")


def saved(folder: Path, *frozen: str) -> TorchModel:
    module = network(8)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    path = compress.save(module, folder / "model.pt", inputs="image:float32[batch,1,6,6]", outputs=["logits"])
    return compress.load(path)


def tuned(folder: Path, model: TorchModel, *freeze: str, **options: Any) -> Finetune:
    opened = Dataset.open(str(data(folder)), model.signature)
    asked: dict[str, Any] = {"epochs": 1, "batch_size": 32, "train_precision": "32", "freeze": freeze} | options
    return Finetune(opened, None, TrainingOptions(**asked))


def quiet(_done: int, _total: int, _note: str) -> None:
    pass


def moved(before: TorchModel, after: dict[str, torch.Tensor]) -> set[str]:
    state = before.module.state_dict()
    return {name for name in state if not torch.equal(state[name], after[name])}


@pytest.mark.parametrize(
    ("flags", "patterns", "kept", "noted"),
    [
        (FIRST, (), {*FIRST, *STATISTICS}, True),
        ((), ("0.*", "1.*"), {*FIRST, *STATISTICS}, False),
        (("0.weight",), ("1.*",), {*FIRST, *STATISTICS}, True),
        (("8.bias",), (), {"8.bias"}, True),
        (FIRST, ("none",), set(), False),
        ((), (), set(), False),
    ],
    ids=["by its flags", "by patterns", "by both", "a part of a layer", "none", "nothing"],
)
def test_what_is_frozen_keeps_its_values_and_all_else_learns(
    flags: tuple[str, ...], patterns: tuple[str, ...], kept: set[str], noted: bool, tmp_path: Path
) -> None:
    model = saved(tmp_path, *flags)
    stage = tuned(tmp_path, model, *patterns)
    stage.check(model)
    given = stage.run(model, tmp_path, quiet)
    counters = {name for name in weights(given) if name.endswith("num_batches_tracked")}
    assert set(weights(given)) - counters - moved(model, weights(given)) == kept
    assert any("requires_grad=False" in warning for warning in given.warnings) is noted
    assert isinstance(given.model, TorchModel)
    assert frozen_names(given.model.module) == set(flags), "the next training knows, too"


def test_a_network_that_was_made_ready_to_infer_learns_whole(tmp_path: Path) -> None:
    model = saved(tmp_path, *(name for name, _ in network(8).named_parameters()))
    given = tuned(tmp_path, model).run(model, tmp_path, quiet)
    assert moved(model, weights(given)) >= {name for name, _ in model.module.named_parameters()}


@pytest.mark.parametrize(
    ("patterns", "why"),
    [(("backbone.*",), "no parameter's name fits backbone"), (("*",), "all of its 8 parameters are frozen")],
)
def test_patterns_that_freeze_nothing_or_all_are_refused_before_any_work(
    patterns: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    model = saved(tmp_path)
    with pytest.raises(RecipeError, match="can't train with --freeze") as caught:
        tuned(tmp_path, model, *patterns).check(model)
    assert why in caught.value.why


def test_pruning_and_files_keep_what_is_frozen(tmp_path: Path) -> None:
    model = saved(tmp_path, "3.weight", "8.bias")
    pruned = PruneChannels(0.5).run(model, tmp_path, quiet).model
    assert isinstance(pruned, TorchModel)
    assert pruned.module.get_parameter("3.weight").shape != model.module.get_parameter("3.weight").shape
    write(pruned, tmp_path / "pruned.pt")
    again = load(tmp_path / "pruned.pt")
    assert frozen_names(again.module) == {"3.weight", "8.bias"}
    given = tuned(tmp_path, again).run(again, tmp_path, quiet)
    assert {"3.weight", "8.bias"}.isdisjoint(moved(again, weights(given)))


def test_training_under_8_bits_keeps_what_is_frozen(tmp_path: Path) -> None:
    model = saved(tmp_path, "8.weight", "8.bias")
    stage = TrainQuantized(tuned(tmp_path, model, "3.*"))
    stage.check(model)
    given = stage.run(model, tmp_path, quiet)
    assert {"3.weight", "8.weight", "8.bias"}.isdisjoint(moved(model, weights(given)))
    assert "0.weight" in moved(model, weights(given))


@pytest.mark.parametrize("frozen", ["0.weight", [1], {"0.weight": 1}])
def test_a_file_whose_frozen_names_are_no_names_is_refused(frozen: Any, tmp_path: Path) -> None:
    saved(tmp_path, "0.weight")
    content = torch.load(tmp_path / "model.pt", weights_only=True)
    assert content["frozen"] == ["0.weight"]
    torch.save(content | {"frozen": frozen}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="can't read"):
        load(tmp_path / "bad.pt")


def test_a_file_of_an_earlier_release_freezes_nothing(tmp_path: Path) -> None:
    assert frozen_names(saved(tmp_path).module) == frozenset()
    assert "frozen" not in torch.load(tmp_path / "model.pt", weights_only=True)


def test_names_are_those_of_parameters_alone() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("scale", torch.ones(1))
    assert frozen_names(module) == frozenset()
    module.bias.requires_grad_(False)
    assert frozen_names(module) == {"bias"}
