"""The `compress` command, and its commands that make something: parse, call, print."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, CycloptsPanel, Parameter, UnknownOptionError

from compress import __version__
from compress.cli.caching import cached
from compress.cli.looking import engine_script, explain, inspect, lint, measure
from compress.cli.printed import console_of, tell, tell_next
from compress.console.wording import Assumed, AssumedWarning, Note
from compress.errors import ResourceError, printable
from compress.jobs.running import at_work, run_to_end, spread, warn, work_of
from compress.options import (
    RUN,
    ExportOptions,
    FinetuneOptions,
    OptimizeOptions,
    SensitivityOptions,
)
from compress.storage.stage_cache import StageCache

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["app", "main"]

RESUMES = ("export", "optimize", "finetune", "run")  # commands that keep what is done

ELSEWHERE = {
    ("measure", "--eval"): "--data",
    ("measure", "--calibration"): "--data",
    ("explain", "--eval"): "--data",
    ("export", "--data"): "--eval, --calibration or --finetune",
    ("optimize", "--data"): "--eval, --calibration or --finetune",
    ("sensitivity", "--data"): "--eval",
}
"""What a flag of other commands is called here."""


def _refusal(err: CycloptsError) -> object:
    """What is wrong with a flag, or with a recipe, whose values it quotes."""
    told = printable(str(err), keep="\n")
    if isinstance(err, UnknownOptionError):
        command, flag = (err.command_chain or ("",))[0], (err.token.keyword or err.token.value).partition("=")[0]
        name = ELSEWHERE.get((command, flag))
        told = f"Unknown option: {flag}. Of `compress {command}` it is {name}." if name else told
    return CycloptsPanel(told)


app = App(
    name="compress",
    help="Take a trained PyTorch model to a pruned, INT8, measured ONNX file.",
    version=__version__,
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
    error_formatter=_refusal,
)
app.command(cached)
for looks in (inspect, explain, lint, engine_script, measure):
    app.command(looks)


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

    console = console_of()
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
            tell(console, finding, warns=not isinstance(finding, Note))
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

    Candidates that have lost too much on a part of the data are not measured further. With --calibration, what pruning
    costs is repaired in seconds, and of --finetune's trainings, which take minutes, only the winner has one (--train).
    An interrupted search goes on where it stopped. When no candidate is inside, nothing is written but the search's own
    report, and the exit code is 3.

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
    console = console_of()
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
    for words in (found.training, *found.unpaid, found.served):
        if words:
            tell(console, words, warns=False)
    best = found.best
    assert best is not None  # noqa: S101  none is an error
    proof = found.proof
    told = (
        ""
        if proof is None or proof.drop is None
        else f", {drop_told(proof.drop, metric=found.metric)} on other samples"
    )
    wrote = f"wrote {options.output}, and all candidates in {options.output}.search/search.html"
    how = f" ({found.how})" if found.how else ""
    console.print(f"best for {options.goal}: {best.candidate.name}{how}{told}; {wrote}", markup=False, soft_wrap=True)


@app.command
def sensitivity(checkpoint: Path, *, options: SensitivityOptions) -> None:
    """Prune one layer at a time; tell what each costs, to `compress export --sensitivity`, too: a table, a heat map.

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
    console = console_of()
    console.print(sensitivity_table(found, options.max_drop))
    for words in (*found.warnings, *found.notes):
        if not isinstance(words, Assumed):
            tell(console, words, warns=words in found.warnings)
    console.print(f"wrote {options.output}: sensitivity.json, sensitivity.html", markup=False, soft_wrap=True)


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
    console = console_of()
    if found.metric is not None:
        console.print(training_table(found.metric, found.rows))
    for words in found.findings:
        tell(console, words, warns=not isinstance(words, Note))
    for line in found.profile:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    print(f"wrote {found.folder}: {found.model_file}, training.json, training.html")
    tell_next(found.next)


@app.command(name="run")
def run_recipe(recipe: Path, *flags: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Run a recipe: a TOML file with a key for each flag of `compress export` or `compress optimize`.

    Relative paths in it are looked for from the current folder, as on the command line.

    Parameters
    ----------
    recipe
        Written by `compress export --save-config`, or by hand.
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


def _cache(wanted: bool) -> StageCache | None:
    """None where there is no place for it, or others have a say there: a run goes on without, and says why."""
    if not wanted:
        return None
    try:
        cache = StageCache.of()
        cache.check()
    except ResourceError as err:
        warnings.warn(f"{err.what}: {err.why}; to mend it: {err.mend}", AssumedWarning, stacklevel=2)
        return None
    if cache.most_bytes and not cache.can_keep:
        told = f"stages are not kept for later runs: {cache.folder} can't be written"
        mend = "name a folder of yours in XDG_CACHE_HOME, or do without by --no-cache"
        warnings.warn(f"{told}; to mend it: {mend}", AssumedWarning, stacklevel=2)
    return cache


def _save(path: Path, checkpoint: Path, options: ExportOptions | OptimizeOptions) -> None:
    from compress.jobs.places import refuse_overwriting
    from compress.jobs.recipe import inputs_of
    from compress.jobs.recipe_file import write

    refuse_overwriting(path, inputs_of(options, checkpoint), "--save-config", gone=options.output)
    write(path, checkpoint, options)


def _renamed(argument: str) -> str:
    if argument != "--trust-pickle":
        return argument
    print("warning: --trust-pickle is now named --trust", file=sys.stderr)
    return "--trust"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a user's mistake ends with three lines and exit code 2, Ctrl-C with one and 130."""
    words = [_renamed(argument) for argument in (sys.argv[1:] if arguments is None else arguments)]
    run_to_end(lambda: app(spread(words), exit_on_error=False), resumes=bool(words) and words[0] in RESUMES)
