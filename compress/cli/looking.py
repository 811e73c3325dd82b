"""The commands that make no artifact: they look at one, or at a model file, and tell."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.markup import escape

from compress.cli.printed import console_of, tell, tell_next
from compress.jobs.running import at_work, warn
from compress.options import RUN, EngineOptions, ExplainOptions, MeasureOptions, SourceOptions

__all__ = ["engine_script", "explain", "inspect", "lint", "measure"]


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
    from compress.runtime.measure import onnx_params, onnx_work, torch_params, torch_work

    source = source or SourceOptions()
    with quiet(verbose=source.verbose):
        found = examine(checkpoint, source, roofs=roofline, threads=threads)
        weights = work = kind = None
        if isinstance(found.model, OnnxModel):
            kind, weights = kind_of_file(found.model), onnx_params(checkpoint)
            work = onnx_work(checkpoint, found.signature)
        elif found.model is not None:
            kind, weights = file_kind(checkpoint).value, torch_params(found.model.module)
            work = torch_work(found.model.module, found.signature)
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
    if work is not None:
        print(f"params   {weights:,}")
        left = work.uncounted
        beside = f", without {counted(left, 'layers')} in loops, or of sizes or operators not known" if left else ""
        (call,) = batches_of(found.signature, ()) if not found.signature.batches else (1,)
        of = f" for the {call} samples of a call" if call > 1 else f" for a sample at {sizes}" if sizes else ""
        print(f"MACs     {work.macs:,}{of}{beside}")
    if found.artifact is not None:
        tell_next(next_of(found.artifact))
    if found.roofline is not None:
        from compress.report.roofline import roofline_table

        console_of().print(roofline_table(found.roofline))


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
        show_lint(found, console_of(), layers=layers)
    if found.refused:
        sys.exit(1)


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
        found = measure_files(models, options, terminal)
    console = console_of()
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
    console = console_of()
    for table in explain_tables(found, None if options.verbose else options.rows):
        console.print(table)
    if found.not_finite:
        tell(console, not_finite_told(found), warns=True)
    for note in notes_told(found, None if options.verbose else options.rows):
        tell(console, note, warns=False)
    if told := exclusions_told(found):
        console.print(told, markup=False, highlight=False, soft_wrap=True)
    if found.keep_float:
        console.print(f"or to its recipe: {found.recipe.strip()}", markup=False, highlight=False, soft_wrap=True)
    if options.json is not None:
        write_files({options.json: json.dumps(found.to_dict(), indent=2) + "\n"})
        console.print(f"wrote {options.json}", markup=False, highlight=False, soft_wrap=True)


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
