"""What the gateway says of a Triton, so that one is taken away that nothing asks any more.

A Triton that ends loses what it was asked; and once its pod is gone, its address answers nobody who connects: who tries
waits. So the new one is asked before, and the old one is closed to new connections: the gateway tells that from its
probes, as of any server that stops, and asks the other one, while the old one answers what it has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from deploy.containers.engine import Engine
from serve.deploy.cluster.naming import GATEWAY_PORT, TRITON_PORTS

__all__ = ["Asked", "Silent", "asked"]

# In the gateway's container, as who rolls need not know where it was published; the key comes by stdin.
REFUSED = 41  # as no shell and no engine ends
ASK = f"""import sys, urllib.error, urllib.request as web
head = {{"Authorization": "Bearer " + sys.stdin.read().strip()}}
request = web.Request("http://127.0.0.1:{GATEWAY_PORT}/metrics", headers=head)
try:
    print(web.urlopen(request, timeout=5).read().decode())
except urllib.error.HTTPError as err:
    sys.exit({REFUSED} if err.code in (401, 403) else 1)
"""
ROW = re.compile(r'^gateway_upstream_(up|in_flight)\{upstream="([^"]*)"\} (\S+)$', re.MULTILINE)
NETWORKS = "{{range $name, $at := .NetworkSettings.Networks}}{{$name}}={{$at.IPAddress}} {{end}}"


@dataclass(frozen=True)
class Asked:
    """What the gateway says of a Triton.

    Attributes:
        up: whether it asks it.
        in_flight: requests that it has not answered yet.
    """

    up: bool
    in_flight: int


class Silent(Enum):
    """Why the gateway does not say whom it asks."""

    NOW = "it does not answer just now"
    REFUSES = "it has no key for its metrics, as once that was revoked: however long one waits, it won't say"


def asked(engine: Engine, name: str, pod: str) -> Asked | Silent:
    """What the gateway says of a pod's Triton.

    Args:
        engine: Podman.
        name: of the application.
        pod: whose Triton it is.
    """
    at = engine.run("volume", "inspect", "--format", "{{.Mountpoint}}", f"{name}-metrics-key", check=False)
    try:
        key = (Path(at.stdout.strip()) / "key").read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return Silent.REFUSES if at.returncode == 0 else Silent.NOW
    told = engine.run("exec", "--interactive", f"{name}-gateway-gateway", "python3", "-c", ASK, check=False, text=key)
    if told.returncode:
        return Silent.REFUSES if told.returncode == REFUSED else Silent.NOW
    first = engine.run("pod", "inspect", "--format", "{{.InfraContainerID}}", pod, check=False).stdout.strip()
    found = engine.run("inspect", "--format", NETWORKS, first, check=False).stdout.split()
    address = dict(each.partition("=")[::2] for each in found).get(f"{name}-models", "")
    upstream = f"{address}:{TRITON_PORTS['http']}"
    rows = {what: float(value) for what, which, value in ROW.findall(told.stdout) if which == upstream}
    return Asked(up=rows.get("up") == 1.0, in_flight=int(rows.get("in_flight", 0.0)))
