"""Names that an application's pods and containers will have, which Podman keeps in one list for both."""

from __future__ import annotations

from compress.errors import ServerError
from deploy.containers.engine import Engine

__all__ = ["check_names"]

PARTS = ("gateway", "prometheus")  # Triton's pods are named by what they serve, too


def check_names(engine: Engine, name: str) -> None:
    """Nothing has such a name: an application may be called as another one's pod, or something by hand.

    Raises:
        ServerError: something has.
    """
    wanted = {f"{name}-{part}{more}" for part in PARTS for more in ("", f"-{part}")}
    pods = engine.run("pod", "ps", "--format", "{{.Name}}").stdout.split()
    containers = engine.run("ps", "--all", "--format", "{{.Names}}").stdout.split()
    if taken := sorted(wanted & {*pods, *containers}):
        raise ServerError(
            f"can't bring {name} up",
            why=f"Podman has a pod or container {' and '.join(taken)} that this application has not made",
            mend="take another --name; or take away what has it: podman ps --all --pod tells what that is",
        )
