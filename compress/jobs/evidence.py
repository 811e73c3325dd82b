"""The report of a run: every model on the way measured, what the figures say, and how to get them again."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from compress.artifact import Signature, StageReport, sha256_of
from compress.console.wording import Note, counted
from compress.data.dataset import Dataset
from compress.data.images import images_in, is_image_folder
from compress.data.sizes import batches_of, call_size
from compress.evaluate.evaluation import Evaluation
from compress.evaluate.judge import Budget
from compress.evaluate.runtime_choice import Choice
from compress.formats.files import read_of, size_of
from compress.formats.hub.folder import is_hub_folder
from compress.formats.onnx.load import is_onnx
from compress.jobs.blamed import blamed
from compress.jobs.examine import roofline_of
from compress.jobs.few_bits import few_bits_told
from compress.jobs.original import Original
from compress.jobs.profiled import profiles_told
from compress.jobs.prove import measure, rows_of
from compress.jobs.recipe import code_of, find_data
from compress.jobs.recipe_file import recipe_text
from compress.jobs.representative import representative
from compress.jobs.serving_runtime import beside, chosen, served
from compress.model import Model, OnnxModel
from compress.options import CompressOptions, ExportOptions, OptimizeOptions
from compress.options.unused import unused
from compress.pipeline import Outcome, Watcher
from compress.report.export import Report
from compress.report.findings import findings
from compress.report.reproduce import script
from compress.runtime.backends.onnxrt import is_emulated
from compress.runtime.grid import Cell, measure_grid
from compress.runtime.latency import Latency
from compress.runtime.machine import environment, versions
from compress.runtime.measure import onnx_layer_bytes, onnx_work
from compress.runtime.roofline import Roofline, same_roofs
from compress.storage.files import command_line
from compress.storage.hashing import loaded_code
from compress.storage.steady import seen
from compress.vetting.arrow_rows import is_saved, saved_files
from compress.vetting.shards import SUFFIX, is_sharded, shards_of

__all__ = ["exported_row", "missed_budgets", "named", "report_of", "rows_before", "script_of", "unique_names"]


def report_of(
    checkpoint: Path,
    options: ExportOptions,
    model: Original,
    baseline: OnnxModel,
    outcomes: Sequence[Outcome],
    judged: Evaluation | None,
    watcher: Watcher,
    budget: Budget | None = None,
) -> tuple[Report, Mapping[str, Latency]]:
    """Measure the original and what each stage gave, side by side.

    Args:
        checkpoint: that the run started from.
        options: of the run.
        model: the original.
        baseline: the original, exported as it is; itself, where it is an ONNX file.
        outcomes: of the stages.
        judged: evaluation data and the metric, if there is data.
        watcher: is told how it goes on.
        budget: of the drop, which the runtime that serves has to keep.

    Returns:
        The report, and every latency that was taken.
    """
    begun = time.perf_counter()
    names = unique_names([outcome.stage.name for outcome in outcomes])
    rows = rows_before(model, baseline)
    rows |= {name: outcome.given.model for name, outcome in zip(names, outcomes, strict=True)}
    data = representative(options, model, judged, checkpoint)
    others, costs, choice = beside(options, rows, data)
    found = measure(rows, judged, options.threads, watcher, others, costs, data)
    if others:
        choice = chosen(options, rows, others, found, budget, data)
    # Before `served`: what it is held against was measured in ONNX Runtime alone.
    in_time = few_bits_told(rows, found.latency.found, options.threads, data)
    rows, found = served(rows, others, found, choice)
    stages = dict(zip(names, outcomes, strict=True))
    reports = rows_of(rows, stages, found, size_of(checkpoint))
    explained, blame = blamed(reports, stages, found, judged, watcher)
    grid, rooflines = _grid(options, rows, data, watcher), _rooflines(options, rows, data, watcher)
    report = Report(
        command=command_line(),
        source=str(checkpoint),
        signature=model.signature,
        environment=environment(options.threads),
        data={"samples": 0, "sha256": ""} if judged is None else judged.to_dict(),
        stages=tuple(reports),
        findings=(
            *_call_told(model.signature),
            *_uncounted_told(baseline, _last(rows)),
            *_runtime_told(choice),
            *findings(reports, options.confidence, call_size(model.signature)),
            *in_time,
            *blame,
            *profiles_told(stages),
        ),
        grid=grid,
        rooflines=rooflines,
        layer_bytes=(onnx_layer_bytes(baseline.path), onnx_layer_bytes(_last(rows).path)),
        serving=choice,
        explained=explained,
        measuring={"seconds": time.perf_counter() - begun, "latency": found.latency.to_dict()},
    )
    return report, found.latency


def rows_before(model: Original, baseline: OnnxModel) -> dict[str, Model]:
    """The rows before the stages: the original, and its own export where it has one."""
    rows: dict[str, Model] = {"original": model}
    return rows if model is baseline else rows | {"original_onnx": baseline}


def exported_row(rows: Mapping[str, Model]) -> str:
    """The row of the original's own ONNX file."""
    return "original_onnx" if "original_onnx" in rows else "original"


def _call_told(signature: Signature) -> tuple[Note, ...]:
    """What figures "at batch 1" and "of one sample" are of, where a call takes more, whatever is asked for."""
    call = call_size(signature)
    if call == 1:
        return ()
    told = f"Each call takes {counted(call, 'samples')}, a size that is fixed"
    return (Note(f"{told}: latency, memory and MACs are those of such a call, not of batch 1."),)


def _uncounted_told(baseline: OnnxModel, last: OnnxModel) -> tuple[str, ...]:
    """What the counts of two files that are held against each other leave out; a warning where that is not alike."""
    left, beside = (onnx_work(each.path, each.signature).uncounted for each in (baseline, last))
    if not left and not beside:
        return ()
    why = "in loops, or of sizes or operators that are not known"
    if left == beside:
        return (Note(f"MACs are without {counted(left, 'layers')} of the original {why}."),)
    both = f"{counted(left, 'layers')} of the original and {counted(beside, 'layers')} of the result"
    return (f"MACs are without {both} {why}: how many times fewer they are is not of the same layers.",)


def _runtime_told(choice: Choice | None) -> tuple[str, ...]:
    """What serves the file, where more than one runtime was asked; a warning where OpenVINO does not compute it."""
    if choice is None:
        return ()
    return (choice.why if choice.doubtful else Note(choice.why),)


def _last(rows: Mapping[str, Model]) -> OnnxModel:
    """The finished ONNX file: an engine, if there is one, is made of it."""
    return [model for model in rows.values() if isinstance(model, OnnxModel)][-1]


def _runs(model: OnnxModel) -> bool:
    """Whether its speed can be measured here."""
    return not is_emulated(model.path)


def _grid(
    options: ExportOptions, rows: Mapping[str, Model], data: Dataset | None, watcher: Watcher
) -> tuple[Cell, ...]:
    if not options.batches and not options.thread_counts:
        return ()
    tick = watcher.started("grid")
    compared = {name: rows[name] for name in ("original", exported_row(rows))}
    compared |= {"result": _last(rows)} if _runs(_last(rows)) else {}
    return tuple(
        measure_grid(
            compared,
            batches_of(rows["original"].signature, options.batches or (1,)),
            options.thread_counts or (options.threads,),
            data=data,
            progress=lambda done, total: tick(done, total, "settings"),
        )
    )


def _rooflines(
    options: ExportOptions, rows: Mapping[str, Model], data: Dataset | None, watcher: Watcher
) -> dict[str, Roofline]:
    tick = watcher.started("roofline")
    found: dict[str, Roofline] = {}
    exported = exported_row(rows)
    files = {exported: rows[exported]} | ({"result": _last(rows)} if _runs(_last(rows)) else {})
    for number, (name, model) in enumerate(files.items(), 1):
        assert isinstance(model, OnnxModel)  # noqa: S101  both are exported
        found[name] = roofline_of(model.path, model.signature, options.threads, data=data, follows=bool(found))
        tick(number, len(files), "models profiled")
    return same_roofs(found)


def named(
    report: Report, checkpoint: Path, options: ExportOptions, searched: OptimizeOptions | None, again: str
) -> Report:
    """A report with what was asked for: the flags that had no use, the recipe, and how to run it again.

    Args:
        report: of the run.
        checkpoint: that it started from.
        options: of it.
        searched: the options that the user gave, where a search has made these of them.
        again: of `script_of`.
    """
    asked = searched or options
    page = "" if searched is None else f"../{quote(options.output.name)}.search/search.html"
    return dataclasses.replace(
        report,
        findings=(*unused(asked), *report.findings),
        searched=page,
        recipe=recipe_text(checkpoint, asked),
        script=again,
    )


def script_of(checkpoint: Path, options: CompressOptions, recipe: Path | None) -> str:
    """reproduce.sh, where there is a command to run again.

    It says which files went in, so it is made as soon as they are open: hours later others may have their names.

    Args:
        checkpoint: of the run.
        options: that the user gave.
        recipe: the file that they are from, if they are from one.
    """
    if not (command := command_line()):
        return ""
    asked = [options.finetune, options.validation, options.calibration, options.selection, options.eval]
    sources = [find_data(source, checkpoint) for source in asked if source]
    if recipe is not None and (not recipe.is_file() or recipe.is_relative_to("/dev") or recipe.is_relative_to("/proc")):
        # What came through a pipe is not there again; all of it, and the flags, are in the recipe that is kept.
        command, recipe = shlex.join(["compress", "run", str(options.output / "recipe.toml")]), None
    named = [options.sensitivity, recipe]
    files = [checkpoint, *map(Path, sources), *(path for path in named if path is not None)]
    own = [options.output.with_name(options.output.name + ending).resolve() for ending in ("", ".missed", ".work")]
    held = [path for each in files for path in _held(each) if not set(own) & set(path.resolve().parents)]
    # The recipe and code are read already, and may be made ready for the next run meanwhile.
    inputs = {path: sha256_of(path) if path == recipe else seen(path) for path in held}
    inputs |= {path: sha256_of(path) for path in map(_relative, loaded_code())}
    # Shards are read where a folder has no arrays: one that comes later is to be seen, too.
    listings = {
        (each, ending): len(list(each.glob(f"*{ending}")))
        for each in files
        if each.is_dir()
        for ending in (".npy", ".npz", *((SUFFIX,) if is_sharded(each) else ()))
        if ending != ".npz" or not any(each.glob("*.npy"))
    }
    images = {each: len(images_in(each)) for each in files if is_image_folder(each)}
    unseen = [f"{source}: its code is compared, not what that reads" for source in code_of(options)]
    if isinstance(options, ExportOptions) and options.timing_cache is not None:
        unseen.append(f"{options.timing_cache}: a timing cache is not compared")
    return script(command, Path.cwd(), inputs, versions(), listings, images, unseen)


def _relative(path: Path) -> Path:
    """From where the run was started, if it lies there: the script may be told of another such folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _held(path: Path) -> list[Path]:
    """The file itself; of a folder of data, what is read in it; of a model, what is read of it."""
    if is_onnx(path) or is_hub_folder(path):
        return read_of(path)
    if path.is_dir():
        rows = saved_files(path) if is_saved(path) else shards_of(path) if is_sharded(path) else []
        return sorted(path.glob("*.npy")) or sorted(path.glob("*.npz")) or images_in(path) or rows
    return [path] if path.is_file() else []


def unique_names(names: Sequence[str]) -> list[str]:
    """A stage that comes again gets a number: finetune, finetune 2."""
    return [name if (nth := names[: at + 1].count(name)) == 1 else f"{name} {nth}" for at, name in enumerate(names)]


def missed_budgets(options: ExportOptions, rows: Sequence[StageReport], budget: Budget | None) -> list[str]:
    """What the last row is beyond, in words; a latency is inside when all of its interval is.

    Args:
        options: of the run.
        rows: of the report.
        budget: of the drop, if it has one; a drop that is not known does not keep it.
    """
    last = rows[-1].measured
    size = None if last.size_bytes is None else last.size_bytes / 1e6
    missed = [
        f"{name} is {value:.4g} {unit}, the limit is {limit:g}"
        for name, unit, value, limit in (
            ("p50 at 95%", "ms", last.latency_p50_high_ms or last.latency_p50_ms, options.target_latency_ms),
            ("the file", "MB", size, options.target_size_mb),
        )
        if limit is not None and value is not None and value > limit
    ]
    budget = None if budget is None else budget.beside(last.drop_constant)
    if budget is not None and not budget.keeps(last.drop, last.drop_high):
        missed.append(f"the drop is {budget.words(last.drop, last.drop_high)}, the limit is {budget.points:g}")
    return missed
