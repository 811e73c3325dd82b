"""The `compress` command: parse, call, print."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cyclopts import App, CycloptsError
from rich.console import Console

from compress import __version__
from compress.errors import MissingExtraError, ToolkitError
from compress.options import ExportOptions, SourceOptions

__all__ = ["app", "main"]

app = App(
    name="compress",
    help="Take a trained PyTorch model to a pruned, INT8, measured ONNX file.",
    version=__version__,
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
)


@app.command
def export(checkpoint: Path, *, options: ExportOptions) -> None:
    """Prune, finetune, quantize and export a model; measure what was gained and lost.

    The stages are those that options ask for, always in the order prune, finetune, ONNX, fold, INT8. A run that was
    interrupted goes on where it stopped when the same command is given again.

    Parameters
    ----------
    checkpoint
        What compress.save, torch.save, torch.jit.save or torch.export.save wrote.
    """
    from compress.job import export as run
    from compress.progress import Terminal
    from compress.report import stage_table

    with Terminal(Console(stderr=True)) as terminal:
        artifact, report = run(checkpoint, options, watcher=terminal)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    console.print(stage_table(report))
    for finding in report.findings:
        console.print(f"[yellow]![/] {finding}", highlight=False, soft_wrap=True)
    gains = report.gains
    console.print(
        f"{gains['size']:.1f}× smaller than the original's ONNX, {gains['latency_over_torch']:.1f}× faster than torch "
        f"eager, {gains['latency_over_onnx']:.1f}× faster than the original in ONNX Runtime",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"wrote {artifact.folder}: model.onnx, artifact.json, report.json, report.html", soft_wrap=True)


@app.command
def inspect(checkpoint: Path, *, source: SourceOptions | None = None) -> None:
    """Tell what kind of file a checkpoint is, its signature, weights and multiply-accumulates.

    Parameters
    ----------
    checkpoint
        Any model file.
    """
    from compress.checkpoint import load
    from compress.file_kind import file_kind
    from compress.measure import torch_macs, torch_params

    source = source or SourceOptions()
    kind = file_kind(checkpoint)
    loaded = load(checkpoint, inputs=source.input, model=source.model, trust_pickle=source.trust_pickle)
    print(f"kind     {kind.value}")
    print(f"inputs   {', '.join(map(str, loaded.signature.inputs))}")
    print(f"outputs  {', '.join(map(str, loaded.signature.outputs))}")
    print(f"params   {torch_params(loaded.module):,}")
    print(f"MACs     {torch_macs(loaded.module, loaded.signature):,}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a user's mistake ends with three lines and exit code 2."""
    try:
        app(arguments, exit_on_error=False)
    except CycloptsError:
        sys.exit(2)
    except ToolkitError as err:
        print(f"error: {err}", file=sys.stderr)
        sys.exit(err.exit_code)
    except ModuleNotFoundError as err:
        if err.name not in ("torch", "onnx", "onnxruntime", "onnxscript", "torch_pruning", "matplotlib", "jinja2"):
            raise
        missing = MissingExtraError("can't compress", module=err.name, extra="compress")
        print(f"error: {missing}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: what is done is kept; give the same command again to go on", file=sys.stderr)
        sys.exit(130)
