"""What a command can be asked for of a cluster."""

# Without postponed annotations: what inherits these fields has its flags made from them in another module.
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

__all__ = ["ClusterOptions"]

CLUSTER = Group("Several machines", sort_key=8.5)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Of the machines that share a command's work."""

    ray: Annotated[str | None, Parameter(group=CLUSTER)] = None
    """HOST:PORT of the head of a Ray cluster that this machine is a node of: the work is done on all of its nodes."""

    shared: Annotated[Path | None, Parameter(group=CLUSTER)] = None
    """With --ray, a folder that every node has under this path; by default the work folder, or beside the output."""
