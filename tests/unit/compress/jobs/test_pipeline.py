"""A pipeline is checked before it runs, and goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from compress.console.wording import Note
from compress.errors import RecipeError, StageError
from compress.formats.checkpoint import save
from compress.jobs.export import Silent, prepare
from compress.model import Model, OnnxModel, TorchModel
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.options import ExportOptions
from compress.pipeline import OTHER, Outcome, _digest, _folders, _take, check, kept_from_before, run
from compress.prune.prune_channels import PruneChannels
from compress.stage import Given, Progress
from compress.storage.stage_cache import StageCache
from tests.unit.compress.prune.test_prune_channels import loaded


@dataclass(frozen=True)
class Scale:
    """Multiplies a bias, and counts how often it ran."""

    factor: float
    fails: bool = False
    ran: list[float] = field(default_factory=list)

    name: ClassVar[str] = "scale"
    takes: ClassVar[type] = TorchModel
    gives: ClassVar[type] = TorchModel

    @property
    def options(self) -> Mapping[str, Any]:
        return {"factor": self.factor}

    def check(self, model: Model) -> None:
        pass

    def run(self, model: TorchModel, folder: Path, progress: Progress) -> Given:
        self.ran.append(self.factor)
        (folder / "half-written").touch()
        if self.fails:
            raise StageError("a stage failed", why="it was told to", mend="nothing")
        import copy

        module = copy.deepcopy(model.module)
        module.get_parameter("2.bias").data.mul_(self.factor)
        return Given(TorchModel(module, model.signature), f"times {self.factor}")


def go(stages: list[Any], work: Path, source: str = "s") -> list[Outcome]:
    return run(stages, loaded("mlp"), work=work, source=source, watcher=Silent())


def bias(outcome: Outcome) -> torch.Tensor:
    assert isinstance(outcome.given.model, TorchModel)
    return outcome.given.model.module.get_parameter("2.bias")


def test_each_stage_is_given_the_output_of_the_one_before(tmp_path: Path) -> None:
    outcomes = go([Scale(2.0), Scale(3.0)], tmp_path)
    assert torch.allclose(bias(outcomes[1]), loaded("mlp").module.get_parameter("2.bias") * 6)


def test_a_second_run_takes_what_is_kept_and_gives_the_same(tmp_path: Path) -> None:
    stages = [Scale(2.0), Scale(3.0)]
    first = go(stages, tmp_path)
    second = go(stages, tmp_path)
    assert [outcome.reused for outcome in second] == [True, True]
    assert [stage.ran for stage in stages] == [[2.0], [3.0]]
    assert torch.equal(bias(first[1]), bias(second[1]))


def test_a_note_of_a_stage_that_is_kept_is_no_warning(tmp_path: Path) -> None:
    """An interrupted run, gone on with, reports what an uninterrupted one does."""

    class Says(Scale):
        def run(self, model: TorchModel, folder: Path, progress: Progress) -> Given:
            given = super().run(model, folder, progress)
            return Given(given.model, given.did, warnings=("mind this", Note("know this"), Note("and this")))

    found = [go([Says(2.0)], tmp_path)[0] for _ in range(2)]
    assert [outcome.reused for outcome in found] == [False, True]
    for outcome in found:
        assert [(type(words), words) for words in outcome.given.warnings] == [
            (str, "mind this"), (Note, "know this"), (Note, "and this"),
        ]  # fmt: skip


@pytest.mark.parametrize("notes", [None, "0", {}, [True], ["0"], 0])
def test_which_words_of_a_kept_stage_are_notes_is_told_by_places(tmp_path: Path, notes: object) -> None:
    go([Scale(2.0)], tmp_path)
    path = next(tmp_path.glob("*/stage.json"))
    said = json.loads(path.read_text()) | {"notes": notes}
    path.write_text(json.dumps(said | {"sha256": _digest(said, path.parent)}))
    assert not go([Scale(2.0)], tmp_path)[0].reused


def test_a_changed_option_runs_that_stage_and_all_after_it(tmp_path: Path) -> None:
    go([Scale(2.0), Scale(3.0), Scale(5.0)], tmp_path)
    again = go([Scale(2.0), Scale(4.0), Scale(5.0)], tmp_path)
    assert [outcome.reused for outcome in again] == [True, False, False]
    assert len(list(tmp_path.iterdir())) == 3, "outputs that nothing needs any more are gone"


def test_a_model_that_answers_otherwise_gets_nothing_of_another_whatever_it_is_known_by(tmp_path: Path) -> None:
    cache = StageCache(tmp_path / "cache", 1 << 30)

    def go_with(gain: float, work: str) -> list[Outcome]:
        model = loaded("mlp")
        model.module.get_parameter("2.bias").data.mul_(gain)
        stages = [Scale(2.0), Scale(3.0)]
        return run(stages, model, work=tmp_path / work, source="s", watcher=Silent(), cache=cache)

    first = go_with(1.0, "work")
    for work in ("elsewhere", "work"):  # from the cache, and from the folder
        for stage, folder, key in _folders([Scale(2.0), Scale(3.0)], tmp_path / "work", "s"):
            cache.keep(stage.name, key, folder)
        assert [outcome.reused for outcome in go_with(1.0, work)] == [True, True]
        other = go_with(5.0, work)
        assert [outcome.reused for outcome in other] == [False, False], work
        assert OTHER in other[0].given.warnings
        assert torch.allclose(bias(other[1]), bias(first[1]) * 5)
        again = go_with(5.0, work)
        assert [outcome.reused for outcome in again] == [True, True], "and that is kept"
        assert OTHER not in again[0].given.warnings
        assert kept_from_before([Scale(2.0)], tmp_path / work, "s", model=loaded("mlp"))[0][0] is None
        go_with(1.0, work)


def test_another_source_runs_everything(tmp_path: Path) -> None:
    go([Scale(2.0)], tmp_path)
    assert not go([Scale(2.0)], tmp_path, source="other")[0].reused


def test_a_run_that_failed_goes_on_after_the_last_good_stage(tmp_path: Path) -> None:
    with pytest.raises(StageError):
        go([Scale(2.0), Scale(3.0, fails=True)], tmp_path)
    assert [outcome.reused for outcome in go([Scale(2.0), Scale(3.0)], tmp_path)] == [True, False]


@pytest.mark.parametrize("damage", ["model.pt", "stage.json"])
def test_a_damaged_output_is_made_again(tmp_path: Path, damage: str) -> None:
    go([Scale(2.0)], tmp_path)
    next(tmp_path.glob(f"*/{damage}")).write_bytes(b"PK damaged")
    assert not go([Scale(2.0)], tmp_path)[0].reused


@pytest.mark.parametrize("value", [None, 5, -1.5, "text", [], {}, ["text"], {"int8": 1}], ids=str)
@pytest.mark.parametrize("name", ["did", "details", "warnings", "seconds", "signature", "model", "sha256"])
def test_what_is_said_of_a_kept_stage_is_what_was_written(tmp_path: Path, name: str, value: object) -> None:
    go([Scale(2.0)], tmp_path)
    path = next(tmp_path.glob("*/stage.json"))
    said = json.loads(path.read_text())
    was, said[name] = said[name], value
    path.write_text(json.dumps(said))
    again = go([Scale(2.0)], tmp_path)[0]
    assert again.reused == (was == value)
    assert again.given.did.startswith("times 2")


@pytest.mark.parametrize("said", [None, [], 5, "text", {}, {"sha256": None}], ids=str)
def test_a_stage_of_which_nothing_is_said_is_made_again(tmp_path: Path, said: object) -> None:
    go([Scale(2.0)], tmp_path)
    next(tmp_path.glob("*/stage.json")).write_text(json.dumps(said))
    assert not go([Scale(2.0)], tmp_path)[0].reused


def test_a_kept_model_with_other_numbers_in_it_is_made_again(tmp_path: Path) -> None:
    first = go([OnnxFromTorch()], tmp_path)[0]
    assert isinstance(first.given.model, OnnxModel)
    path = first.given.model.path
    was, model = path.read_bytes(), onnx.load(path)
    weight = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    weight.raw_data = bytes(len(weight.raw_data))
    onnx.save(model, path)
    assert not go([OnnxFromTorch()], tmp_path)[0].reused
    assert onnx.load(path) == onnx.load_from_string(was)


def test_a_model_that_cannot_be_kept_still_goes_through(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))

        def get_parameter(self, target: str) -> nn.Parameter:
            return self.inner.get_parameter(target)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) if x.sum() > -1e9 else x

    model = TorchModel(Branching(), loaded("mlp").signature)
    outcomes = run([Scale(2.0)], model, work=tmp_path, source="s", watcher=Silent())
    assert not outcomes[0].reused
    assert list(tmp_path.iterdir()) == []


def test_a_chain_that_cannot_work_is_refused_before_it_starts() -> None:
    with pytest.raises(RecipeError, match="prune_channels can't stand there"):
        check([OnnxFromTorch(), PruneChannels(0.5)], loaded("mlp"))
    with pytest.raises(RecipeError, match="fold_onnx can't stand there"):
        check([FoldOnnx()], loaded("mlp"))


def test_kept_onnx_files_are_taken_too(tmp_path: Path) -> None:
    go([OnnxFromTorch(), FoldOnnx()], tmp_path)
    again = go([OnnxFromTorch(), FoldOnnx()], tmp_path)
    assert all(outcome.reused and isinstance(outcome.given.model, OnnxModel) for outcome in again)


@pytest.mark.parametrize("model", ["../outside.onnx", "/etc/passwd", 5, None, "model.onnx"], ids=str)
def test_a_kept_stage_that_is_not_as_it_was_written_is_run_again(tmp_path: Path, model: object) -> None:
    folder = tmp_path / "01-fold_onnx-0"
    folder.mkdir()
    (tmp_path / "outside.onnx").write_bytes(b"no graph")
    (folder / "model.onnx").write_bytes(b"no graph")
    signature = {"inputs": ["x:float32[batch,4]"], "outputs": ["y:float32[batch,4]"]}
    kept = {"did": "", "details": {}, "warnings": [], "seconds": 1, "signature": signature, "model": model}
    (folder / "stage.json").write_text(json.dumps({**kept, "sha256": _digest(kept, folder)}))
    assert _take(FoldOnnx(), folder, None) is None


@pytest.mark.parametrize("value", [None, "5", [5], {}, True, float("nan"), float("inf"), 10**400, ["text", 5]], ids=str)
@pytest.mark.parametrize("name", ["did", "details", "warnings", "seconds", "ranges"])
def test_what_a_kept_stage_says_is_of_its_kind_also_where_the_digest_fits(
    tmp_path: Path, name: str, value: object
) -> None:
    """A digest is made in a moment: it finds damage, and nothing else."""
    go([Scale(2.0)], tmp_path)
    path = next(tmp_path.glob("*/stage.json"))
    said = json.loads(path.read_text()) | {"ranges": {"x": [0, 1.0]}}
    if (name, type(value)) in (("did", str), ("details", dict)):
        value = 5
    said[name] = {"x": [0, value]} if name == "ranges" else value
    path.write_text(json.dumps(said | {"sha256": _digest(said, path.parent)}))
    assert not go([Scale(2.0)], tmp_path)[0].reused


def test_a_kept_stage_whose_digest_was_made_again_is_taken(tmp_path: Path) -> None:
    go([Scale(2.0)], tmp_path)
    path = next(tmp_path.glob("*/stage.json"))
    said = json.loads(path.read_text()) | {"ranges": {"x": [0, 1.0]}, "seconds": 7, "warnings": ["text"]}
    path.write_text(json.dumps(said | {"sha256": _digest(said, path.parent)}))
    assert go([Scale(2.0)], tmp_path)[0].reused


def test_a_training_that_is_added_leaves_what_is_kept_before_it(tmp_path: Path) -> None:
    """The channels that go, and what the repair makes of the others, do not hang on training data."""
    save(loaded("mlp").module, tmp_path / "model.pt", inputs="x:float32[batch,4]")
    for seed, name in enumerate(("calibration", "train")):
        x = np.random.default_rng(seed).standard_normal((32, 4)).astype(np.float32)
        np.savez(tmp_path / f"{name}.npz", x=x)
    names = []
    for finetune in (None, "train.npz"):
        options = ExportOptions(
            output=tmp_path / "a", prune=0.3, calibration=str(tmp_path / "calibration.npz"), finetune=finetune
        )
        prepared = prepare(tmp_path / "model.pt", options)
        kept = kept_from_before(prepared.stages, prepared.work, prepared.source)
        names.append([folder.name for _, folder in kept])
    assert [name[3:-13] for name in names[1][:3]] == ["prune_channels", "repair_channels", "finetune"]
    assert names[0][:2] == names[1][:2]
