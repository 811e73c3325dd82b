"""`serve load` and its subcommands: parse, call, print."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console

from compress.errors import ServerError
from serve.load.options import LoadOptions, Scenario

__all__ = ["check_outputs", "load"]

load = App(
    name="load",
    help="Load-test a server, and tell the truth about it.",
    suppress_keyboard_interrupt=False,
)
out = Console(highlight=False, soft_wrap=True)
Flat = Parameter(name="*")
Many = Parameter(consume_multiple=True, negative_iterable="")
NOT_KEPT, WORSE, NONE_ANSWERED, INVALID = 3, 1, 1, 4


@load.default
def run(
    url: str = "http://127.0.0.1:8080",
    *,
    concurrency: Annotated[tuple[str, ...], Many] = (),
    rate: Annotated[tuple[str, ...], Many] = (),
    scenario: Scenario | None = None,
    slo: str = "",
    precision: float = 0.05,
    confirmations: int = 3,
    hourly_cost: float | None = None,
    output: Annotated[tuple[Path, ...], Many] = (),
    options: Annotated[LoadOptions | None, Flat] = None,
) -> None:
    """Send load to a server; report throughput, latency, errors, and where the time went.

    An open loop (--rate) sends when requests are due, whatever becomes of the others, and counts latency from then
    on; a closed loop (--concurrency) waits for answers, as clients with nothing else to do would. With --slo alone,
    the highest rate that keeps it is searched. Exit code 3 when an objective is not kept, 1 where
    nothing was answered, 4 where a run is invalid, as its figures are then the tester's own, or not all could be sent.

    Parameters
    ----------
    url
        http://host:port of a gateway or a Triton, grpc://host:port, or http://host:port/path of anything.
    concurrency
        Closed loop: 16, or several runs: 1,4,16 or 1..128.
    rate
        Open loop, requests a second: 500, a ramp 100..500, or steps 100:10,500:20 with their seconds; several are
        several runs.
    scenario
        After MLPerf: single-stream, multi-stream, server (with --slo) or offline.
    slo
        Such as 'p99<20ms,errors<0.1%': judged for each run; without a load, its highest rate is searched.
    precision
        Of that search, as a share.
    confirmations
        Runs with fresh arrivals that must keep it.
    hourly_cost
        Of what serves: gives the cost of a million inferences.
    output
        Files to write, by their ending: .json (all), .html (plots), .csv (each second), .hlog (HdrHistogram's log).
    """
    from serve.load.measure import Plan, measure
    from serve.load.report.live import show_progress
    from serve.load.report.terminal import print_report
    from serve.load.send.on_ray import workers_on_ray

    check_outputs(output, (".json", ".html", ".csv", ".hlog"))
    plan = Plan(concurrency, rate, scenario, slo, hourly_cost, precision, confirmations)
    terminal = Console(stderr=True)
    given = _with_secrets(options or LoadOptions(), url)
    with workers_on_ray(given) as own, show_progress(terminal) as on_progress:
        report = measure(
            own, plan, on_progress=on_progress,
            on_run=None if terminal.is_terminal else lambda result: terminal.print(f"done: {result.offered}"),
        )  # fmt: skip
    print_report(report, _console())
    _write(report, output)
    if report.answered and report.invalid:  # before the objective, which may have been missed by the tester itself
        sys.exit(INVALID)
    if not report.kept:
        sys.exit(NOT_KEPT)
    if not report.answered:
        sys.exit(NONE_ANSWERED)


@load.command
def report(files: Annotated[tuple[Path, ...], Many], /, *, output: Annotated[tuple[Path, ...], Many] = ()) -> None:
    """Show results again, several laid over each other.

    Parameters
    ----------
    files
        What --output wrote as .json.
    output
        Files to write, by their ending: .html, .csv, .hlog.
    """
    from serve.load.report.report import read_report
    from serve.load.report.terminal import print_report

    check_outputs(output, (".html", ".csv", ".hlog"))
    if not files:
        raise ServerError("there is nothing to show", why="no file is named", mend="name what --output wrote as .json")
    read = [(path.stem, read_report(path)) for path in files]
    for name, each in read:
        if len(read) > 1:
            out.print(f"[bold]{name}[/]")
        print_report(each, _console())
    if output:
        from serve.load.report.overlay import overlaid

        _write(overlaid(read), output, names=[name for name, _ in read])


@load.command
def compare(
    before: Path | None = None,
    after: Path | None = None,
    *,
    ab: Annotated[tuple[str, ...], Many] = (),
    rounds: int = 6,
    concurrency: int = 16,
    rate: str = "",
    max_regression: str = "5%",
    strict: bool = False,
    output: Annotated[tuple[Path, ...], Many] = (),
    options: Annotated[LoadOptions | None, Flat] = None,
) -> None:
    """Say whether a server became slower; exit code 1 when it did, by more than is allowed.

    Compares two files, or two servers that take turns (--ab), so that a noisy machine is as noisy for both.

    Parameters
    ----------
    before, after
        What `serve load --output` wrote as .json.
    ab
        Two URLs, measured in turns under one load.
    rounds
        Of each of them.
    concurrency
        With --ab: a closed loop of so many clients.
    rate
        With --ab: an open loop instead.
    max_regression
        How much worse a figure may be.
    strict
        Exit code 1 also where the interval leaves it open.
    output
        Files to write, by their ending: .json, .html; with --ab alone also of both sides.
    """
    from serve.load.figures.compare import compare as compare_files
    from serve.load.report.report import NOT_ALL, read_report
    from serve.load.report.terminal import print_comparisons

    allowed = _share(max_regression)
    own = options or LoadOptions()
    check_outputs(output, (".json", ".html"))
    if ab:
        if before is not None or len(ab) != 2:
            raise ServerError("can't compare", why="--ab takes two URLs, and no files", mend="give --ab URL1 URL2")
        from serve.load.interleave import interleave
        from serve.load.report.live import show_progress
        from serve.load.send.on_ray import workers_on_ray

        given = _with_secrets(own.with_(rate=rate, concurrency=concurrency), ab[0])
        with workers_on_ray(given) as of_all, show_progress(Console(stderr=True)) as on_progress:
            sides, comparison = interleave(
                [of_all.with_(url=url) for url in ab],
                rounds=rounds, allowed=allowed, on_progress=on_progress,
            )  # fmt: skip
        comparisons = [comparison]
    else:
        if before is None or after is None:
            raise ServerError(
                "can't compare", why="two results are needed", mend="name two files, or give --ab URL1 URL2"
            )
        sides = (read_report(before), read_report(after))
        comparisons = compare_files(*sides, allowed=allowed)
    print_comparisons(comparisons, allowed, _console())
    if ab and sides[0].ended:
        out.print(f"{NOT_ALL}: {sides[0].ended}", markup=False)
    if output:
        from serve.load.report.overlay import overlaid

        names = list(ab) if ab else [path.stem for path in (before, after) if path is not None]
        _write(overlaid(list(zip(names, sides, strict=True))), output, names=names, comparisons=comparisons)
    worse = any(each.worse for each in comparisons)
    undecided = any(each.undecided for each in comparisons)
    word = "worse" if worse else "undecided: more rounds or longer runs would tell" if undecided else "no worse"
    out.print(f"{word} (by more than {max_regression})" if worse else word)
    if worse or (strict and undecided):
        sys.exit(WORSE)


@load.command
def worker(
    *,
    host: str = "127.0.0.1",
    port: int = 9200,
    allow_remote: bool = False,
    once: bool = False,
    tls_certificate: Path | None = None,
    tls_key: Path | None = None,
) -> None:
    """Send load for a coordinator on another machine (`serve load --worker HOST:PORT`), until interrupted.

    Both must know the same token, from the environment's SERVE_LOAD_TOKEN.

    Parameters
    ----------
    host
        Address to listen at.
    port
        To listen at.
    allow_remote
        Send load to other machines than this one.
    once
        End when the first coordinator has left.
    tls_certificate
        PEM file with the chain that it shows: what a coordinator's --worker-ca vouches for.
    tls_key
        PEM file with its private key.
    """
    from serve.load.send.worker import listen

    if (tls_certificate is None) != (tls_key is None):
        missing = "--tls-key" if tls_key is None else "--tls-certificate"
        raise ServerError("the worker can't speak TLS", why=f"{missing} is missing", mend="give both, or neither")
    tls = None if tls_certificate is None or tls_key is None else (tls_certificate, tls_key)
    listen(
        host, port, token=os.environ.get("SERVE_LOAD_TOKEN", ""), allow_remote=allow_remote, tls=tls, once=once,
        on_event=lambda text: out.print(text, markup=False),
    )  # fmt: skip


def _with_secrets(options: LoadOptions, url: str) -> LoadOptions:
    environ = os.environ
    return options.with_(url=url, key=environ.get("SERVE_API_KEY", ""), token=environ.get("SERVE_LOAD_TOKEN", ""))


def _share(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 100:
        raise ServerError(f"can't allow {text!r}", why="it is no share", mend="give --max-regression 5%")
    return value


def check_outputs(paths: tuple[Path, ...], endings: tuple[str, ...]) -> None:
    """Before any load is sent for nothing."""
    for path in paths:
        if path.suffix not in endings:
            raise ServerError(
                f"can't write {path}", why="its ending says no kind of file", mend=f"let it end in {', '.join(endings)}"
            )
        if not path.absolute().parent.is_dir():
            raise ServerError(f"can't write {path}", why="there is no such folder", mend="make it, or name another")
        if path.suffix == ".html":
            from serve.load.report.page import check_plots

            check_plots()


def _write(report: Any, paths: tuple[Path, ...], **others: Any) -> None:
    import json

    from serve.load.report.report import write_text
    from serve.load.report.terminal import csv_text, hlog_text

    for path in paths:
        match path.suffix:
            case ".json":
                text = json.dumps(report.to_dict(), indent=1) + "\n"
            case ".csv":
                text = csv_text(report)
            case ".hlog":
                text = hlog_text(report)
            case _:
                from serve.load.report.page import page

                text = page(report, **others)
        write_text(path, text)
        out.print(f"wrote {path}", markup=False)


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=120)
