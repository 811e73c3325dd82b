"""The training loop: what each option does, and what it must not change."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compress.data.dataset import Dataset
from compress.errors import DatasetError, MissingExtraError, RecipeError, StageError
from compress.model import TorchModel
from compress.options.training import TrainingOptions
from compress.quantize.qat.train_quantized import TrainQuantized
from compress.runtime.measure import cores
from compress.training.batches.answers import Answers
from compress.training.finetune import Finetune
from compress.training.machine.compiling import Compiling
from compress.training.machine.setup import on_threads
from compress.training.stepper import Stepper
from compress.training.updates.kept_state import KeptState
from tests.unit.compress.training.networks import (
    accuracy,
    data,
    model,
    near,
    network,
    patterns,
    same,
    stage,
    trained,
    two_headed,
    weights,
)


def test_labels_alone_teach(tmp_path: Path) -> None:
    given = trained(tmp_path, epochs=5, count=512)
    assert accuracy(given, *patterns(512, seed=7)) > 0.9


@pytest.mark.parametrize("seeds", [(1, 1), (1, 2)])
def test_the_seed_decides_and_nothing_else(tmp_path: Path, seeds: tuple[int, int]) -> None:
    options: dict[str, Any] = {"augment": ("flip", "shift:1"), "ema": 0.9}
    first, second = (weights(trained(tmp_path, seed=seed, **options)) for seed in seeds)
    assert same(first, second) == (seeds[0] == seeds[1])


@pytest.mark.parametrize(
    "options",
    [
        {"loader_workers": 2},
        {"profile": True},
        {"checkpoint_seconds": 0.0},
    ],
    ids=str,
)
def test_how_it_runs_does_not_change_what_it_gives(tmp_path: Path, options: dict[str, Any]) -> None:
    asked = {"augment": ("shift:1",), "epochs": 2}
    assert same(weights(trained(tmp_path, **asked)), weights(trained(tmp_path, **asked, **options)))


@pytest.mark.parametrize("asked", [1, 3])
def test_a_training_uses_the_threads_that_it_is_given_and_leaves_them_as_they_were(tmp_path: Path, asked: int) -> None:
    seen: set[int] = set()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        given = stage(tmp_path, train_threads=asked).run(
            model(tmp_path, "student", 8), tmp_path, lambda _d, _t, _n: seen.add(torch.get_num_threads())
        )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == {asked}
    assert given.details["threads"] == asked


def test_threads_are_given_back_by_a_training_that_fails(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    with pytest.raises(StageError):
        trained(tmp_path, learning_rate=1e30, train_threads=before + 1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("said", "threads"), [("3", 3), ("3,2", 3), ("", cores()), ("many", cores()), ("0", cores())])
def test_without_a_word_on_threads_openmps_setting_counts_else_the_cores(
    monkeypatch: pytest.MonkeyPatch, said: str, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    with on_threads(None, "cpu"):
        assert torch.get_num_threads() == threads


def test_a_training_that_is_kept_does_not_depend_on_its_threads(tmp_path: Path) -> None:
    assert stage(tmp_path, train_threads=1).options == stage(tmp_path).options


def test_parts_of_a_step_add_up_to_the_whole(tmp_path: Path) -> None:
    """Without batch normalization, which sees each part alone."""
    import compress

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    loaded = compress.load(compress.save(plain, tmp_path / "plain.pt", inputs="image:float32[batch,1,6,6]"))
    opened = Dataset.open(str(data(tmp_path)), loaded.signature)
    found = [
        Finetune(opened, None, TrainingOptions(epochs=2, batch_size=32, accumulate=parts, train_precision="32")).run(
            loaded, tmp_path, lambda _d, _t, _n: None
        )
        for parts in (1, 3)
    ]
    assert near(weights(found[0]), weights(found[1]))


@pytest.mark.parametrize("module", [network(8, dropout=0.3), network(8)], ids=["dropout", "plain"])
def test_computing_activations_again_gives_the_same(tmp_path: Path, module: nn.Module) -> None:
    import compress

    path = compress.save(module, tmp_path / "model.pt", inputs="image:float32[batch,1,6,6]")
    loaded = compress.load(path)
    opened = Dataset.open(str(data(tmp_path)), loaded.signature)
    found = [
        Finetune(opened, None, TrainingOptions(epochs=2, gradient_checkpointing=again, train_precision="32")).run(
            loaded, tmp_path, lambda _d, _t, _n: None
        )
        for again in (False, True)
    ]
    assert near(weights(found[0]), weights(found[1]))


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "one-cycle"},
        {"schedule": "constant"},
        {"label_smoothing": 0.1},
        {"ema": 0.9},
        {"taught": True, "feature_weight": 1.0},
        {"train_precision": "bf16-mixed"},
        {"channels_last": False},
        {"gradient_checkpointing": True, "accumulate": 2},
    ],
    ids=str,
)
def test_each_option_still_learns(tmp_path: Path, options: dict[str, Any]) -> None:
    plain = {"distillation": 0.1} if options.get("taught") else {}
    given = trained(tmp_path, **{"epochs": 6, "count": 320} | plain | options)
    assert accuracy(given, *patterns(512, seed=7)) > 0.85
    assert not same(weights(given), weights(trained(tmp_path, epochs=6, count=320))) or "channels_last" in options


def test_features_that_are_taught_are_named_and_the_layers_are_left_as_they_were(tmp_path: Path) -> None:
    given = trained(tmp_path, taught=True, feature_weight=2.0)
    assert given.details["features"] == ["2", "6"]
    assert isinstance(given.model, TorchModel)
    assert not any(layer._forward_hooks for layer in given.model.module.modules())


def test_the_originals_answers_are_computed_once_and_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = trained(tmp_path, taught=True)
    monkeypatch.setattr(Answers, "where_they_pay", lambda *_given: None)
    asked = trained(tmp_path, taught=True)
    assert "answers_seconds" in kept.details
    assert "answers_seconds" not in asked.details
    assert near(weights(kept), weights(asked))
    assert not list((tmp_path / "work").iterdir()), "nothing is left of it"


def test_the_best_epoch_is_kept_and_the_training_stops_when_no_better_one_comes(tmp_path: Path) -> None:
    """A rate that ruins what the first epochs learnt."""
    given = trained(
        tmp_path, epochs=30, hold_out=0.25, patience=2, learning_rate=0.3, schedule="constant", count=320
    )  # fmt: skip
    history = given.details["history"]
    best = given.details["best_epoch"]
    assert len(history) == best + 2 < 30
    assert given.details["best_value"] == max(row["validation"] for row in history)
    assert given.details["samples"] == 240
    order = np.random.default_rng(0).permutation(320)
    images, labels = patterns(320)
    held = np.sort(order[:80])
    assert accuracy(given, images[held], labels[held]) == pytest.approx(given.details["best_value"])


def test_a_training_that_is_killed_when_it_has_stopped_early_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"epochs": 30, "hold_out": 0.25, "patience": 2, "learning_rate": 0.3}
    own = KeptState.drop
    monkeypatch.setattr(KeptState, "drop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, **options)
    monkeypatch.setattr(KeptState, "drop", own)
    again = trained(tmp_path, **options)
    assert again.details["resumed_at_step"] == again.details["steps"] < 30 * 6
    (tmp_path / "work").rename(tmp_path / "elsewhere")
    assert same(weights(again), weights(trained(tmp_path, **options)))


def interrupted(_self: KeptState) -> None:
    raise KeyboardInterrupt


def test_validation_data_of_its_own(tmp_path: Path) -> None:
    tuned = stage(tmp_path, epochs=2)
    held = Dataset.open(str(data(tmp_path, "held", 60, seed=5)), model(tmp_path, "s", 8).signature)
    given = dataclasses.replace(tuned, validation=held).run(model(tmp_path, "s", 8), tmp_path, lambda _d, _t, _n: None)
    assert given.details["validation_metric"] == "top1"
    assert given.details["best_value"] == accuracy(given, *patterns(60, seed=5))


def spoil(monkeypatch: pytest.MonkeyPatch, at: int, times: int) -> None:
    """The gradients of a step are no numbers, the first times that it is taken."""
    spoilt: list[int] = []
    own = Stepper.update

    def update(self: Any, rate: float, momentum: float | None, step: int, left: int) -> None:
        if step == at and len(spoilt) < times:
            spoilt.append(step)
            next(self.module.parameters()).grad.fill_(float("nan"))
        own(self, rate, momentum, step, left)

    monkeypatch.setattr(Stepper, "update", update)


def test_a_loss_that_is_lost_again_from_the_last_good_state_goes_back_to_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, 14, times=2)
    given = trained(tmp_path, epochs=6, ema=0.9)
    assert given.details["rollbacks"] == 2
    first, second = (warning for warning in given.warnings if "back to step" in warning)
    assert "back to step 8, and on at 0.25 " in first
    assert "back to step 0, and on at 0.0625 " in second
    assert [row["epoch"] for row in given.details["history"]] == [1, 2, 3, 4, 5, 6]


def test_weights_that_the_last_step_spoils_are_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, 8 * 3, times=1)
    given = trained(tmp_path, epochs=3)
    assert given.details["rollbacks"] == 1
    assert "weights became infinite or NaN in step 24 of 24: back to step 16" in given.warnings[0]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(given).values() if tensor.is_floating_point())


def test_a_loss_that_is_lost_goes_back_and_on_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, 6, times=1)
    given = trained(tmp_path, epochs=6, checkpoint_seconds=0.0)
    assert given.details["rollbacks"] == 1
    assert "back to step" in given.warnings[0]
    assert "0.25 of the rate" in given.warnings[0]
    assert accuracy(given, *patterns(512, seed=7)) > 0.8


def test_a_rate_that_is_far_too_high_is_found_out(tmp_path: Path) -> None:
    with pytest.raises(StageError) as caught:
        trained(tmp_path, learning_rate=1e30)
    assert "diverged" in caught.value.what
    assert "--learning-rate 1e+29" in caught.value.mend


def test_a_batch_size_is_found_and_the_rate_goes_with_it(tmp_path: Path) -> None:
    given = trained(tmp_path, batch_size="auto", count=2048, epochs=20)
    size = given.details["batch_size"]
    assert str(size) in given.details["batch_sizes_tried"]
    assert given.details["learning_rate"] == pytest.approx(5e-3 * (size / 64) ** 0.5)
    assert given.details["steps"] == 20 * -(-2048 // size)


def test_a_profile_says_where_the_time_goes(tmp_path: Path) -> None:
    given = trained(tmp_path, profile=True, epochs=3)
    profile = given.details["profile"]
    assert sum(profile["shares"].values()) == pytest.approx(1, abs=1e-6)
    assert {"forward", "backward", "optimizer", "data loading"} <= set(profile["shares"])
    assert "forward" in profile["words"][0]
    assert '"traceEvents"' in (tmp_path / "work/trace.json").read_text()


def test_a_profile_of_a_training_that_ends_meanwhile_counts_the_steps_that_were(tmp_path: Path) -> None:
    profile = trained(tmp_path, profile=True, epochs=1, count=7 * 32).details["profile"]
    assert profile["steps"] == 2


def test_a_single_sample_is_no_training(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="can't train"):
        trained(tmp_path, count=1, epochs=1)


def test_further_outputs_are_held_to_the_originals(tmp_path: Path) -> None:
    """The first output is one logit for each class, the second is none of them."""
    student, teacher = (two_headed(tmp_path, name, seed) for name, seed in (("student", 1), ("teacher", 2)))
    opened = Dataset.open(str(data(tmp_path)), student.signature)
    images = torch.from_numpy(patterns(256)[0])
    asked = TrainingOptions(epochs=8, learning_rate=1e-2, train_precision="32")
    given = Finetune(opened, teacher, asked).run(student, tmp_path, lambda _d, _t, _n: None)
    assert isinstance(given.model, TorchModel)
    with torch.no_grad():
        before, after, wanted = (made.module(images)[1] for made in (student, given.model, teacher))
    assert (after - wanted).square().mean() < 0.2 * (before - wanted).square().mean()


def test_an_output_that_no_label_teaches_keeps_its_weights(tmp_path: Path) -> None:
    student = two_headed(tmp_path, "student", 1)
    opened = Dataset.open(str(data(tmp_path)), student.signature)
    asked = TrainingOptions(epochs=2)
    given = Finetune(opened, None, asked).run(student, tmp_path, lambda _d, _t, _n: None)
    before, after = student.module.state_dict(), weights(given)
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"body", "first"}


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        (np.arange(1, 257) % 5, "they go from 0 to 4"),
        (np.full(256, -1), "they go from -1 to -1"),
        (np.zeros((256, 2), np.int64), "they are int64 [2] for each sample, the output 'logits' is float32 [4]"),
        (np.zeros(256, np.float32), "they are float32 [] for each sample"),
        (np.array(["shirt"] * 256), "they are <U5"),
    ],
    ids=["beyond the classes", "negative", "two columns", "floats", "words"],
)
def test_labels_that_do_not_fit_are_refused_before_any_work(tmp_path: Path, labels: Any, why: str) -> None:
    np.savez(tmp_path / "wrong.npz", image=patterns(256)[0], label=labels)
    student = model(tmp_path, "student", 8)
    opened = Dataset.open(str(tmp_path / "wrong.npz"), student.signature)
    with pytest.raises(DatasetError, match="can't train on the labels") as caught:
        Finetune(opened, None).check(student)
    assert why in caught.value.why


def test_validation_that_nothing_can_judge_is_refused(tmp_path: Path) -> None:
    student = model(tmp_path, "student", 8)
    np.save(tmp_path / "bare.npy", patterns(64)[0])
    held = Dataset.open(str(tmp_path / "bare.npy"), student.signature)
    with pytest.raises(RecipeError, match="can't judge epochs"):
        dataclasses.replace(stage(tmp_path), validation=held).check(student)


def test_tensorboard_is_told(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trained(tmp_path, tensorboard=tmp_path / "logs", hold_out=0.1, epochs=3)
    read = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert {"train/loss", "train/rate", "validation/top1"} <= set(read.Tags()["scalars"])
    assert len(read.Scalars("validation/top1")) == 3


def test_a_missing_tensorboard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match="TensorBoard"):
        trained(tmp_path, tensorboard=tmp_path / "logs")


def test_compiling_is_kept_where_it_pays_and_given_up_where_not() -> None:
    for fast, kept in ((0.01, True), (0.099, False)):
        trial = Compiling("auto", "plain", lambda: "compiled")
        while not trial.decided:
            trial.took(fast if trial.current == "compiled" else 0.1, left=10_000)
        assert trial.on == kept
        assert trial.note is not None
        assert trial.note.startswith("torch.compile saves" if kept else "torch.compile does not")


def test_a_short_training_is_not_compiled() -> None:
    trial = Compiling("auto", "plain", lambda: "compiled")
    while not trial.decided:
        assert trial.current == "plain"
        trial.took(0.1, left=100)
    assert not trial.on


def test_a_compiler_that_fails_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.training.machine.compiling.WORTH", -1.0)

    def broken(_module: nn.Module) -> Any:
        return nn.Sequential(nn.Linear(1, 1))  # of another shape: fails when it runs

    monkeypatch.setattr(torch, "compile", broken)
    given = trained(tmp_path, compile="auto")
    assert "torch.compile can't" in given.details["compile_note"]
    monkeypatch.undo()
    assert same(weights(given), weights(trained(tmp_path)))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"train_precision": "16-mixed"}, "16-mixed on a CPU"),
        ({"patience": 2}, "can't stop early"),
        ({"augment": ("twist",)}, "no augmentation 'twist'"),
        ({"augment": ("shift:x.y",)}, "can't find the augmentation"),
        ({"feature_weight": 1.0}, "can't teach features"),
        ({"hold_out": 1.0}, "can't finetune with these options"),
        ({"hold_out": 0.999}, "can't train and judge on this data"),
        ({"devices": 4, "batch_size": 3}, "can't finetune with these options"),
        ({"accumulate": 0}, "can't finetune with these options"),
        ({"devices": 0}, "can't finetune with these options"),
        pytest.param({"accelerator": "cuda"}, "can't train on a GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
    ],
    ids=str,
)  # fmt: skip
def test_what_can_not_work_is_refused_before_any_work(tmp_path: Path, options: dict[str, Any], what: str) -> None:
    with pytest.raises(RecipeError) as caught:
        stage(tmp_path, **options).check(model(tmp_path, "student", 8))
    assert what in caught.value.what


def test_nothing_to_learn_from_is_refused(tmp_path: Path) -> None:
    student = model(tmp_path, "student", 8)
    np.save(tmp_path / "x.npy", patterns(10)[0])
    with pytest.raises(RecipeError, match="nothing to learn"):
        Finetune(Dataset.open(str(tmp_path / "x.npy"), student.signature), None).check(student)


@pytest.mark.parametrize("kind", ["finetune", "train_quantized"])
def test_what_was_interrupted_goes_on_and_ends_in_the_same_bits(tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {"taught": True, "epochs": 4, "hold_out": 0.2, "ema": 0.9}
    tuned: Any = stage(tmp_path, **options)
    if kind == "train_quantized":
        tuned = TrainQuantized(tuned)
    student = model(tmp_path, "student", 8, dropout=0.2)

    class Pulled(Exception):  # noqa: N818
        """The plug."""

    def pull(done: int, total: int, note: str) -> None:
        if note.startswith("epoch 3") and done % 7 == 4:
            raise Pulled

    folders = [tmp_path / name for name in ("whole", "pulled")]
    for folder in folders:
        folder.mkdir()
    whole = tuned.run(student, folders[0], lambda _d, _t, _n: None)
    with pytest.raises(Pulled):
        tuned.run(student, folders[1], pull)
    again = tuned.run(student, folders[1], lambda _d, _t, _n: None)
    assert again.details["resumed_at_step"] == 14
    assert same(weights(whole), weights(again))
    assert [row["loss"] for row in whole.details["history"]] == [row["loss"] for row in again.details["history"]]
    assert not list(folders[1].iterdir())


def test_what_an_earlier_release_could_is_accepted_and_told_of(tmp_path: Path) -> None:
    for name in ("usual", "asked"):
        (tmp_path / name).mkdir()
    usual = trained(tmp_path / "usual", epochs=1)
    given = trained(tmp_path / "asked", epochs=1, optimizer="lamb", sampler="entropy")
    assert same(weights(usual), weights(given))
    optimizer, sampler = (warning for warning in given.warnings if warning not in usual.warnings)
    assert optimizer.startswith("--optimizer lamb is gone: AdamW is used")
    assert sampler.startswith("--sampler entropy is gone")
