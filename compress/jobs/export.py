"""The main job: load, prune, finetune, export, quantize, measure, report; all or nothing."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.artifact import Artifact
from compress.console.wording import assumed_of
from compress.data.sizes import batches_of
from compress.errors import BudgetError, RecipeError
from compress.evaluate.evaluation import Evaluation, budget_of, evaluation_of
from compress.evaluate.judge import Budget
from compress.evaluate.search_result import Proof, SearchResult, Trial
from compress.formats.checkpoint import signed
from compress.jobs.branch import Silent
from compress.jobs.evidence import missed_budgets, named, report_of, script_of
from compress.jobs.on_ray import on_ray
from compress.jobs.original import Original, fingerprint_of, original, tried
from compress.jobs.output import refuse_too_large, write_artifact
from compress.jobs.places import check_output, claimed
from compress.jobs.recipe import inputs_of, sources_of, stages_for, tables_in, with_sizes
from compress.jobs.replaced import check_outputs, lost_recipe, missed_of, replaced_by, searched_of
from compress.jobs.search import search
from compress.jobs.serving_runtime import refuse_missing
from compress.model import OnnxModel, TorchModel
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.options import CompressOptions, ExportOptions, OptimizeOptions
from compress.options.asked import chooses, prunes
from compress.options.ranges import check_ranges
from compress.pipeline import Outcome, Watcher, check, hashing_shown, run
from compress.prune.sensitivity import Sensitivity
from compress.report.export import Report
from compress.report.search import write_search
from compress.runtime.latency import measuring_seconds
from compress.runtime.machine import versions
from compress.runtime.memory import standing
from compress.stage import Progress, Stage
from compress.storage.files import locked
from compress.storage.stage_cache import StageCache
from compress.storage.steady import refuse_changed
from compress.vetting.swap import replacing_folder

__all__ = ["Prepared", "Silent", "baseline_of", "export", "optimize", "prepare"]


@dataclass(frozen=True)
class Prepared:
    """A run that has been checked and can begin.

    Attributes:
        model: the original.
        stages: what will be done to it.
        judged: evaluation data and the metric, if there is data.
        budget: of the drop, if one was asked for.
        source: a hash of what goes in, and of the libraries that work on it.
        work: keeps each stage's output.
        again: reproduce.sh, of the inputs as they were when they were opened.
        searched: the options of the search whose winner this is.
        doubts: warnings of the sensitivity file that pruning goes by.
        cache: keeps outputs for runs with other work folders.
    """

    model: Original
    stages: Sequence[Stage]
    judged: Evaluation | None
    budget: Budget | None
    source: str
    work: Path
    again: str = ""
    searched: OptimizeOptions | None = None
    doubts: tuple[str, ...] = ()
    cache: StageCache | None = None

    def cached(self, cache: StageCache | None) -> Prepared:
        """The same, with a cache of outputs, and of what layers take."""
        return dataclasses.replace(self, cache=cache, stages=tables_in(self.stages, cache))


def prepare(checkpoint: Path, options: ExportOptions, *, chosen: bool = False) -> Prepared:
    """Load the model, open the data, check the stages; no work is done and nothing is written.

    With a largest drop, the original answers the evaluation data: whether that can tell anything is known before.

    Args:
        checkpoint: the model file.
        options: of the run.
        chosen: whether these options were chosen by the evaluation data.

    Raises:
        ToolkitError: input or options that can't be used.
    """
    check_ranges(options)
    refuse_missing(options.runtime)
    measuring_seconds()  # what can't be used is told before anything is done
    check_outputs(options)
    model = with_sizes(original(checkpoint, options), checkpoint, _data(options), options.dims)
    batches_of(model.signature, options.batches)
    # One that no pruning needs is refused with the other contradictions, whatever stands in it.
    curves = Sensitivity.load(options.sensitivity) if options.sensitivity is not None and prunes(options) else None
    before = "" if curves is None or options.eval is None else curves.data
    found = evaluation_of(
        options, model, sources_of(options, checkpoint, model), chooses=chosen or chooses(options), chosen_before=before
    )
    if options.selection is not None and not (chosen or chooses(options)):
        raise RecipeError(
            "--selection is given, but nothing is chosen",
            why="only --max-drop with static INT8 puts layers back by it, and `compress optimize` looks for a winner",
            mend="leave it out: all of --eval proves",
        )
    judged_by = None if found is None else (found.choice or found.proof, found.metric)
    stages = stages_for(options, model, checkpoint, judged_by, curves)
    module = fingerprint_of(model)
    if curves is not None and curves.model not in ("", module):
        raise RecipeError(
            f"{options.sensitivity} is of another model",
            why="its curves were measured with other weights or layers, whatever their names",
            mend="run `compress sensitivity` on this model, and name its result",
        )
    check(stages, model)
    refuse_too_large(model, stages)
    budget = None if options.max_drop is None else budget_of(options, options.max_drop)
    if budget is not None and found is not None:
        found.refuse(model, budget)
    doubts = () if curves is None else tuple(f"{options.sensitivity}: {told}" for told in curves.warnings)
    return Prepared(model, stages, found, budget, _source(model, module), _work(options), doubts=doubts)


def export(
    checkpoint: str | Path,
    options: ExportOptions,
    *,
    watcher: Watcher | None = None,
    recipe: Path | None = None,
    cache: StageCache | None = None,
) -> tuple[Artifact, Report]:
    """Take a model file to a measured ONNX artifact.

    Args:
        checkpoint: any file that `compress.load` reads.
        options: what to do to it.
        watcher: is told of each stage; by default nobody is.
        recipe: the file that the options are from, if they are from one: reproduce.sh looks whether it has changed.
        cache: where outputs of stages are found again by runs with other folders, as the command line's are
            (`compress.storage.stage_cache.StageCache.of()`); by default nowhere.

    Returns:
        The artifact, with model.onnx (or model.plan, too), artifact.json, report.json, report.html, recipe.toml and
        reproduce.sh in its folder, and the report.

    Raises:
        BudgetError: the result misses a budget; it is left beside the output, as OUTPUT.missed.
        ToolkitError: input that can't be used; an artifact that was there before is left as it was.

    Examples:
        >>> options = ExportOptions(
        ...     output=Path("artifact"), prune=0.5, finetune="train.npz", epochs=1, int8="dynamic", eval="eval.npz"
        ... )
        >>> artifact, report = export("model.pt", options)
        >>> [row.stage for row in report.stages][2:]
        ['prune_channels', 'finetune', 'onnx_from_torch', 'fold_onnx', 'quantize_onnx']
        >>> report.gains["macs"] > 1.9
        True
    """
    checkpoint, watcher = Path(checkpoint), watcher or Silent()
    inputs = inputs_of(options, checkpoint, lost_recipe(recipe, checkpoint, options))
    with (
        standing(), claimed(options.output, _work(options), inputs, replaced_by(options)), hashing_shown(watcher)
    ):  # fmt: skip
        prepared = prepare(checkpoint, options).cached(cache)
        prepared = dataclasses.replace(prepared, again=script_of(checkpoint, options, recipe))
        return _export(checkpoint, options, prepared, watcher)


def _export(checkpoint: Path, options: ExportOptions, prepared: Prepared, watcher: Watcher) -> tuple[Artifact, Report]:
    model, work = prepared.model, prepared.work
    baseline = run(
        baseline_of(prepared.stages), model, work=work / "original", source=prepared.source,
        watcher=_Renamed(watcher), cache=prepared.cache,
    )  # fmt: skip
    _share_export(prepared.stages, work)
    outcomes = run(
        prepared.stages, model, work=work, source=prepared.source, watcher=watcher, tidy=options.work is None,
        cache=prepared.cache,
    )  # fmt: skip
    first, final = baseline[-1].given.model if baseline else model, outcomes[-1].given.model
    assert isinstance(first, OnnxModel)  # noqa: S101  both lists end in ONNX stages
    assert not isinstance(final, TorchModel)  # noqa: S101
    # Where the same sizes are from is this run's, whichever run a stage was kept by.
    final = dataclasses.replace(final, signature=dataclasses.replace(final.signature, sources=model.signature.sources))
    report, timed = report_of(checkpoint, options, model, first, outcomes, prepared.judged, watcher, prepared.budget)
    said = model.assumed if isinstance(model, TorchModel) else ""
    report = dataclasses.replace(report, findings=(*assumed_of(said), *prepared.doubts, *report.findings))
    report = named(report, checkpoint, options, prepared.searched, prepared.again)
    missed = missed_budgets(options, report.stages, prepared.budget)
    refuse_changed()
    if not missed:
        return write_artifact(final, options.output, report, timed, model.processor), report
    beside = missed_of(options)
    with locked(Path(os.path.realpath(beside))):
        check_output(beside)
        write_artifact(final, beside, report, timed, model.processor)
    raise BudgetError(
        "the result misses its budget",
        why="; ".join(missed),
        mend=f"see {beside / 'report.html'}; allow more, prune less, give more epochs or data, or try --int8 qat",
    )


def optimize(
    checkpoint: str | Path,
    options: OptimizeOptions,
    *,
    watcher: Watcher | None = None,
    tell: Callable[[SearchResult], None] = lambda _found: None,
    recipe: Path | None = None,
    cache: StageCache | None = None,
) -> SearchResult:
    """Search pruning ratios, precisions and calibrators, and export the best that loses no more than it may.

    Args:
        checkpoint: any file that `compress.load` reads.
        options: what to try.
        watcher: is told of each stage; by default nobody is.
        tell: is given the trials before the best of them is exported.
        recipe, cache: as in `export`.

    Returns:
        All trials. The winner's artifact is in the output folder, search.json and search.html are beside it in
        OUTPUT.search.

    Raises:
        BudgetError: none is inside the largest drop; OUTPUT.search is written all the same.
        ToolkitError: input that can't be used.

    Examples:
        >>> options = OptimizeOptions(
        ...     output=Path("best"), eval="eval.npz", metric="cosine", prune=(0, 0.5), int8=("dynamic",), max_drop=100
        ... )
        >>> found = optimize("model.pt", options)
        >>> sorted({trial.candidate.int8 for trial in found.trials})
        ['dynamic', 'none']
        >>> Artifact.load(Path("best")).format
        'onnx'
    """
    check_ranges(options)
    refuse_missing(options.runtime)
    checkpoint, watcher = Path(checkpoint), watcher or Silent()
    inputs = inputs_of(options, checkpoint, lost_recipe(recipe, checkpoint, options))
    with (
        standing(), claimed(options.output, _work(options), inputs, replaced_by(options)), hashing_shown(watcher)
    ):  # fmt: skip
        return _optimize(checkpoint, options, watcher, tell, recipe, cache)


def _optimize(
    checkpoint: Path,
    options: OptimizeOptions,
    watcher: Watcher,
    tell: Callable[[SearchResult], None],
    recipe: Path | None,
    cache: StageCache | None,
) -> SearchResult:
    check_outputs(options)
    asked_for = options
    model = with_sizes(original(checkpoint, options), checkpoint, _data(options))
    said = {dim: size for dim, size in model.signature.sizes.items() if dim not in model.signature.unsaid}
    again = script_of(checkpoint, asked_for, recipe)
    options = dataclasses.replace(tried(options, model), size=tuple(f"{dim}={size}" for dim, size in said.items()))
    work = _work(options)
    with on_ray(options, work) as cluster:
        cache = cache if cluster is None else cluster.cache
        found = search(
            checkpoint, options, model, source=_source(model, fingerprint_of(model)), work=work, watcher=watcher,
            cache=cache, cluster=cluster,
        )  # fmt: skip
    folder = searched_of(options)
    refuse_changed()
    write_search(found, folder)
    tell(found)
    best = found.best
    if best is None:
        raise BudgetError(
            "no candidate is inside the budget",
            why=found.missed,
            mend=f"see {folder / 'search.html'}; allow more, try smaller --prune fractions, or more --epochs"
            + ("" if found.allowance is None else ", or --train all"),
        )
    asked = dataclasses.replace(best.candidate.options(options), work=work)
    prepared = dataclasses.replace(
        prepare(checkpoint, asked, chosen=True),
        budget=budget_of(options, options.max_drop),
        again=again,
        searched=asked_for,
        cache=cache,
    )
    return _proven(found, best, checkpoint, asked, prepared, folder, watcher)


def _proven(
    found: SearchResult,
    best: Trial,
    checkpoint: Path,
    asked: ExportOptions,
    prepared: Prepared,
    folder: Path,
    watcher: Watcher,
) -> SearchResult:
    """Export the winner, and judge it once by samples that had no part in the choice."""
    try:
        artifact, report = _export(checkpoint, asked, prepared, watcher)
    except BudgetError as err:
        raise BudgetError(
            f"the winner, {best.candidate.name}, does not keep its budget on samples that did not choose it",
            why=err.why,
            mend=f"{err.mend}; the other candidates were not tried on these samples, and must not be by turns",
        ) from err
    last = report.stages[-1].measured
    assert prepared.judged is not None  # noqa: S101  a search has evaluation data
    proof = Proof(
        len(prepared.judged.proof), last.value, last.drop, last.drop_low, last.drop_high,
        runtime=artifact.runtime if artifact.format == "onnx" else None, latency_p50_ms=last.latency_p50_ms,
    )  # fmt: skip
    found = dataclasses.replace(found, proof=proof)
    write_search(found, folder)
    return found


def _data(options: CompressOptions) -> dict[str, str | None]:
    """What tells the sizes of dimensions that vary, the most telling first."""
    return {"calibration": options.calibration, "evaluation": options.eval, "training": options.finetune}


def baseline_of(stages: Sequence[Stage]) -> list[Stage]:
    """The original's own export, which the result is compared with; none of an ONNX file, which is that itself."""
    if stages[0].takes is OnnxModel:
        return []
    exports = [stage for stage in stages if isinstance(stage, OnnxFromTorch)]
    return [exports[0], FoldOnnx()] if exports else []


def _share_export(stages: Sequence[Stage], work: Path) -> None:
    """Where nothing is done in torch, the original's own export is the first stage's output: it is not made twice."""
    if isinstance(stages[0], OnnxFromTorch):
        for made in (work / "original").glob("01-onnx_from_torch-*"):
            if not (work / made.name).exists() and (made / "stage.json").exists():
                with replacing_folder(work / made.name) as beside:
                    shutil.copytree(made, beside, dirs_exist_ok=True)


def _source(model: Original, module: str) -> str:
    return signed(module, model) + json.dumps(versions())  # another release may give another output


def _work(options: CompressOptions) -> Path:
    return options.work or options.output.parent / f"{options.output.name}.work"


class _Renamed:
    """Tells a watcher of the original's own export under names that tell it apart."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def started(self, stage: str) -> Progress:
        return self._watcher.started(f"original: {stage}")

    def ended(self, outcome: Outcome) -> None:
        self._watcher.ended(outcome)
