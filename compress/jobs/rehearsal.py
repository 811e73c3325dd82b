"""How long a stage takes: it is begun for real, on few samples and for few steps, and what it writes is thrown away."""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.evaluate.judge import Judge, spread
from compress.model import Model, OnnxModel, sample_inputs
from compress.prune.blocks.choose_blocks import JUDGED as CHOSEN_BY
from compress.prune.drop_blocks import DropBlocks
from compress.prune.prune_to_budget import STEPS, PruneToBudget
from compress.prune.repair_channels import RepairChannels
from compress.quantize.faster import LONGER, ROUNDS, fastest, turns
from compress.quantize.int8_onnx import plain
from compress.quantize.qat.train_quantized import TrainQuantized
from compress.quantize.quantize_faster import QuantizeFaster, mixture_of
from compress.quantize.quantize_onnx import QuantizeOnnx
from compress.quantize.quantize_within import QuantizeWithin
from compress.runtime.backends import OnnxBackend, open_model
from compress.runtime.latency import FEWEST, MOST, latency, measuring_seconds
from compress.runtime.measure import cores
from compress.stage import Given, Progress, Stage
from compress.training.finetune import Finetune
from compress.training.loop import STATE_FILE
from compress.training.trial import SECONDS, Enough
from compress.training.tune.search import trainings_left

__all__ = ["Clock", "Tried", "rehearse", "turns_seconds"]

CALIBRATED = (8, 64)  # samples, at least and at most, that stand for all of a stage's calibration data
JUDGED = 64  # samples that stand for all that a choice is judged by
# What only the work itself can tell, and is taken as usual: how often a model is judged until it keeps --max-drop, and
# how many times as many mixtures --int8 auto measures as it begins with.
EVALUATIONS, FURTHER = 6, 1.5
FAR_LESS = 0.8  # of a training's time, with other threads, is worth a word


@dataclass(frozen=True)
class Tried:
    """What a stage gave that was only begun, and how long all of it would take.

    Attributes:
        given: its model stands for the stage's own.
        seconds: None where nobody can tell.
        one_thread: of a training, with one thread, where that takes far less.
        failed: what it ended with, where the run's may end otherwise.
    """

    given: Given
    seconds: float | None
    one_thread: float | None = None
    failed: str = ""


class Clock:
    """A progress that remembers when it was told what; it ends the work where that has shown how fast it goes."""

    def __init__(self, shown: Progress, *, enough: Callable[[Clock], bool] = lambda _clock: False) -> None:
        self._shown, self._enough = shown, enough
        self.begun = time.perf_counter()
        self.told: list[tuple[float, int, int, str]] = []

    def __call__(self, done: int, total: int, note: str = "") -> None:
        self.told.append((time.perf_counter(), done, total, note))
        self._shown(done, total, note)
        if self._enough(self):
            raise Enough

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.begun

    def each(self, note: str = "") -> float:
        """Seconds for one of what was done under a note; the first call is left out where there are others."""
        calls = [(at, done) for at, done, _, each in self.told if each == note or not note]
        if not calls:
            return 0.0
        first = calls[0] if len(calls) > 1 else (self.begun, 0)
        return (calls[-1][0] - first[0]) / max(1, calls[-1][1] - first[1])


def rehearse(stage: Stage, model: Model, folder: Path, kept: Path, progress: Progress) -> Tried:
    """Begin a stage, and tell how long it will take.

    Args:
        stage: of a pipeline.
        model: what the stages before it gave, or what stands for that: its weights may be others.
        folder: empty; for what it writes.
        kept: where a run would keep its output; beside it is what an interrupted one has left.
        progress: is told how it goes on.

    Raises:
        ToolkitError: whatever the stage would end with.
    """
    clock = Clock(progress)
    if isinstance(stage, Finetune | TrainQuantized):
        return _training(stage, model, folder, kept, clock)
    if isinstance(stage, PruneToBudget):
        return _budget(stage, model, folder, progress)
    if isinstance(stage, QuantizeWithin | QuantizeFaster):
        return _chosen(stage, model, folder, clock)
    if isinstance(stage, DropBlocks):
        return _blocks(stage, model, folder, clock)
    if isinstance(stage, RepairChannels):
        return _repair(stage, model, folder, clock)
    if stage.name == "engine_from_onnx":  # takes minutes, and says nothing on the way
        return Tried(Given(model, ""), None)
    return _calibrated(stage, model, folder, clock)


def _training(stage: Finetune | TrainQuantized, model: Any, folder: Path, kept: Path, clock: Clock) -> Tried:
    """Some steps of it, from where an interrupted one would go on; other data is used whole, or nearly."""
    part = kept.with_name(kept.name + ".part")
    for state in part.rglob(STATE_FILE):
        target = folder / state.relative_to(part)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(state, target)
    calibrating = 0.0
    if isinstance(stage, Finetune):
        given = dataclasses.replace(stage, trial=True).run(model, folder, clock)
    else:
        few, calibrating = _few(stage.quantize, model)
        tried = dataclasses.replace(stage.training, trial=True)
        given = dataclasses.replace(stage, training=tried, quantize=few).run(model, folder, clock)
        calibrating *= clock.each("calibrating")
    trial = given.details["trial"]
    beside = clock.spent - trial["spent"] + calibrating
    whole, alone = trial["whole"], trial.get("one_thread", math.inf)
    if isinstance(stage, Finetune):  # none of them ended early
        times = trainings_left(stage.training, part)
        whole, alone = times * whole, times * alone
    return Tried(given, beside + whole, beside + alone if alone < FAR_LESS * whole else None)


def _calibrated(stage: Any, model: Any, folder: Path, clock: Clock) -> Tried:
    """All of it, but for calibration data, of which some samples do."""
    few, more = _few(stage, model)
    given = few.run(model, folder, clock)
    return Tried(given, clock.spent + more * clock.each("calibrating"))


def _few(stage: Any, model: Model) -> tuple[Any, float]:
    """A stage with fewer samples to calibrate on, and how many they are fewer; the same where it takes none."""
    data = getattr(stage, "calibration", None)
    if not isinstance(data, Dataset):
        return stage, 0.0
    fewest, most = CALIBRATED
    few = spread(data, max(fewest, min(most, int(2 * SECONDS / max(1e-9, _call_seconds(model))))))
    return dataclasses.replace(stage, calibration=few), len(data) - len(few)


def _repair(stage: RepairChannels, model: Any, folder: Path, clock: Clock) -> Tried:
    """On some samples: all that it does is in proportion to them, but for the solving, which is little."""
    few = spread(stage.calibration, min(CALIBRATED[1], len(stage.calibration)))
    given = dataclasses.replace(stage, calibration=few).run(model, folder, clock)
    return Tried(given, clock.spent * len(stage.calibration) / len(few))


def _blocks(stage: DropBlocks, model: Any, folder: Path, clock: Clock) -> Tried:
    """Chosen by some samples, which nearly all of the time is in proportion to."""
    few = spread(stage.calibration, min(CALIBRATED[1], len(stage.calibration)))
    given = dataclasses.replace(stage, calibration=few).run(model, folder, clock)
    return Tried(given, clock.spent * min(CHOSEN_BY, len(stage.calibration)) / len(few))


def _call_seconds(model: Model) -> float:
    backend, inputs = open_model(model, threads=cores()), sample_inputs(model.signature, 1)
    backend.infer(inputs)
    begun = time.perf_counter()
    backend.infer(inputs)
    return time.perf_counter() - begun


def _budget(stage: PruneToBudget, model: Any, folder: Path, progress: Progress) -> Tried:
    """The model as it is, taken to its end and measured once, then pruned by half; each further step is another such.

    One that is inside its budget already is not pruned.
    """
    measured = Clock(progress, enough=lambda clock: clock.told[-1][1:3] not in ((0, STEPS + 2), (1, STEPS + 2)))
    with suppress(Enough):
        return Tried(stage.run(model, folder, measured), measured.spent)
    value = next((at for at, done, total, _ in measured.told if (done, total) == (1, STEPS + 2)), measured.begun)
    once, clock = value - measured.begun, Clock(progress)
    given = Given(model, "")
    with suppress(StageError):  # another fraction may do
        given = dataclasses.replace(stage.prune, fraction=0.5).run(model, folder, clock)
    return Tried(given, clock.spent + (1 + STEPS) * once)


def _chosen(stage: QuantizeWithin | QuantizeFaster, model: Any, folder: Path, clock: Clock) -> Tried:
    """Quantized once; then one group of mixtures is timed, and what a judge takes for some samples."""
    tried = _calibrated(stage.quantize, model, folder, clock)
    assert tried.seconds is not None  # noqa: S101  such a stage is timed
    seconds = tried.seconds
    threads = stage.threads if isinstance(stage, QuantizeFaster) else stage.faster
    if threads is not None:
        seconds += _mixtures(stage.quantize, model, threads, clock)
    if isinstance(stage, QuantizeWithin):
        begun, few = time.perf_counter(), spread(stage.data, JUDGED)
        judge = Judge(open_model(stage.reference, threads=cores()), few, stage.metric, confidence=stage.confidence)
        reference = time.perf_counter() - begun
        assert isinstance(tried.given.model, OnnxModel)  # noqa: S101  it is quantized
        judge.drop(OnnxBackend(tried.given.model, cores()))
        once = time.perf_counter() - begun - reference
        seconds += (reference + EVALUATIONS * once) * len(stage.data) / len(few)
    return Tried(tried.given, seconds)


def _mixtures(quantize: QuantizeOnnx, model: OnnxModel, threads: int, shown: Progress) -> float:
    """Seconds for all that are measured, from the first of them."""
    few, _ = _few(quantize, model)
    original = plain(model.path)
    mixture = mixture_of(few, model, original, shown)
    clock = Clock(shown, enough=lambda _clock: True)
    with suppress(Enough):
        fastest(mixture, original, *turns(mixture, original, model, threads), clock)
    if not clock.told:  # there is nothing to choose
        return clock.spent
    at, done, total, _ = clock.told[0]
    measured = at - clock.begun
    one = measured / (done + 1)  # beside the best so far
    return one * FURTHER * (total - done) + 2 * LONGER * one + turns_seconds({"model": model}, threads, LONGER * ROUNDS)


def turns_seconds(models: dict[str, Model], threads: int, most: int = MOST, inputs: Any = None) -> float:
    """Seconds that models take turns for: two rounds for real, times what lies midway between the fewest and the most.

    Args:
        models: by name; those whose speed means nothing here take no turns.
        threads: of each.
        most: rounds.
        inputs: of a call; one sample, by default.
    """
    signature = next(iter(models.values())).signature
    opened = {name: open_model(model, threads=threads) for name, model in models.items()}
    clocked = {name: backend for name, backend in opened.items() if not backend.emulated}
    marks: list[float] = []
    begun = time.perf_counter()
    latency(
        clocked, sample_inputs(signature, 1) if inputs is None else inputs, rounds=2,
        progress=lambda _done, _total: marks.append(time.perf_counter()),
    )  # fmt: skip
    if not marks:
        return 0.0
    one = marks[1] - marks[0]
    midway = (FEWEST * most) ** 0.5 * one if most > FEWEST else most * one
    return max(0.0, marks[0] - begun - one) + min(midway, max(measuring_seconds(), FEWEST * one))
