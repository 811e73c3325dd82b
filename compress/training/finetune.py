"""A short training that recovers what pruning lost, taught by the original model."""

from __future__ import annotations

import copy
import dataclasses
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from torch import nn

from compress.artifact import Signature
from compress.console.wording import counted
from compress.data.dataset import Dataset
from compress.errors import RecipeError
from compress.evaluate.labels_told import squeezed
from compress.evaluate.output_forms import forms_by, labelled_output
from compress.evaluate.output_kind import OutputForm, OutputKind, class_axis
from compress.model import Model, TorchModel
from compress.model.in_order import in_order_of
from compress.options.training import TrainingOptions
from compress.stage import Given, Progress
from compress.training.batches.augment import augmentation, code_of, refuse_augmentation
from compress.training.frozen import frozen_for
from compress.training.labels import refuse_labels, watched
from compress.training.loop import train
from compress.training.machine.setup import device_kind, distributed, fabric_class, launched, local_rank
from compress.training.task import Among, Task, Trained
from compress.training.tune.sampling import optuna_of
from compress.training.tune.search import Search
from compress.training.tune.space import broken
from compress.training.updates.precision import precision_for

__all__ = ["Finetune", "details_of", "place_of", "told"]

# What changes how a training runs, but not what it gives.
_ELSEWHERE = (
    "train_threads", "loader_workers", "cache_data", "checkpoint_seconds", "profile", "tensorboard", "validation",
)  # fmt: skip
_RANGED = (
    "epochs", "batch_size", "learning_rate", "distillation", "temperature", "label_smoothing", "ema", "hold_out",
    "feature_weight", "accumulate", "devices", "patience",
)  # fmt: skip
_RANGES = "epochs, parts and devices: 1 or more; a batch: 2 or more; rate and temperature: above 0; shares: 0 to 1"


@dataclass(frozen=True)
class Finetune:
    """Train the model for some epochs on the answers of a teacher, and on labels where there are some.

    Attributes:
        data: inputs, and labels [n] if it has them.
        teacher: the original model; None where the labels alone teach.
        training: the options of the training.
        seed: of everything random.
        validation: data to judge epochs by; a share of `data` is, where the options say so.
        evaluation: the hash of what the result is judged by afterwards, which nothing here should have seen.
        labelled: the output that labels teach, where they fit several.
        trial: take some steps alone, and tell how long all would take.
    """

    data: Dataset
    teacher: TorchModel | None
    training: TrainingOptions = TrainingOptions()  # noqa: RUF009  frozen
    seed: int = 0
    validation: Dataset | None = None
    evaluation: str = ""
    labelled: str | None = None
    trial: bool = False

    name: ClassVar[str] = "finetune"
    takes: ClassVar[type] = TorchModel
    gives: ClassVar[type] = TorchModel
    resumes: ClassVar[bool] = True

    @property
    def devices(self) -> int:
        """How many processes share the training."""
        return self.training.devices

    def described(self) -> dict[str, Any]:
        """All but the teacher, as JSON values from which another process makes the stage again (`of`).

        Raises:
            RecipeError: data that another process can't open.
        """
        training = dataclasses.asdict(self.training)
        return {
            "data": place_of(self.data),
            "training": {name: str(value) if isinstance(value, Path) else value for name, value in training.items()},
            "seed": self.seed,
            "validation": None if self.validation is None else place_of(self.validation),
            "evaluation": self.evaluation,
            "labelled": self.labelled,
            "trial": self.trial,
        }

    @classmethod
    def of(cls, described: Mapping[str, Any], model: TorchModel, teacher: TorchModel | None) -> Self:
        """The stage that was described, its data opened for a model."""
        values = dict(described["training"])
        values["augment"], values["freeze"] = tuple(values["augment"]), tuple(values["freeze"])
        values["tensorboard"] = None if values["tensorboard"] is None else Path(values["tensorboard"])
        held = described["validation"]
        opened = {
            "data": Dataset.open(described["data"], model.signature),
            "training": TrainingOptions(**values),
            "validation": None if held is None else Dataset.open(held, model.signature),
        }
        return cls(**{**described, **opened}, teacher=teacher)

    @property
    def options(self) -> Mapping[str, Any]:
        asked = {
            field.name: getattr(self.training, field.name)
            for field in dataclasses.fields(self.training)
            if field.name not in _ELSEWHERE
        }
        named = {name: list(value) if isinstance(value, tuple) else value for name, value in asked.items()}
        validation = {} if self.validation is None else {"validation": self.validation.sha256}
        taught = {} if self.teacher is not None else {"teacher": None}
        code = {"code": found} if (found := code_of(self.training.augment)) else {}
        output = {} if self.labelled is None else {"labelled": self.labelled}
        if self.training.tune_training is None:
            del named["tune_training"]
        if self.training.strategy == "ddp":
            del named["strategy"]
        else:  # what is kept is whole, for any number of processes to go on from
            del named["devices"]
        return {"data": self.data.sha256, **named, "seed": self.seed, **validation, **taught, **code, **output}

    def check(self, model: Model) -> None:
        for wrong, what, why, mend in self._rules():
            if wrong:
                raise RecipeError(what, why=why, mend=mend)
        alone = self.training.devices == 1 and not launched()
        for why, mend in broken(self.training, len(self.data), self.held or None, alone=alone):
            raise RecipeError("can't search for settings of a training", why=why, mend=mend)
        if isinstance(model, TorchModel):
            if not model.layered:
                why = "TorchScript and exported programs have no layers any more"
                mend = "give the model from before, or leave it out"
                raise RecipeError("can't finetune this file", why=why, mend=mend)
            training, validation = self._fitting(model.signature)
            at = labelled_output(model.signature, training.labels, self.labelled, ask=True)
            output = model.signature.outputs[at]
            for data in (training, validation):
                if data is not None and data.labels is not None:
                    taught, loss = self.teacher is not None, self.training.loss
                    refuse_labels(data.labels, output, data.source, taught=taught, loss=loss)
            frozen_for(model.module, self.training.freeze)
            precision_for(self.training.train_precision, model.module, device_kind(self.training.accelerator))
        augmentation(self.training.augment)
        refuse_augmentation(self.training.augment, model.signature.inputs, self.data.labels)
        fabric_class()
        if self.training.tune_training is not None:
            optuna_of()

    @property
    def seen(self) -> tuple[str, ...]:
        """A warning where the result is judged by what it was made with."""
        if not self.evaluation:
            return ()
        if self.evaluation == self.data.sha256:
            return ("it was trained on the evaluation data, which tells nothing of other data then",)
        if self.validation is not None and self.evaluation == self.validation.sha256:
            return ("the best epoch was chosen by the evaluation data, which is too kind to it then: see --hold-out",)
        return ()

    def _rules(self) -> tuple[tuple[bool, str, str, str], ...]:
        o = self.training
        size = max(2, o.devices) if o.batch_size == "auto" else o.batch_size
        shares = (o.distillation, o.label_smoothing, o.ema, o.hold_out)
        judged = self.validation is not None or o.hold_out > 0
        return (
            (
                o.epochs < 1 or size < max(2, o.devices) or not 0 < o.learning_rate < math.inf or not o.temperature > 0
                or not all(0 <= share <= 1 for share in shares) or o.feature_weight < 0 or o.accumulate < 1
                or o.devices < 1 or (o.loader_workers or 0) < 0 or o.hold_out >= 1 or o.ema >= 1 or o.patience < 0,
                "can't finetune with these options",
                ", ".join(f"{name}={getattr(o, name)}" for name in _RANGED),
                _RANGES,
            ),
            (
                0 < o.hold_out < 1 and self.samples < 2,
                "can't train and judge on this data",
                f"--hold-out {o.hold_out:g} of {counted(len(self.data), 'samples')} leaves fewer than 2 to train on",
                "hold fewer out, or give data to judge by with --validation",
            ),
            (
                o.strategy == "fsdp" and (o.gradient_checkpointing or o.compile == "on" or o.batch_size == "auto"),
                "can't train a model in parts so",
                "--strategy fsdp goes with no --gradient-checkpointing, --compile on or --batch-size auto",
                "leave those out, or the strategy; a step in parts (--accumulate) needs less memory, too",
            ),
            (
                self.teacher is None and self.data.labels is None,
                "there is nothing to learn",
                "the data has no labels, and there is no original model to learn from",
                "add an array `label` to the data, or give the original with --teacher",
            ),
            (
                o.feature_weight > 0 and self.teacher is None,
                "can't teach features",
                "there is no original model to learn them from",
                "give it with --teacher, or leave --feature-weight out",
            ),
            (
                o.patience > 0 and not judged,
                "can't stop early",
                "nothing judges the epochs",
                "add --hold-out 0.05, or --validation data, or leave --patience out",
            ),
            (
                self.validation is not None and o.hold_out > 0,
                "can't judge epochs by two sets of data",
                "--validation and --hold-out are given",
                "leave one of them",
            ),
            (
                self.teacher is None and self.validation is not None and self.validation.labels is None,
                "can't judge epochs",
                "the validation data has no labels, and there is no original model to agree with",
                "add an array `label` to it, or give the original with --teacher",
            ),
        )  # fmt: skip

    @property
    def _tried(self) -> TrainingOptions:
        """Of a trial: what writes elsewhere is left out, and so is what tries something else first, for a minute."""
        compiled: Any = "off" if self.training.compile == "auto" else self.training.compile
        return dataclasses.replace(self.training, compile=compiled, profile=False, tensorboard=None)

    def _forms(self, model: TorchModel) -> tuple[tuple[OutputForm, ...], int]:
        """What each output is, and which of them labels teach; of that one, what was said of it, or what they tell."""
        forms, at = forms_by(model, self._fitting(model.signature)[0], self.labelled)
        if self.training.loss == "auto":
            return forms, at
        taught, shape = forms[at], model.signature.outputs[at].shape
        kind = OutputKind(self.training.loss)
        if kind is OutputKind.DENSE and len(shape) < 3:
            kind = OutputKind.SOFTMAX
        told = taught.kind in (OutputKind.SOFTMAX, OutputKind.DENSE)
        axis = taught.axis if told else class_axis(shape)
        asked = dataclasses.replace(taught, kind=kind, axis=axis, because="it was asked for")
        return (*forms[:at], asked, *forms[at + 1 :]), at

    def _fitting(self, signature: Signature) -> tuple[Dataset, Dataset | None]:
        """The data, and that of validation, with labels as an evaluation takes them, looked at as they come."""
        data = squeezed(_one_by_one(self.data), signature, self.labelled)
        output = signature.outputs[labelled_output(signature, data.labels, self.labelled)]
        if self.validation is None:
            return watched(data, output), None
        return watched(data, output), watched(squeezed(_one_by_one(self.validation), signature, self.labelled), output)

    @property
    def held(self) -> int:
        """Samples that judge epochs."""
        if self.validation is not None:
            return len(self.validation)
        return max(1, round(len(self.data) * self.training.hold_out)) if self.training.hold_out else 0

    @property
    def samples(self) -> int:
        """To train on."""
        return len(self.data) - (self.held if self.training.hold_out else 0)

    def softens(self, model: TorchModel) -> bool:
        """Whether the temperature counts: the original teaches, and an output is of classes."""
        if self.teacher is None or not self.training.distillation:
            return False
        forms, _ = self._forms(in_order_of(self.teacher, model.signature))
        return any(form.kind in (OutputKind.SOFTMAX, OutputKind.DENSE) for form in forms)

    def run(self, model: TorchModel, folder: Path, progress: Progress) -> Given:
        if self.training.devices > 1 and not distributed():
            from compress.training.in_processes import in_processes

            return in_processes(self, model, folder, progress)
        if self.training.tune_training is not None and not self.trial:
            found = Search(self, model, folder, progress).run()
            did = f"trained {told(found.trained, found.options)}, {found.did}"
            details = {**details_of(found.trained), "tuning": dict(found.details)}
            words = (*found.trained.warnings, *found.notes)
            return Given(TorchModel(found.module, model.signature), did, details, words)
        module = copy.deepcopy(model.module)
        trained = self.fit(module, model.signature, progress, folder=folder)
        did = f"trained {told(trained, self.training)}"
        return Given(TorchModel(module, model.signature), did, details_of(trained), trained.warnings)

    def fit(
        self,
        module: nn.Module,
        signature: Signature,
        progress: Progress,
        *,
        folder: Path | None = None,
        exact: bool = False,
        like: TorchModel | None = None,
        among: Among | None = None,
    ) -> Trained:
        """Train a module in place, and leave it in eval mode without gradients.

        Args:
            module: is trained.
            signature: of it.
            progress: is told of steps.
            folder: keeps the state, so that an interrupted training goes on.
            exact: all in float32.
            like: what its outputs' kinds are told by, where that is not the original or itself.
            among: what it shares with others, where it is one of several trainings.

        Raises:
            StageError: the loss became infinite or NaN, and going back did not help.
        """
        data, validation = self._fitting(signature)
        if self.training.hold_out:
            order = np.random.default_rng(self.seed).permutation(len(data))
            held = self.held
            data, validation = data.part(np.sort(order[held:])), data.part(np.sort(order[:held]))
        work = folder if among is None else among.folder
        cache = None if work is None or data.fetcher is None or not self.training.cache_data else work / "cache"
        if cache is not None and data.fetcher is not None:
            data.fetcher.keep_in(cache)
        original = None if self.teacher is None else in_order_of(self.teacher, signature)
        teacher = None if original is None else original.module
        forms, at = self._forms(original or like or TorchModel(module, signature))
        options = self._tried if self.trial else self.training
        task = Task(
            module, teacher, signature, data, validation, options, self.seed, folder, exact, forms, at, self.trial,
            among, self.evaluation,
        )  # fmt: skip
        trained = train(task, progress)
        if cache is not None and among is None and local_rank() == 0:
            shutil.rmtree(cache, ignore_errors=True)
        return trained


def details_of(trained: Trained) -> dict[str, Any]:
    """For the stage's report."""
    return {"loss_first_epoch": trained.first, "loss_last_epoch": trained.last, **trained.figures}


def told(trained: Trained, options: TrainingOptions) -> str:
    """A clause for people."""
    epochs = len(trained.figures["history"])
    done = f"{epochs} of {counted(options.epochs, 'epochs')}" if epochs < options.epochs else counted(epochs, "epochs")
    text = f"{done} on {counted(trained.figures['samples'], 'samples')}"
    # Each is the mean of an epoch: of one there is nothing to compare.
    text += f", loss {trained.first:.4f}" + (f" to {trained.last:.4f}" if epochs > 1 else "")
    if "best_epoch" in trained.figures:
        text += f", best after epoch {trained.figures['best_epoch']} by {trained.figures['validation_metric']} of "
        text += "the validation data" if options.hold_out == 0 else f"{options.hold_out:.0%} that were held out"
    kinds = ", ".join(f"{name} as {output['taken_as']}" for name, output in trained.figures["outputs"].items())
    text += f", {kinds}"
    if trained.figures["resumed_at_step"]:
        text += f", went on at step {trained.figures['resumed_at_step']}"
    return text


def place_of(data: Dataset) -> str:
    """Where another process opens the same data.

    Raises:
        RecipeError: it is in this process's memory alone.
    """
    if not data.place:
        raise RecipeError(
            "can't train in several processes",
            why="the data is in this process's memory alone",
            mend="give it as a file, a folder or package.module:function",
        )
    return data.place


def _one_by_one(data: Dataset) -> Dataset:
    """Each of a pair by itself, without the score, which says nothing of one."""
    return dataclasses.replace(data, labels=None, pairs=False) if data.pairs else data
