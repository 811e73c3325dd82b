"""Who a pod may talk to, held in its own network by rules of the kernel: what Podman's networks leave open.

An internal network of Podman has no route out, and yet: its server of names asks the outside for anybody, and the
host answers at the bridge's address, whatever listens there on all interfaces. The other way round, a neighbour of
this machine that routes to a bridge reaches each port of a pod, past what is published on 127.0.0.1.

So each pod gets rules before its first container starts. They are the pod's: nothing of the host's firewall is
changed, and they go as it goes. A pod that is started anew by hand (`podman pod restart`), or after the machine was,
has none.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from compress.errors import ServerError
from deploy.containers.engine import Engine, tool

__all__ = ["Fence", "put_up", "rules"]


@dataclass(frozen=True)
class Fence:
    """What a pod may do.

    Attributes:
        sources: networks (CIDR) whose members may ask it.
        hosts: addresses of this machine in them that may not.
        asks: whether it may begin to talk to others; else it answers only.
        closed: whether it takes no new connections; those that it has go on.
    """

    sources: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    asks: bool = True
    closed: bool = False


def rules(fence: Fence, *, version: int = 4) -> str:
    """As `iptables-restore` takes them; of IPv6, which these networks don't have, only what is the pod's own."""
    sources, hosts = (tuple(each for each in some if (":" in each) == (version == 6)) for some in
                      (fence.sources, fence.hosts))  # fmt: skip
    lines = [
        "*filter",
        ":INPUT DROP [0:0]",
        ":FORWARD DROP [0:0]",
        f":OUTPUT {'ACCEPT' if fence.asks else 'DROP'} [0:0]",
        "-A OUTPUT -o lo -j ACCEPT",
        "-A INPUT -i lo -j ACCEPT",
        *(f"-A {chain} -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT" for chain in ("INPUT", "OUTPUT")),
        *(f"-A INPUT -s {host} -j DROP" for host in hosts),
        *(f"-A INPUT -s {source} -p tcp --syn -j REJECT --reject-with tcp-reset" for source in sources if fence.closed),
        *(f"-A INPUT -s {source} -j ACCEPT" for source in sources),
        "COMMIT",
    ]
    return "".join(f"{line}\n" for line in lines)


def put_up(engine: Engine, pid: int, fence: Fence) -> None:
    """Give the network of a process these rules.

    Args:
        engine: Podman; of a user who is not root, it lends the rights for its own networks.
        pid: of the pod's first process.
        fence: who may talk to whom.

    Raises:
        ServerError: the kernel or a tool that is missing refuses: then nothing may run there.
    """
    lent = [] if os.geteuid() == 0 else [engine.command, "unshare"]
    inside = [*lent, tool("nsenter"), f"--net=/proc/{pid}/ns/net"]
    versions = {4: "iptables-restore"} | ({6: "ip6tables-restore"} if Path("/proc/net/if_inet6").exists() else {})
    for version, name in versions.items():
        command = [*inside, tool(name)]
        done = subprocess.run(command, input=rules(fence, version=version), capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServerError(
                "can't keep a pod's network to itself",
                why=f"{name}: {(done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]}",
                mend="the kernel needs its modules for packet filters and connection tracking: "
                "modprobe nf_conntrack nft_compat, as root",
            )
