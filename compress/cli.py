"""The `compress` command: parse, call, print."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, CycloptsError, CycloptsPanel, Parameter
from rich.console import Console
from rich.markup import escape

from compress import __version__
from compress.console.wording import Assumed, Note
from compress.errors import printable
from compress.jobs.running import at_work, run_to_end, spread, warn, work_of
from compress.options import (
    RUN,
    EngineOptions,
    ExplainOptions,
    ExportOptions,
    FinetuneOptions,
    MeasureOptions,
    OptimizeOptions,
    SensitivityOptions,
    SourceOptions,
)
from compress.storage.stage_cache import StageCache

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["app", "main"]

RESUMES = ("export", "optimize", "finetune", "run")  # commands that keep what is done


def _refusal(err: CycloptsError) -> object:
    """What is wrong with a flag, or with a recipe, whose values it quotes."""
    return CycloptsPanel(printable(str(err), keep="\n"))


app = App(
    name="compress",
    help="Take a trained PyTorch model to a pruned, INT8, measured ONNX file.",
    version=__version__,
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
    error_formatter=_refusal,
)


@app.command
def export(
    checkpoint: Path,
    *,
    options: ExportOptions,
    dry_run: Annotated[bool, Parameter(negative="", group=RUN)] = False,
    save_config: Annotated[Path | None, Parameter(group=RUN)] = None,
    cache: Annotated[bool, Parameter(group=RUN)] = True,
    recipe: Annotated[Path | None, Parameter(parse=False)] = None,
) -> None:
    """Prune, finetune, quantize and export a model; measure what was gained and lost.

    The stages are those that options ask for, always in the order prune, finetune, ONNX, fold, INT8. A run that was
    interrupted goes on where it stopped when the same command is given again; one with other options does again only
    what they change. A budget (--target-…, --max-drop) that is missed ends with exit code 3.

    Parameters
    ----------
    checkpoint
        What compress.save, torch.save, torch.jit.save, torch.export.save or safetensors wrote; a Hugging Face folder;
        or an ONNX file, whose graph is taken back to layers where it is pruned or trained.
    dry_run
        Print the stages and how long they will take, by trying a little of each; write nothing.
    save_config
        Write these options to a recipe for `compress run`.
    cache
        Look for stages that earlier runs did, and keep this one's, in the cache folder (see `compress cache list`).
    """
    from compress.console.durations import duration
    from compress.evaluate.gains import gains_of
    from compress.jobs.export import export as run
    from compress.report.export import stage_table

    console = _console()
    if save_config is not None:
        _save(save_config, checkpoint, options)
    warned = warn(options)
    if dry_run:
        from compress.jobs.plan import plan

        with at_work(options) as terminal:
            planned = plan(checkpoint, options, terminal, _cache(cache))
        console.print(planned, highlight=False, soft_wrap=True)
        return
    with at_work(options, work_of(options)) as terminal:
        artifact, report = run(checkpoint, options, watcher=terminal, recipe=recipe, cache=_cache(cache))
    console.print(stage_table(report))
    for finding in report.findings:
        if finding not in warned and not isinstance(finding, Assumed):
            _tell(console, finding, warns=not isinstance(finding, Note))
    console.print(", ".join(map(str, gains_of(report.stages))), markup=False, highlight=False, soft_wrap=True)
    console.print(f"latency: {report.measuring['latency']['told']}; measuring took "
                  f"{duration(report.measuring['seconds'])}", highlight=False, soft_wrap=True)  # fmt: skip
    files = "model.plan, model.onnx, engine.json" if artifact.format == "plan" else "model.onnx"
    console.print(
        f"wrote {artifact.folder}: {files}, artifact.json, report.json, report.html, recipe.toml, reproduce.sh",
        markup=False,
        soft_wrap=True,
    )


@app.command
def optimize(
    checkpoint: Path,
    *,
    options: OptimizeOptions,
    save_config: Annotated[Path | None, Parameter(group=RUN)] = None,
    cache: Annotated[bool, Parameter(group=RUN)] = True,
    recipe: Annotated[Path | None, Parameter(parse=False)] = None,
) -> None:
    """Try pruning, precisions and calibrators, measure each, and export the best that loses no more than --max-drop.

    Candidates that have lost too much on a part of the data are not measured further. An interrupted search goes on
    where it stopped. When no candidate is inside, nothing is written but the search's own report, and the exit code
    is 3.

    Parameters
    ----------
    checkpoint
        Any model file.
    save_config
        Write these options to a recipe for `compress run`.
    cache
        Look for stages that earlier runs did, and keep this one's, in the cache folder (see `compress cache list`).
    """
    from compress.evaluate.gains import drop_told
    from compress.jobs.export import optimize as run
    from compress.report.search import search_table

    if save_config is not None:
        _save(save_config, checkpoint, options)
    console = _console()
    warn(options)
    tables: list[Table] = []
    try:
        with at_work(options, work_of(options)) as terminal:
            found = run(
                checkpoint,
                options,
                watcher=terminal,
                recipe=recipe,
                cache=_cache(cache),
                tell=lambda found: tables.append(search_table(found)),
            )
    finally:  # of a search that found nothing inside the budget, too
        for table in tables:
            console.print(table)
    for words in found.unpaid:
        _tell(console, words, warns=False)
    best = found.best
    assert best is not None  # noqa: S101  none is an error
    proof = found.proof
    told = "" if proof is None or proof.drop is None else f", {drop_told(proof.drop)} on other samples"
    wrote = f"wrote {options.output}, and all candidates in {options.output}.search/search.html"
    how = f" ({found.how})" if found.how else ""
    console.print(f"best for {options.goal}: {best.candidate.name}{how}{told}; {wrote}", markup=False, soft_wrap=True)


def _tell(console: Console, words: str, *, warns: bool) -> None:
    console.print(f"{'[yellow]![/]' if warns else '[blue]·[/]'} {escape(words)}", highlight=False, soft_wrap=True)


@app.command
def sensitivity(checkpoint: Path, *, options: SensitivityOptions) -> None:
    """Prune one layer at a time, and tell what each costs: a table, a heat map, and input for --sensitivity.

    Parameters
    ----------
    checkpoint
        Any model file that still has its layers.
    """
    from compress.jobs.sensitivity import sensitivity as run
    from compress.report.sensitivity import sensitivity_table

    warn(options)
    with at_work(options) as terminal:
        found = run(checkpoint, options, watcher=terminal)
    console = _console()
    console.print(sensitivity_table(found, options.max_drop))
    for words in (*found.warnings, *found.notes):
        if not isinstance(words, Assumed):
            _tell(console, words, warns=words in found.warnings)
    console.print(f"wrote {options.output}: sensitivity.json, sensitivity.html", markup=False, soft_wrap=True)


@app.command
def explain(original: Path, artifact: Path, *, options: ExplainOptions) -> None:
    """Tell which layer of a compressed file lost what, and which to keep in float, measured on data.

    Parameters
    ----------
    original
        Any model file: what the other was made of.
    artifact
        An artifact's folder, or an ONNX file.
    """
    import json

    from compress.jobs.explain import explain as run
    from compress.jobs.places import refuse_overwriting
    from compress.jobs.recipe import inputs_of
    from compress.report.explain import exclusions_told, explain_tables, not_finite_told, notes_told
    from compress.storage.files import write_files

    if options.json is not None:
        refuse_overwriting(options.json, [artifact, *inputs_of(options, original)], "--json")
    with at_work(options) as terminal:
        found = run(original, artifact, options, terminal)
    console = _console()
    for table in explain_tables(found, None if options.verbose else options.rows):
        console.print(table)
    if found.not_finite:
        _tell(console, not_finite_told(found), warns=True)
    for note in notes_told(found, None if options.verbose else options.rows):
        _tell(console, note, warns=False)
    if told := exclusions_told(found):
        console.print(told, markup=False, highlight=False, soft_wrap=True)
    if found.keep_float:
        console.print(f"or to its recipe: {found.recipe.strip()}", markup=False, highlight=False, soft_wrap=True)
    if options.json is not None:
        write_files({options.json: json.dumps(found.to_dict(), indent=2) + "\n"})
        console.print(f"wrote {options.json}", markup=False, highlight=False, soft_wrap=True)


@app.command
def finetune(
    checkpoint: Path, *, options: FinetuneOptions, cache: Annotated[bool, Parameter(group=RUN)] = True
) -> None:
    """Train a model to recover what pruning lost, or from its labels alone; on a CPU, a GPU or many.

    An interrupted training goes on where it was when the same command is given again. On several machines, start it
    with torchrun: `torchrun --nnodes 2 --nproc-per-node 4 … -m compress finetune …`.

    Parameters
    ----------
    checkpoint
        Any model file that still has its layers.
    cache
        Look for a training that an earlier run did, and keep this one, in the cache folder (see `compress cache list`).
    """
    from compress.jobs.recovery import finetune as run
    from compress.report.training import training_table

    warn(options)
    with at_work(options, work_of(options)) as terminal:
        found = run(checkpoint, options, watcher=terminal, cache=_cache(cache))
    if found is None:
        return
    console = _console()
    if found.metric is not None:
        console.print(training_table(found.metric, found.rows))
    for words in found.findings:
        _tell(console, words, warns=not isinstance(words, Note))
    for line in found.profile:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    print(f"wrote {found.folder}: {found.model_file}, training.json, training.html")
    _next(found.next)


@app.command(name="run")
def run_recipe(recipe: Path, *flags: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Run a recipe: a TOML file with a key for each flag of `compress export` or `compress optimize`.

    Relative paths in it are looked for from the current folder, as on the command line.

    Parameters
    ----------
    recipe
        Written by --save-config, or by hand.
    flags
        Any flag of the recipe's command; it overrides the recipe's key.
    """
    from cyclopts.config import Dict

    from compress.jobs.recipe_file import read

    command, values = read(recipe)
    config = Dict(data=dict(values), source=str(recipe), use_commands_as_keys=False)
    running = App(name="compress", config=config, suppress_keyboard_interrupt=False, error_formatter=_refusal)
    if command == "export":
        running.command(partial(export, recipe=recipe), name=command)
    else:
        running.command(partial(optimize, recipe=recipe), name=command)
    running([command, *spread(flags)], exit_on_error=False)


cached = App(name="cache", help="What earlier runs did of their stages, and later ones need not do again.")
app.command(cached)


@cached.command(name="list")
def list_cached() -> None:
    """Tell what is kept: each stage, what it did, its size, and when it was used last.

    What was not used for longest goes when all of it is more than COMPRESS_CACHE_GB, in gigabytes: 10 if that is not
    set; with 0 nothing is kept.
    """
    from compress.report.cached import cache_table

    _console().print(cache_table(StageCache.of()))


@cached.command
def clear() -> None:
    """Remove all that is kept; a run at work goes on without."""
    from compress.console.durations import bytes_text
    from compress.console.wording import counted

    count, size = StageCache.of().clear()
    print(f"removed {counted(count, 'stages')}, {bytes_text(size)}")


def _cache(wanted: bool) -> StageCache | None:
    return StageCache.of() if wanted else None


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=140)


def _next(lines: Sequence[str]) -> None:
    """Commands and files to go on with."""
    print("\n".join(f"{'next' if not at else '':<8} {line}" for at, line in enumerate(lines)))


def _save(path: Path, checkpoint: Path, options: ExportOptions | OptimizeOptions) -> None:
    from compress.jobs.places import refuse_overwriting
    from compress.jobs.recipe import inputs_of
    from compress.jobs.recipe_file import write

    refuse_overwriting(path, inputs_of(options, checkpoint), "--save-config", gone=options.output)
    write(path, checkpoint, options)


@app.command
def inspect(checkpoint: Path, *, source: SourceOptions | None = None, roofline: bool = False, threads: int = 1) -> None:
    """Tell what a model file is, its signature, weights and multiply-accumulates; of an artifact what was done, too.

    Parameters
    ----------
    checkpoint
        Any model file, a Hugging Face folder, or an artifact's folder.
    roofline
        Run it in ONNX Runtime, and tell what bounds each layer on this machine: arithmetic, memory, or overhead.
    threads
        For the roofline.
    """
    from compress.console.quiet import quiet
    from compress.console.wording import counted
    from compress.data.sizes import batches_of
    from compress.formats.file_kind import file_kind
    from compress.jobs.examine import examine, kind_of_file, next_of, told_of
    from compress.model import OnnxModel
    from compress.runtime.measure import onnx_params, onnx_work, torch_macs, torch_params

    source = source or SourceOptions()
    with quiet(verbose=source.verbose):
        found = examine(checkpoint, source, roofs=roofline, threads=threads)
        weights = macs = kind = None
        left = 0
        if isinstance(found.model, OnnxModel):
            kind, weights = kind_of_file(found.model), onnx_params(checkpoint)
            work = onnx_work(checkpoint, found.signature)
            macs, left = work.macs, work.uncounted
        elif found.model is not None:
            kind, weights = file_kind(checkpoint).value, torch_params(found.model.module)
            macs = torch_macs(found.model.module, found.signature)
    if kind is not None:
        print(f"kind     {kind}")
    if found.artifact is not None:
        for name, text in told_of(found.artifact).items():
            print(f"{name:<8} {text}")
    print(f"inputs   {', '.join(map(str, found.signature.inputs))}")
    print(f"outputs  {', '.join(map(str, found.signature.outputs))}")
    sizes = found.signature.sizes_text
    if sizes:
        print(f"sizes    {sizes}")
    if found.model is not None:
        print(f"params   {weights:,}")
        beside = f", without {counted(left, 'layers')} in loops, or of sizes or operators not known" if left else ""
        (call,) = batches_of(found.signature, ()) if not found.signature.batches else (1,)
        of = f" for the {call} samples of a call" if call > 1 else f" for a sample at {sizes}" if sizes else ""
        print(f"MACs     {macs:,}{of}{beside}")
    if found.artifact is not None:
        _next(next_of(found.artifact))
    if found.roofline is not None:
        from compress.report.roofline import roofline_table

        _console().print(roofline_table(found.roofline))


@app.command
def lint(
    model: Path,
    *,
    target: Literal["cpu", "tensorrt"] | None = None,
    layers: Annotated[bool, Parameter(name=["--layers", "--verbose"], negative="")] = False,
    json_: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Say what a target would make of an ONNX file: each layer's precision, what it refuses, what is slow, and why.

    Nothing is run, and TensorRT is not needed. Exit code 1 when the target would refuse the file.

    Parameters
    ----------
    model
        An artifact's folder, or an ONNX file.
    target
        What is to run it: ONNX Runtime on a CPU, or TensorRT; by default what the artifact was made for, else TensorRT.
    layers
        Show each layer, too, behind what there is to mend.
    json_
        Print layers and findings as JSON.
    """
    import json

    from compress.tensorrt.lint import lint_tensorrt
    from compress.tensorrt.lint_cpu import lint_cpu
    from compress.tensorrt.lint_report import show_lint

    found = (lint_cpu if (target or _made_for(model)) == "cpu" else lint_tensorrt)(_onnx_of(model))
    if json_:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        show_lint(found, _console(), layers=layers)
    if found.refused:
        sys.exit(1)


@app.command
def engine_script(
    artifact: Path,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"], group=RUN)] = Path("build_engine.py"),
    engine: EngineOptions | None = None,
) -> None:
    """Write the script that builds a TensorRT engine where TensorRT is: in the Triton container that will serve it.

    The script is one file; it takes the artifact's folder and writes another, with model.plan, for `serve pack`.

    Parameters
    ----------
    artifact
        What `compress export --target tensorrt` wrote.
    output
        The script; replaced if it is there.
    """
    from compress.jobs.places import refuse_overwriting
    from compress.tensorrt.script import write_script

    refuse_overwriting(output, [artifact], "-o")
    write_script(artifact, engine or EngineOptions(), output)
    print(f"wrote {output}: run it as `python3 {output.name} ARTIFACT OUTPUT` where TensorRT is")


@app.command
def measure(
    models: Annotated[list[Path], Parameter(consume_multiple=True, negative="")],
    /,
    *,
    options: MeasureOptions | None = None,
    json_: Annotated[Path | None, Parameter(name="--json", group=RUN)] = None,
) -> None:
    """Run models on the same inputs in turns, and time them: on the CPU, or on a GPU between CUDA events.

    Parameters
    ----------
    models
        Artifacts, ONNX files or model files of torch, of one signature; the others are compared with the first.
    json_
        A file for the figures, with what they were taken on.
    """
    import json

    from compress.jobs.measure import measure_files
    from compress.jobs.measure_report import measure_table
    from compress.jobs.places import refuse_overwriting
    from compress.storage.files import write_files

    options = options or MeasureOptions()
    if json_ is not None:
        refuse_overwriting(json_, models, "--json")
    warn(options, models)
    with at_work(options) as terminal:
        tick = terminal.started("measure")
        found = measure_files(models, options, lambda done, total: tick(done, total, "rounds"))
    console = _console()
    console.print(measure_table(found))
    for batch, told in found.turns.items():
        shapes = ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in found.shapes[batch].items())
        console.print(f"batch {batch}, {shapes}: {told}", markup=False, highlight=False, soft_wrap=True)
    for figure in found.figures:
        if figure.cpu_nodes:
            kinds = ", ".join(f"{count} {kind}" for kind, count in figure.cpu_nodes.items())
            told = f"{figure.model}, batch {figure.batch}: on the CPU run {kinds}"
            console.print(f"[yellow]![/] {escape(told)}", highlight=False)
    for name, why in found.not_run.items():
        console.print(f"[yellow]![/] {escape(f'{name} does not run: {why}')}", highlight=False)
    if json_ is not None:
        write_files({json_: json.dumps(found.to_dict(), indent=2) + "\n"})


def _made_for(path: Path) -> str:
    """The target that an artifact was made for; TensorRT of a file, and of what no target has decided."""
    from compress.artifact import Artifact

    stages = Artifact.load(path).stages if path.is_dir() else ()
    told = (str(stage.options["target"]) for stage in reversed(stages) if "target" in stage.options)
    return "cpu" if next(told, "tensorrt") == "cpu" else "tensorrt"


def _onnx_of(path: Path) -> Path:
    """The ONNX file of an artifact, or the file itself."""
    from compress.artifact import Artifact

    if not path.is_dir():
        return path
    artifact = Artifact.load(path)
    return artifact.model_path.with_name("model.onnx") if artifact.format == "plan" else artifact.model_path


def _renamed(argument: str) -> str:
    if argument != "--trust-pickle":
        return argument
    print("warning: --trust-pickle is now named --trust", file=sys.stderr)
    return "--trust"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a user's mistake ends with three lines and exit code 2, Ctrl-C with one and 130."""
    words = [_renamed(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]
    run_to_end(lambda: app(spread(words), exit_on_error=False), resumes=bool(words) and words[0] in RESUMES)
