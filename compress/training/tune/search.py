"""Train several times with other settings, end early what is worse than half of the others, and keep the best."""

from __future__ import annotations

import copy
import dataclasses
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.console.wording import Note, counted
from compress.errors import StageError
from compress.evaluate.metrics import METRICS, Metric
from compress.model import TorchModel
from compress.options.training import TrainingOptions
from compress.stage import Progress
from compress.training.task import Among, Trained
from compress.training.tune.kept import FOLDER, Kept, Trial
from compress.training.tune.sampling import BAYESIAN, Method, optuna_of, seed_of, suggested
from compress.training.tune.space import Range, Settings, Space, flags_of, mean_share, space_of
from compress.training.tune.vet_trial import QUARTERS

if TYPE_CHECKING:
    from compress.training.finetune import Finetune

__all__ = ["Found", "Search", "trainings_left"]

SHOWN = 1000  # of the bar, for a trial
RIGHT_OR_WRONG = ("top1", "top5", "agreement")  # metrics whose scores of samples are 0 or 1


class _Ended(BaseException):
    """A trial is not worth going on with; nothing that expects a failure is to catch it."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search gives.

    Attributes:
        module: the network of the best trial.
        options: what it was trained with.
        trained: how that went.
        did: a clause for people.
        details: JSON values, for the report.
        notes: what to know.
    """

    module: nn.Module
    options: TrainingOptions
    trained: Trained
    did: str
    details: Mapping[str, Any]
    notes: tuple[str, ...]


class Search:
    """Trials of one training, one after the other.

    What is proposed follows from the seed, the number of the trial and what the ones before gave: those that a folder
    keeps of an interrupted search are told again, not trained again, and what comes after is the same.

    Args:
        stage: what is trained, with the number of trials.
        model: what each trial begins from.
        folder: keeps the trials.
        progress: is told how it goes on.
        method: who proposes, and who ends trials.
    """

    def __init__(
        self, stage: Finetune, model: TorchModel, folder: Path, progress: Progress, method: Method = BAYESIAN
    ) -> None:
        self._stage, self._model, self._progress, self._method = stage, model, progress, method
        assert stage.training.tune_training is not None  # noqa: S101  the caller looked
        self._wanted = stage.training.tune_training
        self._folder = folder / FOLDER
        self._shared = self._folder / "shared"
        self._shared.mkdir(parents=True, exist_ok=True)
        self._kept = Kept(self._folder)
        self._space: Space = space_of(stage.training, stage.samples, softens=stage.softens(model))
        self.trials: list[Trial] = []
        self._number = 0

    def run(self) -> Found:
        """All trials; the first with what was asked for.

        Raises:
            StageError: all of them failed.
        """
        optuna = optuna_of()
        states = optuna.trial.TrialState
        study = optuna.create_study(direction="minimize", pruner=self._method.pruner(optuna))
        study.enqueue_trial(self._asked)
        for number in range(self._wanted):
            self._number = number
            study.sampler = self._method.sampler(optuna, seed_of(self._stage.seed, number), self._wanted)
            asked = study.ask()
            proposed = suggested(asked, self._space)
            settings = self._asked if number == 0 else self._told(proposed)
            trial = self._kept.take(number, settings, next((each.metric for each in self.trials if each.metric), ""))
            if trial is None:
                trial = self._train(settings, asked)
            else:
                for quarter, value in trial.reported.items():
                    asked.report(trial.cost(value), quarter)
            self.trials.append(trial)
            if trial.value is None:  # of one that failed nothing was reported: it counts as worse than any that was
                study.tell(asked, state=states.PRUNED)
            else:
                study.tell(asked, trial.cost(trial.value))
        return self._found()

    @property
    def _asked(self) -> Settings:
        return {name: getattr(self._stage.training, name) for name in self._space}

    def _told(self, proposed: Settings) -> Settings:
        """Rounded, so that flags that ask for them train the same."""
        return {
            name: within.told(proposed[name]) if isinstance(within, Range) else proposed[name]
            for name, within in self._space.items()
        }

    @property
    def best(self) -> int | None:
        """The number of the best trial so far, of equal ones the first; None if there is none."""
        whole = [(trial.cost(trial.value), at) for at, trial in enumerate(self.trials) if trial.value is not None]
        return min(whole)[1] if whole else None

    def _train(self, settings: Settings, asked: Any) -> Trial:
        """One trial, from where an interrupted one had come to; what it gave is kept."""
        begun, module = time.perf_counter(), copy.deepcopy(self._model.module)
        trial = Trial(settings)
        try:
            trained, trial = self._fit(module, settings, asked)
        except (StageError, torch.OutOfMemoryError) as err:
            why = f"{err.what}: {err.why}" if isinstance(err, StageError) else "the device has not enough memory for it"
            trial, trained = dataclasses.replace(trial, failed=why), None
        trial = dataclasses.replace(trial, seconds=time.perf_counter() - begun, trained=trained)
        before = None if self.best is None else self.trials[self.best]
        if trial.value is not None:
            least = math.inf if before is None or before.value is None else before.cost(before.value)
            if trial.cost(trial.value) < least:  # of equal ones the first stays
                self._kept.keep_weights(self._number, module.state_dict())
        self._kept.keep(self._number, trial)
        shutil.rmtree(self._kept.at(self._number), ignore_errors=True)
        return trial

    def _fit(self, module: nn.Module, settings: Settings, asked: Any) -> tuple[Trained | None, Trial]:
        """Train a module, and tell Optuna's trial how it does; without one, to the end.

        Raises:
            StageError: it can't be trained with these settings.
        """
        work = self._kept.at(self._number)
        work.mkdir(exist_ok=True)
        trial = Trial(settings)

        def judged(values: Sequence[float], metric: Metric) -> None:
            nonlocal trial
            trial = dataclasses.replace(trial, metric=metric.name, higher_is_better=metric.higher_is_better)
            reported = _by_quarters(values, int(settings.get("epochs", self._stage.training.epochs)), trial)
            new = {quarter: value for quarter, value in reported.items() if quarter not in trial.reported}
            trial = dataclasses.replace(trial, reported={**trial.reported, **new})
            if asked is None or not new:
                return
            for quarter, value in new.items():
                asked.report(trial.cost(value), quarter)
            if max(reported) < QUARTERS and asked.should_prune():
                trial = dataclasses.replace(trial, pruned_at=max(reported))
                raise _Ended

        stage = dataclasses.replace(self._stage, training=self._options(settings))
        try:
            trained = stage.fit(
                module, self._model.signature, self._shown, folder=work, among=Among(self._shared, judged)
            )
        except _Ended:
            return None, trial
        value = trained.figures.get("best_value")
        if value is None or not math.isfinite(value):
            return None, dataclasses.replace(trial, failed="its scores on the held-out samples are no numbers")
        return trained, dataclasses.replace(trial, value=value)

    def _options(self, settings: Settings) -> TrainingOptions:
        return dataclasses.replace(
            self._stage.training, **settings, tune_training=None, profile=False, tensorboard=None  # type: ignore[arg-type]
        )  # fmt: skip

    def _shown(self, done: int, total: int, note: str) -> None:
        """As a part of all trials, which are as long as they turn out to be."""
        share = done / max(1, total) if note.startswith("epoch") else 0.0
        told = [f"trial {self._number + 1}/{self._wanted}", note]
        if self.best is not None and (value := self.trials[self.best].value) is not None:
            told.insert(1, f"best {_shown(self.trials[self.best].metric, value)}")
        self._progress(int(SHOWN * (self._number + share)), SHOWN * self._wanted, ", ".join(told))

    def _found(self) -> Found:
        module, best = self._whole()
        trial = self.trials[best]
        trained = trial.trained
        assert trained is not None  # noqa: S101  it has a score
        shutil.rmtree(self._shared, ignore_errors=True)
        self._kept.drop_weights()
        held = self._stage.held
        details = {
            "metric": trial.metric,
            "higher_is_better": trial.higher_is_better,
            "samples": held,
            "best": best,
            "flags": flags_of(trial.settings),
            "trials": [each.to_dict() for each in self.trials],
        }
        return Found(
            module, self._options(trial.settings), trained, self._did(best, held), details, self._notes(best, held)
        )

    def _whole(self) -> tuple[nn.Module, int]:
        """The network of the best trial, and its number. Without its weights it is trained again, and what that gives
        counts: where it is not the best any more, another is.

        Raises:
            StageError: all of them failed.
        """
        again: set[int] = set()
        while (best := self.best) is not None:
            module = copy.deepcopy(self._model.module)
            weights = self._kept.weights(best, module.state_dict())
            if weights is not None:
                module.load_state_dict(weights)
                return module.eval(), best
            self._number, trial = best, self.trials[best]  # damaged, or the run ended between this and what came after
            trained, new = self._fit(module, trial.settings, None)
            shutil.rmtree(self._kept.at(best), ignore_errors=True)
            self.trials[best] = dataclasses.replace(new, seconds=trial.seconds, trained=trained)
            if self.best == best or (best in again and trained is not None):
                return module, best
            again.add(best)
        raise StageError(
            "no training of the search gave a network",
            why=f"all {counted(len(self.trials), 'trials')} failed, the first so: {self.trials[0].failed}",
            mend="try a lower --learning-rate, or leave --tune-training out to see the training alone",
        )

    def _did(self, best: int, held: int) -> str:
        ended = sum(trial.pruned_at is not None for trial in self.trials)
        failed = sum(bool(trial.failed) for trial in self.trials)
        rest = [f"{ended} ended early"] * bool(ended) + [f"{failed} failed"] * bool(failed)
        tried = counted(len(self.trials), "trials") + (f" ({', '.join(rest)})" if rest else "")
        trial, first = self.trials[best], self.trials[0]
        assert trial.value is not None  # noqa: S101  it is the best
        by = f"by {trial.metric} of {counted(held, 'held-out samples')}, {_shown(trial.metric, trial.value)}"
        if best == 0:
            return f"settings as asked for: none of {tried} was better {by}"
        asked = "failed" if first.value is None else _shown(first.metric, first.value)
        return f"settings of the best of {tried} {by} (as asked for: {asked}): {flags_of(trial.settings)}"

    def _notes(self, best: int, held: int) -> tuple[str, ...]:
        """Whether the lead over what was asked for may be chance, where scores are right or wrong.

        The variance is that of two independent shares: of the same samples it is less, so that this says so too often.
        """
        trial, first = self.trials[best], self.trials[0]
        if best == 0 or trial.value is None or first.value is None or trial.metric not in RIGHT_OR_WRONG:
            return self._refused
        lead = abs(trial.value - first.value)
        spread = sum(value * (1 - value) / held for value in (trial.value, first.value))
        if lead >= 2 * math.sqrt(spread):
            return self._refused
        words = f"The settings found lead those asked for by {counted(round(lead * held), 'samples')} of {held}"
        return (*self._refused, Note(f"{words} that were held out, and were chosen by them: that may be chance."))

    @property
    def _refused(self) -> tuple[str, ...]:
        """What an interrupted search had kept and this one did not take."""
        if not (numbers := self._kept.refused):
            return ()
        which = counted(len(numbers), "trials")
        return (f"what an interrupted run had kept of {which} can't be used: trained again",)


def trainings_left(options: TrainingOptions, folder: Path) -> float:
    """How many trainings, as long as the one that was asked for, a search would take that goes on in a folder, at most.

    Args:
        options: of the search.
        folder: of the stage; need not be there.
    """
    wanted = options.tune_training or 1
    done = min(wanted, Kept(folder / FOLDER).count())
    share = mean_share(options.epochs)
    return (wanted - done) * share if done else 1 + (wanted - 1) * share


def _by_quarters(values: Sequence[float], epochs: int, trial: Trial) -> dict[int, float]:
    """The best score so far at the end of each quarter of the epochs; of several that end at once, the last."""
    found: dict[int, float] = {}
    for done in range(1, len(values) + 1):
        quarter = QUARTERS * done // epochs
        known = [value for value in values[:done] if math.isfinite(value)]
        if quarter > QUARTERS * (done - 1) // epochs and known:
            found[quarter] = min(known, key=trial.cost)
    return found


def _shown(metric: str, value: float) -> str:
    known = METRICS.get(metric)
    return f"{value:.2%}" if known is not None and known.scale == 100 else f"{value:.4g}"
