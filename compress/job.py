"""The main job: load, prune, finetune, export, quantize, measure, report; all or nothing."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress import __version__
from compress.artifact import Artifact, Signature, StageReport, sha256_of
from compress.backends import OnnxBackend
from compress.checkpoint import fingerprint, load
from compress.dataset import Dataset
from compress.errors import ArtifactError, BudgetError
from compress.findings import findings
from compress.grid import Cell, measure_grid
from compress.machine import environment, versions
from compress.measure import Latency, onnx_layer_bytes
from compress.metrics import Metric, find_metric
from compress.model import Model, OnnxModel, TorchModel, example_inputs, in_float32
from compress.options import CompressOptions, ExportOptions, OptimizeOptions, SensitivityOptions, SourceOptions
from compress.pipeline import Outcome, Watcher, check, run
from compress.prove import measure, rows_of
from compress.recipe import find_data, stages_for
from compress.report import Report
from compress.reproduce import script
from compress.roofline import Roofline
from compress.roofline import roofline as profiled
from compress.search import search
from compress.search_report import write_search
from compress.search_result import SearchResult
from compress.sensitivity import Sensitivity, layer_sensitivity
from compress.sensitivity_report import write_sensitivity
from compress.stages import Progress, Stage
from compress.stages.fold_onnx import FoldOnnx
from compress.stages.onnx_from_torch import OnnxFromTorch

__all__ = ["Examined", "Prepared", "examine", "export", "optimize", "prepare", "sensitivity"]


class Silent:
    """A watcher that shows nothing."""

    def started(self, stage: str) -> Progress:  # noqa: ARG002
        return lambda _done, _total, _note: None

    def ended(self, outcome: Outcome) -> None:
        """Nothing to show."""


@dataclass(frozen=True)
class Prepared:
    """A run that has been checked and can begin.

    Attributes:
        model: the original.
        stages: what will be done to it.
        judged: evaluation data and the metric, if there is data.
        source: a hash of what goes in, and of the libraries that work on it.
        work: keeps each stage's output.
    """

    model: TorchModel
    stages: Sequence[Stage]
    judged: tuple[Dataset, Metric] | None
    source: str
    work: Path


def prepare(checkpoint: Path, options: ExportOptions) -> Prepared:
    """Load the model, open the data, check the stages; no work is done and nothing is written.

    Raises:
        ToolkitError: input or options that can't be used.
    """
    _check_output(options.output)
    model = _load(checkpoint, options)
    judged = None
    if options.eval is not None:
        data = Dataset.open(find_data(options.eval, checkpoint), model.signature)
        judged = data, find_metric(options.metric, data, model.signature)
    stages = stages_for(options, model, checkpoint, judged)
    check(stages, model)
    return Prepared(model, stages, judged, _source(model), _work(options))


def export(
    checkpoint: str | Path, options: ExportOptions, *, watcher: Watcher | None = None
) -> tuple[Artifact, Report]:
    """Take a model file to a measured ONNX artifact.

    Args:
        checkpoint: any file that `compress.load` reads.
        options: what to do to it.
        watcher: is told of each stage; by default nobody is.

    Returns:
        The artifact, with model.onnx, artifact.json, report.json, report.html and reproduce.sh in its folder, and the
        report.

    Raises:
        BudgetError: the result misses a budget; it is left beside the output, as OUTPUT.missed.
        ToolkitError: input that can't be used; an artifact that was there before is left as it was.

    Example:
        >>> options = ExportOptions(
        ...     output=Path("artifact"), prune=0.5, finetune="train.npz", epochs=1, int8="dynamic", eval="eval.npz"
        ... )
        >>> artifact, report = export("model.pt", options)
        >>> [row.stage for row in report.stages][2:]
        ['prune_channels', 'finetune', 'onnx_from_torch', 'fold_onnx', 'quantize_onnx']
        >>> report.gains["macs"] > 1.9
        True
    """
    checkpoint = Path(checkpoint)
    watcher = watcher or Silent()
    prepared = prepare(checkpoint, options)
    model, work = prepared.model, prepared.work
    baseline = run(
        [OnnxFromTorch(), FoldOnnx()], model, work=work / "original", source=prepared.source, watcher=_Renamed(watcher)
    )
    outcomes = run(
        prepared.stages, model, work=work, source=prepared.source, watcher=watcher, tidy=options.work is None
    )
    first, final = baseline[-1].given.model, outcomes[-1].given.model
    assert isinstance(first, OnnxModel)  # noqa: S101  both lists end in ONNX stages
    assert isinstance(final, OnnxModel)  # noqa: S101
    report, timed = _report(checkpoint, options, prepared, first, outcomes, watcher)
    missed = missed_budgets(options, report.stages)
    if not missed:
        return _write(final, options.output, report, timed), report
    beside = options.output.with_name(options.output.name + ".missed")
    _write(final, beside, report, timed)
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
) -> SearchResult:
    """Search pruning ratios, precisions and calibrators, and export the best that loses no more than it may.

    Args:
        checkpoint: any file that `compress.load` reads.
        options: what to try.
        watcher: is told of each stage; by default nobody is.
        tell: is given the trials before the best of them is exported.

    Returns:
        All trials. The winner's artifact is in the output folder, search.json and search.html are beside it in
        OUTPUT.search.

    Raises:
        BudgetError: none is inside the largest drop; OUTPUT.search is written all the same.
        ToolkitError: input that can't be used.

    Example:
        >>> options = OptimizeOptions(
        ...     output=Path("best"), eval="eval.npz", prune=(0, 0.5), int8=("dynamic",), max_drop=100
        ... )
        >>> found = optimize("model.pt", options)
        >>> sorted({trial.candidate.int8 for trial in found.trials})
        ['dynamic', 'none']
        >>> Artifact.load(Path("best")).format
        'onnx'
    """
    checkpoint = Path(checkpoint)
    watcher = watcher or Silent()
    _check_output(options.output)
    model = _load(checkpoint, options)
    work = _work(options)
    found = search(checkpoint, options, model, source=_source(model), work=work, watcher=watcher)
    folder = options.output.with_name(options.output.name + ".search")
    write_search(found, folder)
    tell(found)
    best = found.best
    if best is None:
        near = found.nearest
        loses = "" if near is None else f"; the nearest is {near.candidate.name} with {near.drop:+.2f}"
        raise BudgetError(
            "no candidate is inside the budget",
            why=f"each loses more than {options.max_drop:g} points of {found.metric}{loses}",
            mend=f"see {folder / 'search.html'}; allow more, try smaller --prune fractions, or more --epochs",
        )
    export(checkpoint, dataclasses.replace(best.candidate.options(options), work=work), watcher=watcher)
    return found


def sensitivity(checkpoint: str | Path, options: SensitivityOptions, *, watcher: Watcher | None = None) -> Sensitivity:
    """Prune one group of layers at a time and judge the model; write sensitivity.json and sensitivity.html.

    Args:
        checkpoint: any file that `compress.load` reads and that still has its layers.
        options: how to.
        watcher: is told how it goes on; by default nobody is.

    Raises:
        ToolkitError: input that can't be used.

    Example:
        >>> found = sensitivity("model.pt", SensitivityOptions(output=Path("sensitive"), eval="eval.npz", samples=50))
        >>> sorted(found.limits(max_drop=100))
        ['0']
    """
    checkpoint = Path(checkpoint)
    model = _load(checkpoint, options)
    data = Dataset.open(find_data(options.eval, checkpoint), model.signature)
    found = layer_sensitivity(
        model,
        data,
        find_metric(options.metric, data, model.signature),
        ratios=options.ratios,
        samples=options.samples,
        importance=options.importance,
        progress=(watcher or Silent()).started("sensitivity"),
    )
    write_sensitivity(found, options.output, options.max_drop)
    return found


@dataclass(frozen=True)
class Examined:
    """What a file holds: the torch model, unless it is an artifact, and its roofline, if that was asked for."""

    signature: Signature
    model: TorchModel | None
    roofline: Roofline | None


def examine(checkpoint: Path, options: SourceOptions, *, roofline: bool = False, threads: int = 1) -> Examined:
    """Look into a model file or an artifact's folder.

    Raises:
        ToolkitError: it can't be read, or, for a roofline, not be exported.
    """
    if checkpoint.is_dir():
        artifact = Artifact.load(checkpoint)
        roofs = _roofline(artifact.model_path, artifact.signature, threads) if roofline else None
        return Examined(artifact.signature, None, roofs)
    model = load(checkpoint, inputs=options.input, model=options.model, trust_pickle=options.trust_pickle)
    if not roofline:
        return Examined(model.signature, model, None)
    with tempfile.TemporaryDirectory() as folder:
        exported = OnnxFromTorch().run(in_float32(model), Path(folder), lambda _done, _total, _note: None).model
        assert isinstance(exported, OnnxModel)  # noqa: S101  it is what the stage gives
        return Examined(model.signature, model, _roofline(exported.path, exported.signature, threads))


def _roofline(path: Path, signature: Signature, threads: int) -> Roofline:
    return profiled(path, example_inputs(signature.inputs, 1), threads=threads)


def _load(checkpoint: Path, options: SourceOptions) -> TorchModel:
    model = load(checkpoint, inputs=options.input, model=options.model, trust_pickle=options.trust_pickle)
    return in_float32(model)


def _source(model: TorchModel) -> str:
    return fingerprint(model) + json.dumps(versions())  # another release may give another output


def _work(options: CompressOptions) -> Path:
    return options.work or options.output.with_name(options.output.name + ".work")


def _report(
    checkpoint: Path,
    options: ExportOptions,
    prepared: Prepared,
    baseline: OnnxModel,
    outcomes: Sequence[Outcome],
    watcher: Watcher,
) -> tuple[Report, Mapping[str, Latency]]:
    names = unique_names([outcome.stage.name for outcome in outcomes])
    model = prepared.model
    rows: dict[str, Model] = {"original": model, "original_onnx": baseline}
    rows |= {name: outcome.given.model for name, outcome in zip(names, outcomes, strict=True)}
    found = measure(rows, prepared.judged, options.threads, watcher)
    data = None if prepared.judged is None else prepared.judged[0]
    reports = rows_of(rows, dict(zip(names, outcomes, strict=True)), found, checkpoint.stat().st_size)
    report = Report(
        command=_command(),
        source=str(checkpoint),
        signature=model.signature,
        environment=environment(options.threads),
        data={"samples": 0 if data is None else len(data), "sha256": "" if data is None else data.sha256},
        stages=tuple(reports),
        findings=findings(reports),
        grid=_grid(options, rows, watcher),
        rooflines=_rooflines(options, rows, watcher),
        layer_bytes=(onnx_layer_bytes(baseline.path), onnx_layer_bytes(_last(rows).path)),
        script=_script(checkpoint, options),
    )
    return report, found.latency


def _last(rows: Mapping[str, Model]) -> OnnxModel:
    model = list(rows.values())[-1]
    assert isinstance(model, OnnxModel)  # noqa: S101  the recipe ends in ONNX stages
    return model


def _runs(model: OnnxModel) -> bool:
    """Whether its speed can be measured here."""
    return not OnnxBackend(model, 1).emulated


def _grid(options: ExportOptions, rows: Mapping[str, Model], watcher: Watcher) -> tuple[Cell, ...]:
    if not options.batches and not options.thread_counts:
        return ()
    tick = watcher.started("grid")
    compared = {"original": rows["original"], "original_onnx": rows["original_onnx"]}
    compared |= {"result": _last(rows)} if _runs(_last(rows)) else {}
    return tuple(
        measure_grid(
            compared,
            options.batches or (1,),
            options.thread_counts or (options.threads,),
            progress=lambda done, total: tick(done, total, "settings"),
        )
    )


def _rooflines(options: ExportOptions, rows: Mapping[str, Model], watcher: Watcher) -> dict[str, Roofline]:
    tick = watcher.started("roofline")
    found = {}
    files = {"original_onnx": rows["original_onnx"]} | ({"result": _last(rows)} if _runs(_last(rows)) else {})
    for number, (name, model) in enumerate(files.items(), 1):
        assert isinstance(model, OnnxModel)  # noqa: S101  both are exported
        found[name] = _roofline(model.path, model.signature, options.threads)
        tick(number, len(files), "models profiled")
    return found


def _script(checkpoint: Path, options: ExportOptions) -> str:
    """reproduce.sh, where there is a command to run again."""
    if not _command():
        return ""
    sources = [
        find_data(source, checkpoint) for source in (options.finetune, options.calibration, options.eval) if source
    ]
    files = [path for path in (checkpoint, *map(Path, sources)) if path.is_file()]
    inputs = {path: sha256_of(path) for path in files}
    return script(_command(), Path.cwd(), inputs, versions())


def _command() -> str:
    """The command line that this run came from; empty when it came from Python."""
    called = Path(sys.argv[0])
    ours = called.name == "compress" or called.parts[-2:] == ("compress", "__main__.py")
    return shlex.join(["compress", *sys.argv[1:]]) if ours else ""


def unique_names(names: Sequence[str]) -> list[str]:
    """A stage that comes again gets a number: finetune, finetune 2."""
    return [name if (nth := names[: at + 1].count(name)) == 1 else f"{name} {nth}" for at, name in enumerate(names)]


def missed_budgets(options: ExportOptions, rows: Sequence[StageReport]) -> list[str]:
    """What the last row is beyond, in words."""
    last = rows[-1].measured
    size = None if last.size_bytes is None else last.size_bytes / 1e6
    return [
        f"{name} is {value:.4g} {unit}, the limit is {limit:g}"
        for name, unit, value, limit in (
            ("p50", "ms", last.latency_p50_ms, options.target_latency_ms),
            ("the file", "MB", size, options.target_size_mb),
            ("the drop", "points", last.drop, options.max_drop),
        )
        if limit is not None and value is not None and value > limit
    ]


class _Renamed:
    """Tells a watcher of the original's own export under names that tell it apart."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def started(self, stage: str) -> Progress:
        return self._watcher.started(f"original: {stage}")

    def ended(self, outcome: Outcome) -> None:
        self._watcher.ended(outcome)


def _restore(output: Path, old: Path) -> None:
    """Put the earlier artifact back where a swap that was cut short had moved it from."""
    if old.exists() and not output.exists():
        old.rename(output)


def _check_output(output: Path) -> None:
    _restore(output, output.with_name(output.name + ".old"))
    if output.is_file() or (output.is_dir() and any(output.iterdir()) and not (output / "artifact.json").exists()):
        raise ArtifactError(
            f"won't replace {output}",
            why="it is a file" if output.is_file() else "it is a folder that holds something other than an artifact",
            mend="name a new folder with -o",
        )


def _write(model: OnnxModel, output: Path, report: Report, timed: Mapping[str, Latency]) -> Artifact:
    """Fill a folder beside the output, then swap the two."""
    beside = output.with_name(output.name + ".part")
    old = output.with_name(output.name + ".old")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    shutil.copyfile(model.path, beside / "model.onnx")
    artifact = Artifact(
        folder=beside,
        model_file="model.onnx",
        format="onnx",
        sha256=sha256_of(beside / "model.onnx"),
        signature=model.signature,
        stages=report.stages,
        toolkit_version=__version__,
    )
    artifact.save()
    report.write(beside, _thinned(timed))
    shutil.rmtree(old, ignore_errors=True)
    try:
        if output.exists():
            output.rename(old)
        beside.rename(output)
    except BaseException:
        _restore(output, old)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return dataclasses.replace(artifact, folder=output)


def _thinned(timed: Mapping[str, Latency]) -> dict[str, Sequence[float]]:
    """At most about a thousand latencies of each, for the plot."""
    return {name: found.samples_ms[:: max(1, len(found.samples_ms) // 1000)] for name, found in timed.items()}
