"""`serve hooks`: a starting file, and a try without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich.console import Console

from compress.errors import printable

__all__ = ["hooks"]

hooks = App(name="hooks", help="Write hooks, and try them without a server.")
out = Console(highlight=False, soft_wrap=True)


@hooks.command
def new(
    *,
    task: Literal["image-classification", "text", "tabular"],
    artifact: Path,
    out_: Annotated[Path, Parameter(name=["--out", "--output", "-o"])] = Path("hooks.py"),
    tokenizer: Path | None = None,
) -> None:
    """Write hooks that fit a network, to start from, and a test of them beside.

    Parameters
    ----------
    task
        What the served model takes: an image file, a text, or a row of numbers.
    artifact
        The folder that `compress export` wrote, or any ONNX file.
    out_
        The hooks' file.
    tokenizer
        The tokenizer.json of a network that takes token ids, where the artifact has none of its own; it is copied
        beside the hooks.
    """
    from compress.vetting.texts import read_text
    from serve.hooks.new import UNKNOWN, new_hooks
    from serve.pack.source import load_source

    written = new_hooks(task, load_source(artifact), out_, tokenizer)
    for file in written:
        out.print(f"wrote {file}", markup=False)
    text = read_text(written[0])
    left = [name for name, given in UNKNOWN.items() if given in text]
    if left:
        out.print(f"fill in:    {', '.join(left)}, as the network was trained with", markup=False)
    out.print(f"try them:  serve hooks check {out_} --artifact {artifact}", markup=False)


@hooks.command
def check(
    hooks: Path, *, artifact: Path, input_: Annotated[Path | None, Parameter(name=["--input", "--image"])] = None
) -> None:
    """Check hooks against the network that they are for, without a server.

    One request is taken all the way through, and bad input is given to preprocess.

    Parameters
    ----------
    hooks
        A Python file with preprocess and/or postprocess.
    artifact
        The folder that `compress export` wrote, or any ONNX file.
    input_
        A file for a model that takes bytes, or a .json file with a value for each input; by default the hooks' own
        example().
    """
    from serve.hooks.bad_input import try_bad_input
    from serve.hooks.check import check_hooks, sample_of, shown
    from serve.hooks.load import load_hooks
    from serve.pack.source import load_source

    source = load_source(artifact)
    loaded = load_hooks(hooks, source.signature)
    item = sample_of(loaded, source, input_)
    for step in check_hooks(loaded, source, item):
        out.print(f"{step.name:<12} {1000 * step.seconds:8.3f} ms", markup=False)
        for name, value in step.made.items():
            out.print(f"  gives {name} = {shown(value)}", markup=False)
    tried = try_bad_input(loaded, source, item)
    if tried:
        out.print("bad input", markup=False)
    for one in tried:
        answer = {None: "is taken", 400: "is refused (400)", 500: "fails (500)"}[one.status]
        out.print(
            f"  {one.argument} = {one.given} {answer}{f': {printable(one.message)}' if one.message else ''}",
            markup=False,
        )
    if any(one.status == 500 for one in tried):
        out.print("  a 500 says that the server is at fault: raise a ValueError where the input is", markup=False)
