"""What `serve deploy render` writes for Podman, brought up, changed and stopped in order.

Triton is on a network without a way out; the gateway and Prometheus are on that one, and on one that this machine
reaches.
Pods that serve stand under one name there, NAME-triton, as behind a headless service.
"""

from __future__ import annotations

import hashlib
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.errors import ServerError
from deploy.containers.application import Application
from deploy.containers.build import tag_of
from deploy.containers.keys import make_keys
from serve.deploy.cluster.render import render
from serve.deploy.options import RenderOptions
from serve.repository.folders import check_hidden, files_of

__all__ = ["Stack"]

NOTICE_S = 5.0  # for the gateway to look up the new one
GRACE_S = 45
READY_S = 120.0
Object = dict[str, Any]


@dataclass(frozen=True)
class Stack(Application):
    """One application that Podman plays.

    Attributes:
        name: of the application.
    """

    name: str = "serving"

    def up(self, repository: Path) -> str:
        """Bring all up, one after the other.

        Returns:
            The name of the Triton's pod.

        Raises:
            ServerError: something runs already, or does not come up.
        """
        if self.pods():
            raise ServerError(
                f"can't bring {self.name} up", why="it runs already", mend="python -m deploy.containers down, or roll"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._networks()
        self._secrets()
        pod = self.add(repository)
        both = ["--network", f"{self.name}-models:alias={self.name}-gateway", "--network", f"{self.name}-front"]
        self._play("gateway.yaml", *both)
        self._until(lambda: _answers(f"{self.url}/readyz"), "the gateway", f"{self.name}-gateway")
        self._play("prometheus.yaml", *both[2:], "--network", f"{self.name}-models")
        self._until(lambda: _answers(f"{self.prometheus}/-/ready"), "Prometheus", f"{self.name}-prometheus")
        return pod

    def add(self, repository: Path) -> str:
        """Another Triton, with a volume of its own; returns its pod's name once it is ready.

        Raises:
            ServerError: this very repository is served already, it is not what was packed, or Triton does not come up.
        """
        claim = f"models-{_digest(repository)}"
        pod = f"{self.name}-triton-{claim}"
        if pod in self.pods():
            raise ServerError(f"can't add {repository}", why="its files are served already", mend="name another")
        self._forget(pod)
        options = RenderOptions(
            gateway_image=tag_of("gateway"), image=tag_of("triton-cpu"), prometheus_image=tag_of("prometheus"),
            name=self.name, storage=f"pvc:{claim}",
            gateway_port=self.gateway_port, prometheus_port=self.prometheus_port,
        )  # fmt: skip
        check_hidden(repository)
        render(repository, self.folder / "kubernetes", options)
        self._volume(claim, repository)
        try:
            self._play("triton.yaml", "--network", f"{self.name}-models:alias={self.name}-triton")
        except ServerError:
            said = self.engine.run("logs", "--tail", "3", f"{pod}-check", check=False)
            print(f"the repository's check: {said.stdout}{said.stderr}".rstrip(), file=sys.stderr)
            self._forget(pod)
            raise
        ready = ["exec", f"{pod}-triton", "http-ok", "http://127.0.0.1:8000/v2/health/ready"]
        self._until(lambda: self.engine.run(*ready, check=False).returncode == 0, "Triton", pod)
        return pod

    def roll(self, repository: Path) -> str:
        """A second version beside the first, then the first away: no moment without one."""
        before = self.tritons()
        pod = self.add(repository)
        time.sleep(NOTICE_S)
        for each in before:
            self.take_away(each)
        return pod

    def take_away(self, pod: str) -> None:
        """End a Triton that another one stands in for, and remove what it alone had.

        At once: Podman knows no preStop, and a Triton that is told to end while it is asked takes requests that it
        never answers, until its time is up. Of one that has gone, the gateway asks another for what was in flight.
        Sequences that it held are lost.
        """
        self.engine.run("kill", "--signal", "KILL", f"{pod}-triton")
        self._forget(pod)

    def down(self) -> None:
        """Stop those that ask before those that answer; what clients keep (keys, releases) stays."""
        order = (f"{self.name}-prometheus", f"{self.name}-gateway", *self.tritons())
        there = self.pods()
        for pod in (each for each in order if each in there):
            begun = time.perf_counter()
            self.engine.run("pod", "stop", "--time", str(GRACE_S), pod)
            self._forget(pod)
            print(f"{pod} is stopped: {time.perf_counter() - begun:.1f} s", flush=True)
        for part in ("models", "front"):
            self.engine.run("network", "rm", "--force", f"{self.name}-{part}", check=False)

    def pods(self) -> list[str]:
        """Names of its pods."""
        words = ["pod", "ps", "--filter", f"label=app.kubernetes.io/part-of={self.name}", "--format", "{{.Name}}"]
        return self.engine.run(*words).stdout.split()

    def tritons(self) -> list[str]:
        """Names of the pods that serve."""
        return [pod for pod in self.pods() if pod.startswith(f"{self.name}-triton-")]

    def _forget(self, pod: str) -> None:
        """The pod, and the volumes that it alone had."""
        self.engine.run("pod", "rm", "--force", pod, check=False)
        models = [pod.removeprefix(f"{self.name}-triton-")] if pod.startswith(f"{self.name}-triton-") else []
        for volume in [f"{pod}-shm", f"{pod}-tmp", *models]:
            self.engine.run("volume", "rm", "--force", volume, check=False)

    def _networks(self) -> None:
        for part, flags in (("models", ["--internal"]), ("front", [])):
            if self.engine.run("network", "exists", f"{self.name}-{part}", check=False).returncode:
                self.engine.run("network", "create", *flags, f"{self.name}-{part}")

    def _secrets(self) -> None:
        """Keys as volumes."""
        make_keys(self.folder)
        for volume, entry, path in (
            ("keys", "keys.json", self.folder / "keys.json"),
            ("metrics-key", "key", self.folder / "metrics-key"),
        ):
            name = f"{self.name}-{volume}"
            self.engine.run("volume", "rm", "--force", name, check=False)
            self._volume(name, path, entry)

    def _volume(self, name: str, source: Path, entry: str = ".") -> None:
        """A volume with a file or a folder, for anybody in a pod to read."""
        packed = self.folder / f"{name}.tar"
        packed.touch(mode=0o600)
        try:
            with tarfile.open(packed, "w") as archive:
                archive.add(source, entry, filter=_readable)
            self.engine.run("volume", "create", name)
            self.engine.run("volume", "import", name, str(packed))
        finally:
            packed.unlink()

    def _play(self, file: str, *flags: str) -> None:
        self.engine.run("kube", "play", *flags, str(self.folder / "kubernetes/podman" / file))

    def _until(self, ready: Callable[[], bool], what: str, pod: str) -> None:
        deadline = time.monotonic() + READY_S
        while not ready():
            if time.monotonic() > deadline:
                said = self.engine.run("pod", "logs", "--tail", "20", pod, check=False)
                print(said.stdout[-4000:], said.stderr[-2000:], file=sys.stderr)
                raise ServerError(
                    f"can't bring {what} up", why=f"not ready after {READY_S:g} s", mend=f"podman pod logs {pod}"
                )
            time.sleep(0.2)


def _digest(repository: Path) -> str:
    """Of names and contents."""
    found = hashlib.sha256()
    for path in sorted(files_of(repository)):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        found.update(f"{path.relative_to(repository)} {content}\n".encode())
    return found.hexdigest()[:10]


def _readable(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Owned by root: Triton may read what it serves, and nobody in a pod may write it."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755 if entry.isdir() else 0o644
    return entry


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310  on this machine
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
