"""What `serve deploy render` writes for Podman, brought up, changed and stopped in order.

Triton is on a network without a way out; the gateway and Prometheus are on that one, and on one that this machine
reaches; what networks leave open, rules in each pod close (`fence.py`).
Pods that serve stand under one name there, NAME-triton, as behind a headless service.

One command at a time changes what runs. A roll that ends in the middle is finished by the same command, and `down`
takes all away.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.errors import ServerError
from compress.vetting.replace import replace_file
from deploy.containers.application import PART_OF, Application
from deploy.containers.build import PLAYED, check_images, tag_of
from deploy.containers.fence import put_up
from deploy.containers.keys import make_keys
from deploy.containers.networks import fence_of, make_networks, remove_networks
from deploy.containers.volumes import digest, packed, sweep
from serve.deploy.cluster.render import render
from serve.deploy.cluster.workload import workload_of
from serve.deploy.options import RenderOptions
from serve.repository.keys import public_key as read_public_key

__all__ = ["Stack"]

NOTICE_S = 5.0  # for the gateway to look up the new one
GRACE_S = 45
READY_S = 120.0
LOG_SIZE = "10mb"  # of each container; Podman begins anew where it is full
SIGNER = "key"  # of a pod: Podman makes a volume of a ConfigMap, and fills one of that name anew under whoever has it


@dataclass(frozen=True)
class Stack(Application):
    """One application that Podman plays.

    Attributes:
        name: of the application.
    """

    name: str = "serving"

    def up(self, repository: Path, public_key: Path | None = None) -> str:
        """Bring all up, one after the other; nothing is left where that fails.

        Args:
            repository: what is served.
            public_key: of whoever has to have signed it, and what is rolled out later.

        Returns:
            The name of the Triton's pod.

        Raises:
            ServerError: something runs already, or does not come up.
        """
        with self.held():
            if self.pods():
                raise ServerError(
                    f"can't bring {self.name} up",
                    why="it runs already",
                    mend="python -m deploy.containers down, or roll",
                )
            workload_of(repository)
            for port, flag in ((self.gateway_port, "--gateway-port"), (self.prometheus_port, "--prometheus-port")):
                _check_free(port, flag)
            check_images(self.engine, PLAYED)
            trusted = self._trusted(public_key, renew=True)
            try:
                make_networks(self.engine, self.name)
                self._secrets()
                pod = self._add(repository, trusted)
                self._trust(trusted)
                both = [f"{self.name}-models:alias={self.name}-gateway", f"{self.name}-front"]
                self._play("gateway", f"{self.name}-gateway", both)
                self._until(lambda: _answers(f"{self.url}/readyz"), "the gateway", f"{self.name}-gateway")
                self._play("prometheus", f"{self.name}-prometheus", [f"{self.name}-front", f"{self.name}-models"])
                self._until(lambda: _answers(f"{self.prometheus}/-/ready"), "Prometheus", f"{self.name}-prometheus")
            except BaseException:
                self._clear(grace_s=0)
                raise
            return pod

    def add(self, repository: Path, public_key: Path | None = None) -> str:
        """Another Triton beside those that serve, with a volume of its own; returns its pod's name once it is ready.

        Raises:
            ServerError: it is not what was packed, or Triton does not come up; then nothing of it is left.
        """
        with self.held():
            return self._add(repository, self._trusted(public_key))

    def roll(self, repository: Path, public_key: Path | None = None) -> str:
        """A second version beside the first, then the first away: no moment without one.

        One that is there already, as an earlier roll that was interrupted left it, is taken.

        Args:
            repository: what is to be served.
            public_key: of whoever has to have signed it; by default as `up` was told.

        Raises:
            ServerError: nothing is served whose place it could take, or it does not come up: the first serves on.
        """
        with self.held():
            if f"{self.name}-gateway" not in self.pods():
                raise ServerError(
                    f"can't roll {repository} out",
                    why="nothing is served whose place it could take",
                    mend=f"python -m deploy.containers up {repository}",
                )
            trusted = self._trusted(public_key)
            pod = self._add(repository, trusted)
            others = [each for each in self.tritons() if each != pod]
            if others:
                time.sleep(NOTICE_S)
            for each in others:
                self._take_away(each)
            self._trust(trusted)
            self._sweep()
            return pod

    def take_away(self, pod: str) -> None:
        """End a Triton that another one stands in for, and remove what it alone had.

        At once: Podman knows no preStop, and a Triton that is told to end while it is asked takes requests that it
        never answers, until its time is up. Of one that has gone, the gateway asks another for what was in flight.
        Sequences that it held are lost.
        """
        with self.held():
            self._take_away(pod)

    def down(self) -> None:
        """Stop those that ask before those that answer; what clients keep (keys, releases) stays.

        Raises:
            ServerError: Podman keeps something.
        """
        with self.held():
            self._clear(grace_s=GRACE_S)
            if left := self.pods():
                raise ServerError(
                    f"can't take {' and '.join(left)} away",
                    why="Podman keeps it",
                    mend=f"podman pod rm --force {' '.join(left)}",
                )

    def pods(self) -> list[str]:
        """Names of its pods."""
        words = ["pod", "ps", "--filter", f"label={PART_OF}={self.name}", "--format", "{{.Name}}"]
        return self.engine.run(*words).stdout.split()

    def tritons(self) -> list[str]:
        """Names of the pods that serve."""
        return [pod for pod in self.pods() if pod.startswith(f"{self.name}-triton-")]

    def _add(self, repository: Path, trusted: str) -> str:
        claim = f"models-{digest(repository, trusted)}"
        pod = f"{self.name}-triton-{claim}"
        if self._serves(pod):
            return pod
        self._forget(pod)
        options = RenderOptions(
            gateway_image=tag_of("gateway"), image=tag_of("triton-cpu"), prometheus_image=tag_of("prometheus"),
            name=self.name, storage=f"pvc:{claim}", signed_by=f"{pod}-{SIGNER}" if trusted else "",
            gateway_port=self.gateway_port, prometheus_port=self.prometheus_port,
        )  # fmt: skip
        try:
            render(repository, self.folder / "kubernetes", options)
            self._volume(claim, repository)
            try:
                self._play("triton", pod, [f"{self.name}-models:alias={self.name}-triton"], trusted)
            except ServerError as err:
                said = self.engine.run("logs", "--tail", "3", f"{pod}-check", check=False)
                if not (said.stdout + said.stderr).strip():
                    raise
                print(f"the repository's check: {said.stdout}{said.stderr}".rstrip(), file=sys.stderr)
                mend = "see what it said above; the repository has to be as `serve pack` wrote it"
                mend += ", and signed by that key" if trusted else ""
                raise ServerError(f"can't serve {repository}", why="its check failed", mend=mend) from err
            self._until(lambda: self._serves(pod), "Triton", pod)
        except BaseException:
            self._forget(pod)
            raise
        return pod

    def _serves(self, pod: str) -> bool:
        ready = ["exec", f"{pod}-triton", "http-ok", "http://127.0.0.1:8000/v2/health/ready"]
        return self.engine.run(*ready, check=False).returncode == 0

    def _take_away(self, pod: str) -> None:
        self.engine.run("kill", "--signal", "KILL", f"{pod}-triton", check=False)
        self._forget(pod)

    def _clear(self, *, grace_s: int) -> None:
        """Everything that is not kept; one thing that refuses keeps none of the others."""
        order = (f"{self.name}-prometheus", f"{self.name}-gateway")
        there = self.pods()
        for pod in (*(each for each in order if each in there), *(each for each in there if each not in order)):
            begun = time.perf_counter()
            self.engine.run("pod", "stop", "--time", str(grace_s), pod, check=False)
            self._forget(pod)
            print(f"{pod} is stopped: {time.perf_counter() - begun:.1f} s", flush=True)
        self._sweep()
        remove_networks(self.engine, self.name)
        self._trust("")

    def _forget(self, pod: str) -> None:
        """The pod, and the volumes that it alone had."""
        self.engine.run("pod", "rm", "--force", "--time", "0", pod, check=False)
        self._sweep()

    def _sweep(self) -> None:
        sweep(self.engine, self.name, self.pods(), self.folder)

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

    def _trusted(self, public_key: Path | None, *, renew: bool = False) -> str:
        """Whose signature is asked for, as PEM: the key that is given, else that of `up`; "" where none is.

        Raises:
            ServerError: what is served was verified, and by which key is not known here.
        """
        kept = self.folder / "signer.pem"
        if public_key is None and (renew or not kept.exists()):
            if not renew and any(self._is_verified(pod) for pod in self.tritons()):
                raise ServerError(
                    "can't tell whose signature is asked for",
                    why=f"{self.name} serves what was verified, and {kept} is not there: it was brought up elsewhere",
                    mend="give --public-key; to serve what nobody signed, take it down and bring it up without",
                )
            return ""
        path = public_key or kept
        read_public_key(path)
        return path.read_text(encoding="ascii")

    def _is_verified(self, pod: str) -> bool:
        """Whether a pod was given a key by which its repository was verified."""
        return f"{pod}-{SIGNER}" in self.engine.run("volume", "ls", "--format", "{{.Name}}").stdout.split()

    def _trust(self, trusted: str) -> None:
        """Keep whose signature is asked for, as long as it is served."""
        kept = self.folder / "signer.pem"
        if trusted:
            replace_file(kept, trusted, mode=0o600)
        else:
            kept.unlink(missing_ok=True)

    def _volume(self, name: str, source: Path, entry: str = ".") -> None:
        with packed(source, entry, self.folder / f"{name}.tar") as archive:
            self.engine.run("volume", "create", "--label", f"{PART_OF}={self.name}", name)
            self.engine.run("volume", "import", name, str(archive))

    def _play(self, part: str, pod: str, networks: Sequence[str], trusted: str = "") -> None:
        """The pod, whose rules stand before its first container starts."""
        words = ["--start=false", "--log-driver=k8s-file", f"--log-opt=max-size={LOG_SIZE}"]
        words += [word for each in networks for word in ("--network", each)]
        if trusted:
            signer = self.folder / "signer.json"  # JSON is YAML, too
            config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{pod}-{SIGNER}"}}
            replace_file(signer, json.dumps(config | {"data": {"public.pem": trusted}}))
            words += ["--configmap", str(signer)]
        self.engine.run("kube", "play", *words, str(self.folder / f"kubernetes/podman/{part}.yaml"))
        (first,) = self.engine.run("pod", "inspect", "--format", "{{.InfraContainerID}}", pod).stdout.split()
        self.engine.run("start", first)
        pid = int(self.engine.run("inspect", "--format", "{{.State.Pid}}", first).stdout)
        put_up(self.engine, pid, fence_of(self.engine, self.name, part))
        self.engine.run("pod", "start", pod)

    def _until(self, ready: Callable[[], bool], what: str, pod: str) -> None:
        deadline = time.monotonic() + READY_S
        while not ready():
            if time.monotonic() > deadline:
                said = self.engine.run("pod", "logs", "--tail", "20", pod, check=False)
                print(said.stdout[-4000:], said.stderr[-2000:], file=sys.stderr)
                mend = "see what it said above"
                if what == "Triton":
                    mend += "; packages that hooks require get into the image by: "
                    mend += "python -m deploy.containers build triton-cpu --repository REPOSITORY"
                raise ServerError(f"can't bring {what} up", why=f"not ready after {READY_S:g} s", mend=mend)
            time.sleep(0.2)


def _check_free(port: int, flag: str) -> None:
    with contextlib.closing(socket.socket()) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as err:
            raise ServerError(
                f"can't listen at 127.0.0.1:{port}", why=str(err), mend=f"stop what does, or name another: {flag}"
            ) from None


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310  on this machine
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False
