"""`serve deploy`: what carries a repository from one machine to a fleet."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console

from serve.deploy.cluster.load_jobs import LoadJobs
from serve.deploy.cluster.train_jobs import TrainJob
from serve.deploy.monitoring.monitoring import MonitoringOptions
from serve.deploy.options import RenderOptions

__all__ = ["deploy"]

deploy = App(name="deploy", help="Files that carry a repository from one machine to a fleet.")
NOT_KEPT = 3
out = Console(highlight=False, soft_wrap=True)


@deploy.command
def monitoring(
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("deploy"),
    options: Annotated[MonitoringOptions | None, Parameter(name="*")] = None,
) -> None:
    """Write what Prometheus scrapes, computes and wakes people for, and Grafana's dashboard.

    Parameters
    ----------
    output
        A folder; its prometheus/ and grafana/ are written, other files there stay.
    """
    from serve.deploy.monitoring.monitoring import write_monitoring

    for path in write_monitoring(output, options or MonitoringOptions()):
        out.print(f"wrote {path}")


@deploy.command
def render(
    repository: Path,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("kubernetes"),
    options: Annotated[RenderOptions, Parameter(name="*")],
) -> None:
    """Write Kubernetes manifests for a model repository: Kustomize overlays and a Helm chart.

    Parameters
    ----------
    repository
        What is to be served, as `serve pack` wrote it.
    output
        A folder; what an earlier run wrote there is replaced.
    """
    from serve.deploy.cluster.render import render as write

    made, warnings = write(repository, output, options)
    for text in warnings:
        out.print(f"! {text}", markup=False)
    out.print(f"wrote {len(made)} files; look at them with: kubectl kustomize {output}/overlays/cpu", markup=False)


@deploy.command
def load(
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("load.yaml"),
    options: Annotated[LoadJobs, Parameter(name="*")],
) -> None:
    """Write Kubernetes Jobs that load-test from several pods at once: one schedule, one result.

    Parameters
    ----------
    arguments
        Behind --, what `serve load` takes: -- --model digits --rate 20000 --duration 60.
    output
        The file.
    """
    from compress.vetting.replace import replace_file
    from serve.deploy.cluster.load_jobs import jobs_of, lines_first
    from serve.deploy.cluster.yaml_text import several

    replace_file(output, several(jobs_of(options, arguments), "load"))
    for text in lines_first(options):
        out.print(f"! {text}", markup=False)
    out.print(f"wrote {output}; send the load with: kubectl apply -f {output}", markup=False)


@deploy.command
def train(
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("train.yaml"),
    options: Annotated[TrainJob, Parameter(name="*")],
) -> None:
    """Write a Kubernetes Job that trains on several machines, and goes on when one dies or comes back.

    Parameters
    ----------
    arguments
        Behind --, the training as it would be typed: -- finetune pruned.pt --data train.npz -o recovered.
    output
        The file.
    """
    from compress.vetting.replace import replace_file
    from serve.deploy.cluster.train_jobs import lines_first, training_of
    from serve.deploy.cluster.yaml_text import several

    replace_file(output, several(training_of(options, arguments), "train"))
    for text in lines_first(options):
        out.print(f"! {text}", markup=False)
    out.print(f"wrote {output}; train with: kubectl apply -f {output}", markup=False)


@deploy.command
def gate(
    repository: Path, *, model: Annotated[tuple[str, ...], Parameter(consume_multiple=True)], max_drop: float
) -> None:
    """Hold models to the accuracy that compression may cost; exit code 3 where one lost more, or nobody knows.

    Parameters
    ----------
    repository
        What `serve pack` wrote; its files are checked.
    model
        Names of models that were packed.
    max_drop
        Points of the metric that the version which is served may have lost.
    """
    from serve.deploy.gate import judge

    judged = [judge(repository, name, max_drop) for name in model]
    for each in judged:
        out.print(f"{each.model} {each.version}: {each.words}{'' if each.kept else ': refused'}", markup=False)
    if not all(each.kept for each in judged):
        sys.exit(NOT_KEPT)


@deploy.command
def requirements(repository: Path) -> None:
    """Print what a repository's hooks require, for deploy/docker/triton.Dockerfile.

    Parameters
    ----------
    repository
        What `serve pack` wrote.
    """
    from serve.repository.read import read_models
    from serve.up.container import requirements_of

    for text in requirements_of(read_models(repository)):
        print(text)
