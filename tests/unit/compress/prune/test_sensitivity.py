"""What each layer's pruning alone costs, and what follows for how far it may be pruned."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import compress
from compress.cli import main as command
from compress.data.dataset import Dataset
from compress.errors import RecipeError, StageError
from compress.evaluate.metrics import METRICS
from compress.model import TorchModel
from compress.prune.prune_channels import PruneChannels
from compress.prune.sensitivity import WORST, GroupSensitivity, Sensitivity, layer_sensitivity
from compress.report.sensitivity import heat_map, write_sensitivity
from tests.unit.compress.prune.test_prune_channels import quiet, wrapped


def main(arguments: list[str]) -> None:
    """The command, which ends well."""
    with pytest.raises(SystemExit) as caught:
        command(arguments)
    assert caught.value.code == 0


def uneven() -> tuple[TorchModel, Dataset]:
    """The first layer's channels all matter; most of the second's do nothing."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    with torch.no_grad():
        module.get_parameter("4.weight")[:, 8:] = 0
        module.get_parameter("2.weight")[8:] *= 0.01
        module.get_parameter("2.bias")[8:] = 0
    model = wrapped(module, "x:float32[batch,12]")
    x = np.random.default_rng(0).standard_normal((400, 12)).astype(np.float32)
    return model, Dataset("", {"x": x}, module(torch.from_numpy(x)).argmax(1).numpy(), "")


def test_a_layer_that_does_little_may_lose_much() -> None:
    model, data = uneven()
    found = layer_sensitivity(model, data, METRICS["top1"], samples=200)
    assert [group.layers for group in found.groups] == [("0",), ("2",)]
    assert found.samples == 200
    assert found.original == 1.0
    first, second = found.groups
    assert second.drops[-1] == pytest.approx(0, abs=0.5)
    assert first.drops[-1] > 5
    assert all(0 < share < 1 for share in first.macs_removed)
    limits = found.limits(1.0)
    assert limits["2"] == 0.75
    assert limits["0"] < 0.5
    assert found.left_alone["4"]


def test_what_is_recorded_is_what_was_removed() -> None:
    """A group of 3 can't lose a quarter, one of 2 loses one channel whatever is asked for."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 5))
    x = np.random.default_rng(0).standard_normal((100, 6)).astype(np.float32)
    data = Dataset("", {"x": x}, None, "")
    found = layer_sensitivity(wrapped(module, "x:float32[batch,6]"), data, METRICS["cosine"], ratios=(0.25, 0.45, 0.75))
    assert [group.ratios for group in found.groups] == [(1 / 3, 1 / 3, 2 / 3), (0.5, 0.5, 0.5)]
    assert found.asked == (0.25, 0.45, 0.75)
    narrow = found.groups[0]
    assert narrow.drops[0] == narrow.drops[1] != narrow.drops[2]
    # Of 6·3 + 3·2 + 2·5 multiplications, each of the first group's takes 6 + 2.
    assert narrow.macs_removed == pytest.approx((8 / 34, 8 / 34, 16 / 34))
    svg = heat_map(found)
    assert svg.count("(−33%)") == 2
    assert svg.count("(−67%)") == 1
    assert "−25% channels" in svg


def test_the_model_is_left_as_it_was() -> None:
    model, data = uneven()
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    layer_sensitivity(model, data, METRICS["top1"], samples=50)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.module.state_dict().items())


def test_pruning_by_it_spares_the_delicate_layer(tmp_path: Path) -> None:
    model, data = uneven()
    found = layer_sensitivity(model, data, METRICS["top1"])
    given = PruneChannels(0.57, round_to=1, curves=found.curves).run(model, tmp_path, quiet)
    channels = given.details["channels"]
    assert channels["2"][1] < 0.5 * channels["0"][1]


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    group = GroupSensitivity(("a", "b"), 8, (0.25, 0.5), (0.1, 3.0), (0.1, 0.2))
    found = Sensitivity("top1", 0.9, 10, (group,), {"head": "the shape of the output hangs on it"})
    found.save(tmp_path / "sensitivity.json")
    assert Sensitivity.load(tmp_path) == Sensitivity.load(tmp_path / "sensitivity.json") == found


@pytest.mark.parametrize(
    ("labels", "said", "kind"),
    [
        (np.zeros(400, np.int64), "no better than chance", "warnings"),
        (np.zeros((400, 3), np.float32), "not looked at", "warnings"),
        (np.eye(5, dtype=np.int64)[np.arange(400) % 5], "one-hot", "notes"),
        (None, "Nothing but its shape", "notes"),
    ],
)
def test_doubts_and_notes_are_told_wherever_the_drops_are(
    labels: np.ndarray[Any, Any] | None, said: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = uneven()
    compress.save(model.module, tmp_path / "model.pt", inputs="x:float32[batch,12]")
    arrays = {"x": data.inputs["x"]} | ({} if labels is None else {"label": labels})
    np.savez(tmp_path / "eval.npz", **arrays)
    main(["sensitivity", str(tmp_path / "model.pt"), "--eval", "eval.npz", "-o", str(tmp_path / "s")])
    assert said in " ".join(capsys.readouterr().out.split())
    assert any(said in words for words in getattr(Sensitivity.load(tmp_path / "s"), kind))
    assert said in (tmp_path / "s/sensitivity.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["", "{}", '{"schema_version": 99}', '{"schema_version": 1, "groups": [1]}', None])
def test_a_damaged_file_is_told(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "sensitivity.json").write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError, match="can't read the sensitivity"):
        Sensitivity.load(tmp_path)


@pytest.mark.parametrize(("ratios", "samples"), [((0.0,), 10), ((1.0,), 10), ((), 10), ((0.5,), 0)])
def test_ratios_outside_0_to_1_are_refused(ratios: tuple[float, ...], samples: int) -> None:
    model, data = uneven()
    with pytest.raises(RecipeError):
        layer_sensitivity(model, data, METRICS["top1"], ratios=ratios, samples=samples)


def test_a_model_that_can_lose_nothing_says_why() -> None:
    model = wrapped(nn.Linear(8, 5).eval(), "x:float32[batch,8]")
    data = Dataset("", {"x": np.zeros((4, 8), np.float32)}, None, "")
    with pytest.raises(StageError, match="no layer could lose"):
        layer_sensitivity(model, data, METRICS["cosine"])


def test_sixty_layers_have_a_row_each() -> None:
    groups = tuple(GroupSensitivity((f"layer.{i}",), 8, (0.5,), (0.1 * i,), (0.1,)) for i in range(60))
    svg = heat_map(Sensitivity("top1", 0.9, 10, groups, {}))
    assert all(f">layer.{i}<" in svg for i in range(60))


def test_the_command_writes_a_table_a_page_and_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = uneven()
    compress.save(model.module, tmp_path / "model.pt", inputs="x:float32[batch,12]", outputs=["logits"])
    np.savez(tmp_path / "eval.npz", x=data.inputs["x"], label=data.labels)  # type: ignore[arg-type]
    main(
        ["sensitivity", str(tmp_path / "model.pt"), "--eval", "eval.npz", "-o", str(tmp_path / "s"), "--samples", "100"]
    )
    assert "bears for 1" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "s/sensitivity.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "s/sensitivity.json").read_text(encoding="utf-8"))["samples"] == 100
    main(
        ["export", str(tmp_path / "model.pt"), "-o", str(tmp_path / "out"), "--prune", "0.57", "--eval", "eval.npz",
         "--sensitivity", str(tmp_path / "s")]
    )  # fmt: skip
    assert "each layer as it bears it" in compress.Artifact.load(tmp_path / "out").stages[2].did


@pytest.mark.parametrize(
    "change",
    [
        {"drops": [0.1]}, {"drops": ["0.1", "0.2"]}, {"ratios": [0.5, 2.0]}, {"layers": [1]}, {"width": "8"},
        {"macs_removed": None}, {"drops": [0.1, float("nan")]},
        {"ratios": [0.25], "drops": [0.1], "macs_removed": [0.1]},
    ],
    ids=str,
)  # fmt: skip
def test_a_curve_of_a_file_that_is_none_is_refused_when_it_is_read(tmp_path: Path, change: dict[str, object]) -> None:
    group = GroupSensitivity(("a",), 8, (0.25, 0.5), (0.1, 0.2), (0.1, 0.2))
    whole = Sensitivity("top1", 0.9, 10, (group,), {}, asked=(0.25, 0.5))
    whole.save(tmp_path / "sensitivity.json")
    assert Sensitivity.load(tmp_path) == whole
    data = json.loads(whole.text())
    data["groups"][0] |= change
    (tmp_path / "sensitivity.json").write_text(json.dumps(data))
    with pytest.raises(RecipeError, match="can't read"):
        Sensitivity.load(tmp_path)


def test_drops_of_any_size_and_what_is_no_number_are_read_back(tmp_path: Path) -> None:
    """Prices have squared errors of billions; a network that breaks has none."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        module.get_parameter("4.weight").mul_(1e8)
    x = np.random.default_rng(0).standard_normal((100, 6)).astype(np.float32)
    model, data = wrapped(module, "x:float32[batch,6]"), Dataset("", {"x": x}, None, "")
    found = layer_sensitivity(model, data, METRICS["mse"])
    assert max(drop for group in found.groups for drop in group.drops) > 1e9
    found.save(tmp_path / "sensitivity.json")
    assert Sensitivity.load(tmp_path).groups == found.groups
    broken = dataclasses.replace(METRICS["mse"], scale=float("nan"))
    found = layer_sensitivity(model, data, broken)
    assert {drop for group in found.groups for drop in group.drops} == {WORST}
    write_sensitivity(found, tmp_path, 1.0)
    assert Sensitivity.load(tmp_path).groups == found.groups
    assert found.limits(1.0) == pytest.approx({"0": 0.0, "2": 0.0})
