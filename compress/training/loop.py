"""The training loop: epochs, validation, the state that is kept, and the way back when the loss is lost."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from compress.console.wording import Note, counted
from compress.errors import StageError
from compress.evaluate.output_kind import SHARES
from compress.evaluate.shares import UNSURE
from compress.model import call
from compress.model.frozen import freeze
from compress.options.training import unused_values
from compress.training.batches.answers import Answers
from compress.training.batches.augment import augmentation
from compress.training.batches.batch_size import BASE, scaled_rate, try_batch_sizes
from compress.training.batches.loader import Loader, example, seed_of, workers_for
from compress.training.batches.sampler import Sampler
from compress.training.frozen import frozen_for, note_of
from compress.training.journal import Journal
from compress.training.judging import Judge
from compress.training.labels import alone, counts, left_out
from compress.training.machine.gpu_watch import GpuWatch
from compress.training.machine.profile import Profile
from compress.training.machine.seeds import seed_device
from compress.training.machine.setup import device_kind, distributed, fabric_for, on_threads, refuse_others
from compress.training.machine.sharded import shard, share, whole
from compress.training.machine.synced_norm import synced
from compress.training.stepper import Stepper, copied
from compress.training.task import Task, Trained
from compress.training.trial import Enough, Pace, judged_in_time
from compress.training.updates.kept_state import KeptState
from compress.training.updates.newest import Newest
from compress.training.updates.precision import falls_back, precision_for
from compress.training.updates.rollback import Rollback
from compress.training.updates.schedule import SCHEDULES, one_cycle_momentum
from compress.training.updates.vet_state import fits

__all__ = ["STATE_FILE", "TRACE_FILE", "train"]

STATE_FILE, TRACE_FILE = "training.state", "trace.json"
AGREE_EVERY = 20  # steps between two questions to the first process whether it is time to keep the state
LOOK_EVERY = {"cpu": 1, "cuda": 20}  # steps between looks at the loss: on a GPU each is a wait
IDLE = (
    "Nothing was learned: in every step that was looked at the loss was 0, or the gradient of every weight exactly 0. "
    "The model answers as the original does already, or what is compared (`outputs` in the figures) does not hang on "
    "its weights: --loss says what an output is."
)

Progress = Callable[[int, int, str], None]


def train(task: Task, progress: Progress) -> Trained:
    """Train a module in place, and leave it in eval mode, without gradients, on the CPU.

    The result is the weights of the best epoch where there is validation data, else the moving average where one is
    kept, else the last weights.

    Args:
        task: what is trained, and on what.
        progress: is told of steps.

    Raises:
        StageError: the loss became infinite or NaN again and again.
    """
    module = task.module
    note, asked = note_of(module, task.options.freeze), [parameter.requires_grad for parameter in module.parameters()]
    freeze(module, frozen_for(module, task.options.freeze))
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(on_threads(task.options.train_threads, device_kind(task.options.accelerator)))
        training = _Training(task, progress, stack)
        trained = training.rehearsed() if task.trial else training.run()
        if training.task.module is not module:
            module.load_state_dict(whole(training.task.module.state_dict(), kept=True))
    module.to("cpu").to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]
    for parameter, wanted in zip(module.parameters(), asked, strict=True):
        parameter.grad = None
        parameter.requires_grad_(wanted)
    if note is not None:
        trained = dataclasses.replace(trained, warnings=(note, *trained.warnings))
    return trained


class _Training:
    def __init__(self, task: Task, progress: Progress, stack: ExitStack) -> None:
        self.begun = time.perf_counter()
        self.task, self.options, self.progress = task, task.options, progress
        kind = device_kind(self.options.accelerator)
        # bfloat16 has no number between 0.996 and 1, where most of what probabilities tell lies.
        rounded = self.options.train_precision == "auto" and any(
            form.ending in ("softmax", "sigmoid") for form in task.forms
        )
        exact = task.exact or rounded
        self.precision, note = precision_for(self.options.train_precision, task.module, kind, exact=exact)
        two = task.data.first(2)
        self.precision, odd = falls_back(
            self.options.train_precision, self.precision, task.module, kind,
            lambda: call(task.module, task.signature.inputs, two),
        )  # fmt: skip
        self.warnings = [*unused_values(self.options), *(said for said in (note, odd) if said is not None)]
        form = task.forms[task.labelled]
        labels, output = task.data.labels, task.signature.outputs[task.labelled]
        self.labels_teach = labels is not None and (task.teacher is None or counts(form, output, labels))
        if labels is not None and not self.labels_teach:
            why = f"they don't fit the output {output.name!r}, taken as {form.kind}"
            self.warnings.append(f"the labels don't count: {why}")
        if self.labels_teach and form.because == SHARES and form.ending is None:
            self.warnings.append(UNSURE)
        if self.labels_teach and (unknown := left_out(form, output, labels)) is not None:
            self.warnings.append(unknown)
        if self.labels_teach and (only := alone(labels, output)) is not None:
            self.warnings.append(
                f"All labels are of the class {only}: they teach to answer it always, and scores by them say no more."
            )
        if self.labels_teach and form.doubt:
            self.warnings.append(form.doubt)
        self.sharded = self.options.strategy == "fsdp" and distributed()
        self.fabric = fabric_for(kind, self.precision, task.module, sharded=self.sharded)
        if task.folder is not None:  # whose name says what is trained, on what
            refuse_others(self.fabric, task.folder.name + task.judged)
        self.device: torch.device = self.fabric.device
        first = self.fabric.is_global_zero
        folder = task.folder if first else None
        state = None if task.folder is None else task.folder / STATE_FILE
        self.kept = KeptState(state, self.options.checkpoint_seconds, writes=first)
        newest = Newest(self.kept, self.fabric, self.device, len(task.data))
        found = newest.next()
        trace = folder / TRACE_FILE if self.options.profile and folder is not None else None
        self.profile = Profile(trace, self.device)
        self.size, self.tried = self._batch_size(found)
        auto = self.options.batch_size == "auto"
        self.rate = scaled_rate(self.options.learning_rate, self.size) if auto else self.options.learning_rate
        self.sampler = Sampler(len(task.data), self.size, task.seed, task.data.starts)
        self.steps = self.options.epochs * self.sampler.steps
        self.fewest = max(2, self.fabric.world_size)  # samples of a step: batch normalization needs two
        if -(-len(task.data) // self.sampler.steps) < self.fewest:
            why = f"there is {len(task.data)} sample"
            if self.fewest > 2:
                shares = f"less than one sample for each of {counted(self.fabric.world_size, 'processes')}"
                why = f"batches of {self.size}, of {counted(len(task.data), 'samples')}, leave {shares}"
            raise StageError(
                "can't train",
                why=why,
                mend="give more samples, a larger --batch-size, or fewer processes",
            )
        if self.sharded:
            self.task = task = self._in_parts(task, stack)
        elif self.fabric.world_size > 1:
            task.module.to(self.device)  # later, buffers would be others than those that are wrapped here
            stack.enter_context(synced(task.module))
        self.stepper = Stepper(task, self.fabric, self.profile, self.rate, example(task.data, 2))
        if self.stepper.features is not None:
            stack.callback(self.stepper.features.close)
        self.stepper.answers = Answers.where_they_pay(task, self.stepper.ask_teacher, self.fabric, progress)
        self.judge = None
        if task.validation is not None:
            taught = self.stepper.teacher is not None
            self.judge = Judge(task.validation, task.signature, self.fabric, form, taught=taught, at=task.labelled)
        self.journal = Journal(self.steps, self.device, self.options.tensorboard if first else None)
        stack.callback(self.journal.close)
        self.step = 0
        self.idle: bool | None = None  # whether no step that was looked at had anything to learn
        self.best: dict[str, Any] | None = None
        self.rollback = Rollback(self._position(), self.options.learning_rate)
        self.resumed_at = None
        while found is not None and not self._can_go_on_from(found):
            newest.leave_out()
            found = newest.next()
        if found is not None:
            position = self._parts(found["position"])
            self._restore(position)
            self.rollback.restore(found["rollback"], position)
            self.warnings, self.resumed_at = list(found["warnings"]), self.step
        self.warnings += newest.warnings(used=found is not None)
        self.workers = workers_for(task.data, self.device, self.options.loader_workers)
        self.loader = Loader(
            task.data,
            augmentation(self.options.augment),
            task.seed,
            rank=self.fabric.global_rank,
            world=self.fabric.world_size,
            workers=self.workers,
            pinned=kind == "cuda",
            channels_last=self.options.channels_last,
        )
        stack.callback(self.loader.close)
        self.watch = stack.enter_context(GpuWatch(self.device.index if kind == "cuda" else None))

    def run(self) -> Trained:
        while self.step < self.steps and not self._enough():
            if self._epoch():
                self._after_epoch()
        self.profile.close()
        if self.best is not None:
            self.task.module.load_state_dict(self.best["state"])
        elif self.stepper.average is not None:
            self.task.module.load_state_dict(self.stepper.average.state)
        return self._ended()

    def _ended(self) -> Trained:
        """What there is to tell; what was kept for going on goes."""
        trained = self._trained()
        self.kept.drop()
        if self.stepper.answers is not None and self.task.among is None:  # others can use them, too
            self.stepper.answers.drop()
        return trained

    def rehearsed(self) -> Trained:
        """Some steps, a part of a validation, a state kept; how long all of it would take is among the figures."""
        answers, start = self.stepper.answers, self.step
        whole = time.perf_counter() - self.begun
        if answers is not None and answers.share:
            whole += answers.seconds * (1 / answers.share - 1)
        steps = self.steps - start
        pace, alone = self._pace(), None
        if self.device.type == "cpu" and self.options.train_threads is None and torch.get_num_threads() > 1:
            torch.set_num_threads(1)  # until the end of the training, which gives back what was before
            alone = self._pace()
        per_epoch = self._epochs_end(pace.seconds(steps) / max(1, steps))
        whole += pace.seconds(steps) + -(-steps // self.sampler.steps) * per_epoch
        self.journal.epoch(self.step, self.rate, None, None)
        trained = self._ended()
        found = {"spent": time.perf_counter() - self.begun, "whole": whole}
        if alone is not None and alone.seen:
            found["one_thread"] = whole + alone.seconds(steps) - pace.seconds(steps)
        return dataclasses.replace(trained, figures=trained.figures | {"trial": found})

    def _pace(self) -> Pace:
        """Of some steps, or of all that are left."""
        shown = self.progress
        self.progress = pace = Pace(self.step, self.fabric, shown)
        with suppress(Enough):
            while self.step < self.steps:
                self._epoch()
        self.progress = shown
        return pace

    def _epochs_end(self, step: float) -> float:
        """Seconds that go between two epochs, where a step takes so many."""
        begun = time.perf_counter()
        self._keep()
        kept = time.perf_counter() - begun
        if self.judge is None or self.task.validation is None:
            return kept
        few = judged_in_time(self.task.validation, step, self.size)
        begun = time.perf_counter()
        self._validate(self.judge.of(few))
        return kept + (time.perf_counter() - begun) * len(self.task.validation) / len(few)

    def _epoch(self) -> bool:
        """Train to the end of the epoch; False where it had to go back."""
        per_epoch = self.sampler.steps
        epoch, done = divmod(self.step, per_epoch)
        order = self.sampler.order(epoch)
        batches = iter(self.loader.batches(self.step, order[done:]))
        self.journal.resumes()
        for index in order[done:]:
            self.profile.begins()
            with self.profile.phase("data"):
                batch = next(batches)
            if len(index) < self.fewest:
                self.step += 1
                continue
            seed_device(seed_of(self.task.seed, self.step, self.fabric.global_rank), self.device)
            loss = self.stepper.gradients(batch, len(index))
            look = (self.step + 1) % LOOK_EVERY[self.device.type] == 0 or self.step + 1 == self.steps
            if self.idle is None or (self.idle and look):
                self.idle = float(loss) == 0 or self.stepper.pulls_nowhere()
            if look and not torch.isfinite(loss):
                self._go_back(f"the loss became {float(loss)}", self.step + 1)
                return False
            rate = self.rate * self.rollback.scale * SCHEDULES[self.options.schedule](self.step, self.steps)
            momentum = one_cycle_momentum(self.step, self.steps) if self.options.schedule == "one-cycle" else None
            self.stepper.update(rate, momentum, self.step + 1, self.steps - self.step - 1)
            self.step += 1
            self.journal.step(self.step, loss, len(index), rate, read=look)
            if look:
                self.progress(self.step, self.steps, self._note(epoch))
            if look and self.step % per_epoch and self._time_to_keep():
                self._keep()
        return True

    def _time_to_keep(self) -> bool:
        if self.fabric.world_size == 1:
            return self.kept.due()
        return self.step % AGREE_EVERY == 0 and bool(self.fabric.broadcast(self.kept.due()))

    def _enough(self) -> bool:
        """Whether the best epoch is too long ago."""
        epoch, within = divmod(self.step, self.sampler.steps)
        return self.best is not None and within == 0 and 0 < self.options.patience <= epoch - self.best["epoch"]

    def _after_epoch(self) -> None:
        """Validate, learn from the scores, keep the state."""
        if not self.stepper.sound():  # the last step's loss was still a number, what it did to the weights is none
            self._go_back("weights became infinite or NaN", self.step)
            return
        value = metric = None
        if self.judge is not None:
            value, metric = self._validate(self.judge), self.judge.metric.name
            if self.judge.better(value, None if self.best is None else self.best["value"]):
                average = self.stepper.average
                state = self.task.module.state_dict() if average is None else average.state
                self.best = {"value": value, "epoch": self.step // self.sampler.steps, "state": copied(state)}
        self.journal.epoch(self.step, self.rate * self.rollback.scale, value, metric)
        if self.judge is not None and self.task.among is not None:  # before the state is kept: who goes on asks again
            self.task.among.judged([row["validation"] for row in self.journal.epochs], self.judge.metric)
        self._keep()

    def _validate(self, judge: Judge) -> float:
        average = self.stepper.average
        with nullcontext() if average is None else average.in_place():
            value = judge(self.task.module, self.stepper.teacher)
        self.stepper.train_mode()
        return value

    def _go_back(self, lost: str, step: int) -> None:
        what, seconds = f"{lost} in step {step} of {self.steps}", self.journal.seconds
        self._restore(self.rollback.after(what))
        self.journal.seconds = seconds  # they were spent
        self.stepper.forget_gradients()
        self.warnings.append(f"{what}: back to step {self.step}, and on at {self.rollback.scale:g} of the rate")

    def _keep(self) -> None:
        if self.stepper.sound():
            position = self.rollback.good = self._position()
            if self.sharded:
                position = whole(position, kept=self.fabric.is_global_zero)
            self.kept.keep(
                {
                    "position": position,
                    "rollback": self.rollback.state(),
                    "size": self.size,
                    "tried": dict(self.tried),
                    "warnings": list(self.warnings),
                }
            )
        self.journal.resumes()

    def _position(self) -> dict[str, Any]:
        """All that decides how the training goes on from here."""
        return {
            "step": self.step,
            "best": None if self.best is None else dict(self.best),
            "stepper": self.stepper.state(),
            "journal": self.journal.state(),
        }

    def _in_parts(self, task: Task, stack: ExitStack) -> Task:
        """A task whose model, and original, are in parts."""
        few = example(task.data, 2).inputs
        mesh = self.fabric.strategy.device_mesh["data_parallel"]
        found: list[nn.Module | None] = []
        for each in (task.module, task.teacher):
            own = None if each is None else copy.deepcopy(each)
            if own is not None:
                if each is task.module:
                    stack.enter_context(synced(own))
                shard(own, mesh, partial(call, own, task.signature.inputs, few))
            found.append(own)
        module, teacher = found
        assert module is not None  # noqa: S101  that of the task
        return dataclasses.replace(task, module=module, teacher=teacher)

    def _can_go_on_from(self, found: dict[str, Any]) -> bool:
        """Whether this training has written it, with batches as they are now."""
        judged = self.judge is not None
        return found["size"] == self.size and fits(found["position"], self.rollback.good, self.steps, judged=judged)

    def _parts(self, position: dict[str, Any]) -> dict[str, Any]:
        """A position that was kept, as this process has it."""
        best = position["best"]
        if self.sharded and best is not None:
            best = {**best, "state": share(best["state"], self.task.module.state_dict())}
        return {**position, "stepper": self.stepper.parts(position["stepper"]), "best": best}

    def _restore(self, position: dict[str, Any]) -> None:
        self.step, self.best = position["step"], position["best"]
        self.stepper.restore(position["stepper"])
        self.journal.restore(position["journal"])

    def _batch_size(self, found: dict[str, Any] | None) -> tuple[int, dict[int, float | None]]:
        asked = self.options.batch_size
        if asked != "auto":
            return asked, {}
        if found is not None:
            return found["size"], found["tried"]
        tried = try_batch_sizes(self.task, self.fabric)
        return tried.size, dict(tried.throughput)

    def _note(self, epoch: int) -> str:
        parts = [f"epoch {epoch + 1}/{self.options.epochs}, loss {self.journal.loss:.4f}"]
        if self.best is not None and self.judge is not None:
            value = self.best["value"]
            shown = f"{value:.2%}" if self.judge.metric.scale == 100 else f"{value:.4g}"
            parts.append(f"{self.judge.metric.name} {shown}")
        if self.journal.speed:
            parts.append(f"{self.journal.speed:,.0f}/s")
        return ", ".join(parts)

    def _trained(self) -> Trained:
        epochs = self.journal.epochs
        figures = (
            self.journal.figures()
            | self.stepper.figures()
            | {
                "steps": self.step,
                "samples": len(self.task.data),
                "batch_size": self.size,
                "batch_sizes_tried": {str(size): speed for size, speed in self.tried.items()},
                "learning_rate": self.rate,
                "precision": self.precision,
                "device": str(self.device) if self.device.type == "cpu" else torch.cuda.get_device_name(self.device),
                "processes": self.fabric.world_size,
                "threads": torch.get_num_threads(),
                "loader_workers": self.workers,
                "rollbacks": self.rollback.count,
                "outputs": {
                    spec.name: {"taken_as": str(form.kind), "ending": form.ending, "because": form.because}
                    for spec, form in zip(self.task.signature.outputs, self.task.forms, strict=True)
                    if spec.dtype.startswith("float")  # flags and counts have no gradient
                },
                "resumed_at_step": self.resumed_at,
            }
        )
        if self.fabric.world_size > 1:
            figures["strategy"] = self.options.strategy
        notes = [*self.warnings]
        if self.idle:
            notes.append(IDLE)
        outputs = self.task.signature.outputs
        if self.labels_teach and len(outputs) > 1:
            notes.append(
                Note(
                    f"The model gives {counted(len(outputs), 'outputs')}: the labels teach "
                    f"{outputs[self.task.labelled].name!r}; to teach another that holds them, name it: --judge."
                )
            )
        if self.best is not None and self.judge is not None:
            figures |= {"best_epoch": self.best["epoch"], "best_value": self.best["value"]}
            figures |= {"validation_metric": self.judge.metric.name}
        if self.profile.figures:
            figures["profile"] = self.profile.figures
        if self.device.type == "cuda":
            figures["gpu"] = self.watch.samples
            if self.watch.reason is not None:
                figures["gpu_unknown"] = self.watch.reason
        if self.options.batch_size == "auto" and self.size != BASE:
            notes.append(f"batch size {self.size} found by trying, the rate scaled to {self.rate:.2g}")
        return Trained(epochs[0]["loss"], epochs[-1]["loss"], self.step, figures, tuple(notes))
