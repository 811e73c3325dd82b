"""`serve plan`: how many replicas a traffic needs, and how to scale them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from compress.errors import ServerError

__all__ = ["plan"]

out = Console(highlight=False, soft_wrap=True)
Many = Parameter(consume_multiple=True, negative_iterable="")
NOT_KEPT = 3


def plan(
    report: Path,
    *,
    traffic: Path,
    slo: str,
    repository: Path | None = None,
    instances: int | None = None,
    max_batch_size: int | None = None,
    queue_delay_us: int = 0,
    scale: float = 1.0,
    hourly_cost: float = 0.0,
    min_replicas: int = 2,
    max_replicas: int | None = None,
    target: float | None = None,
    start_s: float = 60.0,
    max_wait_s: float = 0.5,
    samples: int = 20_000,
    seed: int = 0,
    output: Annotated[tuple[Path, ...], Many] = (),
) -> None:
    """Simulate a traffic on replicas of what a load test measured: how many, at what cost, and how to scale them.

    The report is a sweep of one replica, from one client to more than it can serve at once: `serve load --concurrency
    1,2,4,8,16,32 --output load.json`; a run with --rate in it makes the prediction better. Exit code 3 where no
    setting keeps the objective.

    Parameters
    ----------
    report
        What `serve load --output` wrote as .json.
    traffic
        CSV of times (seconds or ISO 8601) and requests a second; or of one column, a time for each request.
    slo
        Such as 'p99<50ms,errors<0.1%'.
    repository
        The model repository that was measured; tells instances and batches. Otherwise name them:
    instances
        Of the model.
    max_batch_size
        Of the dynamic batcher; 0 where there is none.
    queue_delay_us
        How long the batcher waits for a fuller batch.
    scale
        Multiply the traffic's rates.
    hourly_cost
        Of one replica.
    min_replicas
        At least; two, so that one may fail.
    max_replicas
        At most; by default half as many again as the traffic takes.
    target
        Try only this target of the autoscaler, in requests a second a replica.
    start_s
        From when a replica is asked for until it answers.
    max_wait_s
        How long the gateway lets a request wait before it refuses it (`serve gateway --max-wait-s`).
    samples
        Requests simulated at each rate of one replica.
    seed
        The same one gives the same plan.
    output
        Files to write, by their ending: .json (for `serve deploy render --plan`), .html (plots).
    """
    import json

    from serve.cli.load import check_outputs
    from serve.load.report.report import read_report, write_text
    from serve.load.slo import parse_objective
    from serve.plan.choose import plan as make_plan
    from serve.plan.fleet import Hosting
    from serve.plan.report import advice, to_dict, verdict
    from serve.plan.service import Batching, batching_of, service_of
    from serve.plan.traffic import read_traffic
    from serve.repository.read import read_models

    check_outputs(output, (".json", ".html"))
    for name, value, least in (
        ("scale", scale, 1e-9), ("min-replicas", min_replicas, 1), ("samples", samples, 1000), ("start-s", start_s, 0),
        ("hourly-cost", hourly_cost, 0), ("max-wait-s", max_wait_s, 0), ("instances", instances or 1, 1),
        ("max-replicas", max_replicas or min_replicas, min_replicas), ("target", target or 1, 1e-9),
    ):  # fmt: skip
        if value < least:
            raise ServerError(
                f"can't plan with --{name} {value:g}", why="it is too small", mend=f"give {least:g} or more"
            )
    measured = read_report(report)
    if not measured.runs:
        raise ServerError(f"can't plan with {report}", why="it has no runs", mend="name another load test")
    model = measured.runs[0].model
    if repository is not None:
        batching = batching_of({each.name: each.config for each in read_models(repository)}, model)
    elif instances is not None and max_batch_size is not None:
        batching = (Batching(model, instances, max_batch_size, queue_delay_us / 1e6),)
    else:
        raise ServerError(
            "can't tell how Triton runs the model",
            why="neither a repository nor instances and batch size are named",
            mend="give --repository, or --instances and --max-batch-size",
        )
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        tasks = {what: progress.add_task(what, total=None) for what in ("one replica", "the fleet")}
        found = make_plan(
            service_of(measured, batching), read_traffic(traffic, scale=scale), parse_objective(slo),
            Hosting(start_s, max_wait_s, hourly_cost), least=min_replicas, most=max_replicas, target=target,
            samples=samples, seed=seed,
            on_progress=lambda what, done, of: progress.update(tasks[what], completed=done, total=of),
        )  # fmt: skip
    out.print(verdict(found), markup=False)
    for line in advice(found):
        out.print(f"  {line}", markup=False)
    if hourly_cost:
        out.print(f"  cost: {found.cost(found.chosen.replica_hours):,.2f}", markup=False)
    for path in output:
        if path.suffix == ".json":
            text = json.dumps(to_dict(found), indent=1) + "\n"
        else:
            from serve.plan.page import page

            text = page(found, measured.runs)
        write_text(path, text)
        out.print(f"wrote {path}", markup=False)
    if not found.kept:
        sys.exit(NOT_KEPT)
