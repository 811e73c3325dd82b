"""The candidates of one pruning ratio: made one after the other, and screened; here, in a process, or elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.console.wording import counted
from compress.errors import RecipeError, ResourceError, ToolkitError
from compress.evaluate.candidates import Candidate
from compress.evaluate.evaluation import Evaluation, evaluation_of
from compress.evaluate.gains import drop_told, signed
from compress.evaluate.intervals import percent
from compress.evaluate.judge import Judge
from compress.evaluate.search_result import Trial
from compress.formats.files import size_of
from compress.jobs.original import Original, original
from compress.jobs.recipe import sources_of, stages_for
from compress.model import OnnxModel
from compress.options import OptimizeOptions
from compress.pipeline import Outcome, Watcher, check, key_of, run
from compress.prune.prune_channels import PruneChannels
from compress.runtime.backends import open_model
from compress.runtime.measure import cores
from compress.stage import Progress, Stage
from compress.storage.stage_cache import StageCache
from compress.storage.steady import refuse_changed

__all__ = ["Setting", "Silent", "judged", "lost", "made", "skipped"]

SCREEN_SHARE = 0.2
SCREEN_LEAST = 256


@dataclass(frozen=True)
class Setting:
    """What every process of a search needs to begin.

    Attributes:
        checkpoint: the model file, which each loads again.
        options: of the search.
        source: what `pipeline.run` takes as the hash of what goes in.
        work: keeps every stage's output.
        cache: keeps outputs for runs with other work folders.
    """

    checkpoint: Path
    options: OptimizeOptions
    source: str
    work: Path
    cache: StageCache | None


def judged(options: OptimizeOptions, model: Original, checkpoint: Path) -> Evaluation:
    """The evaluation data and the metric of a search."""
    if options.eval is None:
        raise RecipeError(
            "can't tell good candidates from bad ones",
            why="there is no evaluation data",
            mend="add --eval eval.npz: inputs, and labels where there are some",
        )
    found = evaluation_of(options, model, sources_of(options, checkpoint, model), chooses=True, proves=False)
    assert found is not None  # noqa: S101  there is data
    return found


def lost(trials: Sequence[Trial]) -> Trial | None:
    """The float model of a pruned ratio, if it is out: then every higher ratio is."""
    return next((t for t in trials if t.candidate.in_float32 and t.candidate.prune and t.status != "measured"), None)


def skipped(group: Sequence[Candidate], out: Trial) -> list[Trial]:
    """Candidates that are not tried, since a lighter pruning is out."""
    why = f"not tried: {out.candidate.name} is out already"
    return [Trial(candidate, "eliminated", why) for candidate in group]


class Silent:
    """A watcher that shows nothing."""

    def started(self, stage: str) -> Progress:  # noqa: ARG002
        return lambda _done, _total, _note: None

    def ended(self, outcome: Outcome) -> None:
        """Nothing to show."""


class _Named:
    """Tells a watcher which candidate a stage is for."""

    def __init__(self, watcher: Watcher, name: str) -> None:
        self._watcher, self._name = watcher, name

    def started(self, stage: str) -> Progress:
        return self._watcher.started(f"{self._name}: {stage}")

    def ended(self, outcome: Outcome) -> None:
        if not outcome.reused:
            self._watcher.ended(outcome)


def made(setting: Setting, group: Sequence[Candidate], watcher: Watcher) -> list[Trial]:
    """Make the candidates of one ratio, its float model first, and screen each on a part of the data.

    Raises:
        ResourceError: what every other candidate would end with, too.
    """
    options = setting.options
    model = original(setting.checkpoint, options)
    evaluation = judged(options, model, setting.checkpoint)
    assert evaluation.choice is not None  # noqa: S101  a search chooses
    count = max(SCREEN_LEAST, int(len(evaluation.choice) * SCREEN_SHARE))
    judge = Judge.of_part(
        open_model(model, threads=cores()), evaluation.choice, evaluation.metric, count, evaluation.confidence
    )
    trials: list[Trial] = []
    for candidate in group:
        out = lost(trials)
        if out is not None:
            trials += skipped([candidate], out)
            continue
        try:
            asked = stages_for(
                candidate.options(options), model, setting.checkpoint, (evaluation.choice, evaluation.metric)
            )
            stages = [_sharing(stage) for stage in asked]
            check(stages, model)
            outcomes = run(
                stages, model, work=setting.work, source=setting.source, watcher=_Named(watcher, candidate.name),
                tidy=False, cache=setting.cache,
            )  # fmt: skip
        except ResourceError:
            raise
        except ToolkitError as err:  # one that can't be made does not end the search
            refuse_changed()  # which is no fault of a candidate's
            trials.append(Trial(candidate, "failed", f"{err.what}: {err.why}"))
            continue
        final = outcomes[-1].given.model
        assert isinstance(final, OnnxModel)  # noqa: S101  recipes end in ONNX stages
        trial = _screened(candidate, final, judge, options, evaluation.metric.name)
        trials.append(dataclasses.replace(trial, path=_kept(final.path, stages, setting)))
    return trials


def _kept(path: Path, stages: Sequence[Stage], setting: Setting) -> Path:
    """Where a candidate's file is found by others: in the cache, where the work folder is this machine's alone."""
    if setting.cache is None or not setting.cache.whole:
        return path
    kept = setting.cache.entry(stages[-1].name, key_of(stages, setting.source)) / path.name
    if not kept.is_file():
        raise ResourceError(
            f"can't keep a candidate in {setting.cache.folder}",
            why="it was made, and could not be copied there: the disk is full, or the folder is not this user's alone",
            mend="free some space there, or name another folder with --shared",
        )
    return kept


def _sharing(stage: Stage) -> Stage:
    """What can lose channels does not hang on the candidate: the next ratio finds it in the work folder."""
    if isinstance(stage, PruneChannels):
        return dataclasses.replace(stage, shared=True)
    return stage


def _screened(candidate: Candidate, model: OnnxModel, judge: Judge, options: OptimizeOptions, metric: str) -> Trial:
    """Out when even the lower end of its drop's interval, on a part of the data, is beyond the limit."""
    kept = Trial(candidate, "measured", size_bytes=size_of(model.path), path=model.path)
    if candidate.prune == 0 and candidate.in_float32:
        return kept
    drop = judge.drop(open_model(model, threads=cores()))
    if drop.low is None or drop.high is None or drop.low <= options.max_drop:
        return kept
    why = f"out early: {drop_told(drop.points, metric=metric)} on {counted(len(judge), 'samples')}, at least "
    why += f"{signed(drop.low, metric)} at {percent(options.confidence)} confidence"
    return dataclasses.replace(
        kept, status="eliminated", why=why, drop=drop.points, drop_low=drop.low, drop_high=drop.high
    )
