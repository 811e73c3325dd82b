"""`serve deploy`: what carries a repository from one machine to a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console

from serve.deploy.monitoring import MonitoringOptions

__all__ = ["deploy"]

deploy = App(name="deploy", help="Files that carry a repository from one machine to a fleet.")
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
    from serve.deploy.monitoring import write_monitoring

    for path in write_monitoring(output, options or MonitoringOptions()):
        out.print(f"wrote {path}")
