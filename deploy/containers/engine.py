"""The container engine of this machine, and what it lacks."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.errors import ServerError

__all__ = ["Engine", "find_engine", "missing", "rootless", "tool"]

PACKAGES = "podman buildah runc catatonit netavark aardvark-dns iptables util-linux"
LEAST = (4, 3)
NAMES = (
    'apt-get install netavark aardvark-dns iptables; network_backend = "netavark" in containers.conf; '
    "podman system reset"
)
LEAST_IDS = 1000  # containers run as user 1000
IDS = "usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER, as root; podman system migrate"
BOUNDS = "run it as root; or control groups of version 2, where systemd gives your user the controller pids"
TOOLS = "apt-get install iptables util-linux"
DEBIAN = "localhost/debian-python:3.11"
SUPERUSERS = "/usr/sbin:/sbin"  # not on every user's PATH
NOWHERE = "/proc" if os.path.isdir("/proc") else "/"  # noqa: PTH112  nothing can be written there
OWN_BASE = f"deploy/docker/debian.sh; then PYTHON_IMAGE={DEBIAN} DEBIAN_IMAGE={DEBIAN}"


@dataclass(frozen=True)
class Engine:
    """Podman, or Docker.

    Attributes:
        command: its executable.
        podman: whether it is Podman, which alone plays manifests.
    """

    command: str
    podman: bool

    def run(self, *words: str, check: bool = True, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """One call of it, quiet; paths among the words are absolute.

        It runs where nothing can be written: what watches a container writes a file `oom` where it was started from.

        Raises:
            ServerError: it failed, and `check` is set.
        """
        command = [self.command, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, input=text, cwd=NOWHERE)
        if check and done.returncode:
            said = done.stderr.strip().splitlines() or ["it said nothing"]
            mend = f"the whole command, by hand: {shlex.join([self.command, *words])}"
            if os.strerror(errno.ENOSPC).lower() in said[-1].lower():
                mend = f"free some space: {self.command} system df tells what images and volumes take"
            raise ServerError(f"can't run {shlex.join([self.command, *words[:4]])} …", why=said[-1], mend=mend)
        return done

    def ask(self, *words: str) -> Any:
        """What it answers as JSON."""
        return json.loads(self.run(*words).stdout)

    def has_image(self, name: str) -> bool:
        return self.run("image", "inspect", name, check=False).returncode == 0


def find_engine(environ: Mapping[str, str] = os.environ) -> Engine:
    """The one that ENGINE names, else Podman, else a Docker whose daemon answers.

    Raises:
        ServerError: there is none.
    """
    for name in [environ["ENGINE"]] if environ.get("ENGINE") else ["podman", "docker"]:
        found = shutil.which(name)
        if found is None:
            continue
        podman = os.path.basename(name) != "docker"  # noqa: PTH119  a command, maybe no path
        engine = Engine(os.path.abspath(found), podman)  # noqa: PTH100  of links the name counts
        if engine.podman or engine.run("info", check=False).returncode == 0:
            return engine
    raise ServerError(
        "can't build or run containers",
        why="this machine has neither Podman nor a Docker that answers",
        mend=f"apt-get install --no-install-recommends {PACKAGES}; or start Docker",
    )


def missing(engine: Engine, bases: Sequence[str], *, play: bool) -> list[tuple[str, str]]:
    """What would fail later, each with the command that mends it.

    Args:
        engine: that is to be used.
        bases: images that the build begins from; those that are not here are fetched now.
        play: whether pods are to run, too.
    """
    found = []
    if engine.podman:
        version = engine.run("version", "--format", "{{.Client.Version}}").stdout.strip()
        if tuple(map(int, version.split(".")[:2])) < LEAST:
            found.append((f"Podman {version} is too old: 4.3 plays pods", f"apt-get install {PACKAGES}"))
        info = engine.run("info", "--format", "json", check=False)
        if info.returncode:
            found.append((f"Podman can't work: {info.stderr.strip()}", "see deploy/README.md, On a bare machine"))
        elif play and json.loads(info.stdout)["host"].get("networkBackend") != "netavark":
            found.append(("pods can't find each other by name: Podman's network is CNI's", NAMES))
        if play and not info.returncode and json.loads(info.stdout)["host"].get("serviceIsRemote"):
            found.append(("Podman runs on another machine, as in a virtual one of macOS", "run this there"))
        elif play and (lacks := lacking(("nsenter", "iptables-restore", "ip6tables-restore"))):
            found.append((f"pods' networks can't be kept to themselves without {', '.join(lacks)}", TOOLS))
        if play and not info.returncode:
            found += rootless(json.loads(info.stdout)["host"])
    return found + [(f"the base {base} can't be had", OWN_BASE) for base in bases if not _had(engine, base)]


def rootless(host: Any) -> list[tuple[str, str]]:
    """What Podman without root lacks for pods, each with the command that mends it.

    Args:
        host: as `podman info` tells of it.
    """
    if not host.get("security", {}).get("rootless"):
        return []
    found = []
    if sum(each["size"] for each in host.get("idMappings", {}).get("uidmap") or ()) <= LEAST_IDS:
        found.append(("your user has no ids for containers' users", IDS))
    if host.get("cgroupVersion") != "v2" or "pids" not in (host.get("cgroupControllers") or ()):
        found.append(("Podman without root can't bound pods' processes here", BOUNDS))
    return found


def _had(engine: Engine, base: str) -> bool:
    return engine.has_image(base) or engine.run("pull", "--quiet", base, check=False).returncode == 0


def tool(name: str) -> str:
    """Where a program is; its name where it is not."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{SUPERUSERS}") or name


def lacking(names: Sequence[str]) -> list[str]:
    """Those of the programs that are not here."""
    return [name for name in names if not Path(tool(name)).is_absolute()]
