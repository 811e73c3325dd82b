"""`serve tune` and `serve verify`: parse, call, print."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from serve.tune.options import TuneOptions
from serve.verify.chance import CONFIDENCE

if TYPE_CHECKING:
    from serve.verify.run import VerifiedPart

__all__ = ["tune", "verify"]

out = Console(highlight=False, soft_wrap=True)
Flat = Parameter(name="*")


def tune(name: str, *, repository: Path, options: Annotated[TuneOptions, Flat]) -> None:
    """Find the configuration that gives a packed model the most throughput within a latency, on this machine.

    Instances, threads, batch size, queue delay and hook processes are searched by successive halving, each served by a
    real Triton under a closed loop; the last ones take turns. Exit code 3 when none keeps the bound. An interrupted
    search goes on where it stopped when the same command is given again.

    Parameters
    ----------
    name
        That the model was packed under.
    repository
        Where it stands; changed only with --apply.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from serve.tune.report import verdict, write_report
    from serve.tune.run import apply
    from serve.tune.run import tune as run

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("")
        told = ""

        def show(what: str, done: int, total: int) -> None:
            nonlocal told
            bar.update(task, description=what, completed=done, total=total)
            if not console.is_terminal and (stage := what.partition(":")[0]) != told:
                told = stage
                console.print(f"{stage}, {total} trials", highlight=False)

        found = run(repository, name, options, on_progress=show)
    out.print(verdict(found), markup=False)
    for candidate, why in found.failures:
        out.print(f"did not run: {candidate.label()}: {why}", markup=False)
    out.print(f"report: {write_report(found, options.output)}")
    if found.best is None:
        sys.exit(3)
    if options.apply:
        out.print(
            f"wrote it into {repository}; serve it again to use it" if apply(found) else "there is nothing to write"
        )
    elif found.best.candidate != found.present:
        out.print("write it into the repository with --apply")


def verify(
    name: str,
    *,
    eval_: Annotated[Path, Parameter(name="--eval")],
    artifact: Path | None = None,
    tolerance: float | None = None,
    output: str | None = None,
    url: str = "http://127.0.0.1:8080",
    timeout: float = 30.0,
) -> None:
    """Measure a model's accuracy through the server, hooks included; exit code 1 when it is not the artifact's own.

    Without --tolerance it is not where chance does not explain the difference, at 95% confidence. Under a release each
    model or version that answers is measured by itself, and held against the artifact where it serves its file.

    Parameters
    ----------
    name
        Of the served model.
    eval_
        A .npz with an array for each input of the served model and one of labels (label or y), a .jsonl, .csv or .tsv
        with such columns, or a folder of files in subfolders named by label, or with a labels.csv.
    artifact
        What was packed; the accuracy that `compress` measured of it is expected. It has to be the file that is served.
    tolerance
        How far the two may be apart, as a share: 0.002 is 0.2 points. 0 asks for the very same, which the samples that
        the artifact was judged on should give. By default what chance explains is allowed.
    output
        The output that holds the label or the scores; the first by default.
    url
        The gateway. A key for it is taken from the environment's SERVE_API_KEY.
    timeout
        For each answer, in seconds.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from serve.verify.run import verify as run

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")
        found = run(
            url, name, eval_, artifact=artifact, tolerance=tolerance, output=output, timeout_s=timeout,
            key=os.environ.get("SERVE_API_KEY", ""),
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    if found.release:
        out.print(f"{name} is under release: {found.release}", markup=False)
    for part in found.parts:
        _tell(name, part, found.count)
    if not found.holds:
        sys.exit(1)


def _tell(name: str, part: VerifiedPart, total: int) -> None:
    """The accuracy of who answered, and how it stands beside the artifact's."""
    who = f"{part.by} answered {part.count:,} of {total:,} samples" if part.by else f"{name} through the server"
    out.print(f"{who}: {part.accuracy:.2%}" + ("" if part.by else f" of {part.count:,} samples"), markup=False)
    if part.proven is False:
        out.print("it serves another file than the artifact's, and is not held against that", markup=False)
    if part.expected is None:
        return
    of = "" if part.measured_on is None else f" of {part.measured_on:,} samples"
    out.print(f"the artifact's own: {part.expected:.2%}{of}; {_word(part)}")
    if part.proven is None:
        out.print("that it serves the artifact's file could not be seen: the server does not tell its hash")
    if not part.by and part.measured_on is not None and part.measured_on != part.count:
        out.print("these are other samples than the artifact was judged on: a difference may come from them")
    if not part.holds:
        for number, label, answer in part.wrong:
            out.print(f"  sample {number} is {label}, the answer was {answer}", markup=False)


def _word(part: VerifiedPart) -> str:
    """Whether the two are the same, and what chance has to do with it."""
    expected, tolerance = part.expected or 0.0, part.tolerance
    if tolerance is not None:
        within = f"the same, within {tolerance:.2%}" if tolerance else "the same"
        return within if part.holds else "[red]not the same[/]"
    if abs(part.accuracy - expected) <= 1e-12:
        return "the same"
    low, high = (100 * end for end in part.difference)
    interval = f"{CONFIDENCE:.0%} interval of the difference {low:+.2f} to {high:+.2f} points"
    if not part.holds:
        return f"[red]not the same[/]: chance does not explain it ({interval})"
    told = f"within noise: chance explains it ({interval})"
    if part.measured_on == part.count:
        told += "; if these are the very samples that it was judged on, --tolerance 0 asks for no difference at all"
    return told
