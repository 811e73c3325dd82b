"""The two networks of an application by Podman: one without a route out, and one that this machine reaches."""

from __future__ import annotations

import json
from typing import Any

from compress.errors import ServerError
from deploy.containers.application import PART_OF
from deploy.containers.engine import Engine
from deploy.containers.fence import Fence

__all__ = ["fence_of", "make_networks", "remove_networks"]

PARTS = {"models": ["--internal"], "front": []}
Object = dict[str, Any]


def make_networks(engine: Engine, name: str) -> None:
    """Make NAME-models and NAME-front anew: what stands there may be another than the pods count on.

    Raises:
        ServerError: somebody else made one of that name, or uses it.
    """
    for part, flags in PARTS.items():
        network = f"{name}-{part}"
        if found := _network(engine, network):
            if not _ours(found, name):
                why = f"Podman has a network {network} that this application has not made"
                raise ServerError(
                    f"can't bring {name} up", why=why, mend=f"podman network rm {network}; or another --name"
                )
            engine.run("network", "rm", network)
        engine.run("network", "create", *flags, "--label", f"{PART_OF}={name}", network)


def remove_networks(engine: Engine, name: str) -> None:
    """Those that `make_networks` made, as far as nobody uses them."""
    for part in PARTS:
        if _ours(_network(engine, f"{name}-{part}"), name):
            engine.run("network", "rm", f"{name}-{part}", check=False)


def fence_of(engine: Engine, name: str, part: str) -> Fence:
    """Members of the networks may ask. Triton is asked by pods, not by this machine's users, and asks nobody."""
    every = {each: _network(engine, f"{name}-{each}")["subnets"] for each in PARTS}
    if part == "triton":
        inside = every["models"]
        hosts = tuple(each["gateway"] for each in inside if each.get("gateway"))
        return Fence(tuple(each["subnet"] for each in inside), hosts, asks=False)
    return Fence(tuple(each["subnet"] for some in every.values() for each in some))


def _ours(network: Object, name: str) -> bool:
    return bool(network.get("labels", {}).get(PART_OF) == name)


def _network(engine: Engine, name: str) -> Object:
    """What Podman knows of it; empty where there is none."""
    found = engine.run("network", "inspect", name, check=False)
    return {} if found.returncode else dict(json.loads(found.stdout)[0])
