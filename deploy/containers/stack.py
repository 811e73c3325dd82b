"""What `serve deploy render` writes for Podman, brought up, changed and stopped in order.

Triton is on a network without a way out; the gateway and Prometheus are on that one, and on one that this machine
reaches; what networks leave open, rules in each pod close (`fence.py`).
Pods that serve stand under one name there, NAME-triton, as behind a headless service.

One command at a time changes what runs, whichever checkout it comes from: pods belong to Podman's store, and so does
the lock. A roll that ends in the middle is finished by the same command, an `up` is begun anew by the next one, and
`down` takes all away.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compress.errors import ServerError
from compress.vetting.replace import replace_file
from deploy.containers import marks
from deploy.containers.application import PART_OF, Application
from deploy.containers.build import PLAYED, check_images, tag_of
from deploy.containers.fence import put_up
from deploy.containers.keys import make_keys
from deploy.containers.leaving import Asked, Silent, asked
from deploy.containers.limits import limit
from deploy.containers.names import check_names
from deploy.containers.networks import fence_of, make_networks, remove_networks
from deploy.containers.ready import READY_S, answers, until_ready, within
from deploy.containers.say import say
from deploy.containers.trust import check_repository, kept_key, key_of, trusted_key
from deploy.containers.volumes import digest, packed, same, sweep
from serve.deploy.cluster.naming import GATEWAY_PORT
from serve.deploy.cluster.render import render
from serve.deploy.cluster.workload import workload_of
from serve.deploy.options import NAME, RenderOptions

__all__ = ["Stack"]

NOTICE_S = 5.0  # for the gateway to look up the new one, where it does not say what it asks
LEAVE_S = 30.0  # for the old one to answer what it has: as long as the gateway waits for an answer
GRACE_S = 45
ALIVE_S = 20.0  # for a gateway that died to be there again
LONGEST = 18  # of names: with a digest they are Kubernetes' names, too
PACKAGES = "packages that hooks require get into the image by: "
PACKAGES += "python -m deploy.containers build triton-cpu --repository REPOSITORY"
LOG_SIZE = "10mb"  # of each container; Podman begins anew where it is full


@dataclass(frozen=True)
class Stack(Application):
    """One application that Podman plays.

    Attributes:
        name: of the application, which all that is its in Podman is called by.

    Raises:
        ServerError: it is no such name.
    """

    name: str = "serving"

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name) or len(self.name) > LONGEST:
            mend = f"take small letters, digits and -, a letter first, {LONGEST} at most"
            raise ServerError(f"can't use --name {self.name}", why="pods can't be called by it", mend=mend)

    def places(self) -> list[Path]:
        """One of Podman's store, for all checkouts; then this checkout's, for all stores."""
        store = Path(self.engine.run("info", "--format", "{{.Store.GraphRoot}}").stdout.strip())
        return [store / "compress-serve" / self.name, self.folder]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """As of any application; what a command that was killed left packed is removed."""
        with super().held():
            for archive in self.folder.glob(f"{self.name}-*.tar"):
                archive.unlink(missing_ok=True)
            yield

    def up(self, repository: Path, public_key: Path | None = None) -> str:
        """Bring all up, one after the other; nothing is left where that fails.

        What an `up` that was killed left is taken away first.

        Args:
            repository: what is served.
            public_key: of whoever has to have signed it, and what is rolled out later.

        Returns:
            The name of the Triton's pod.

        Raises:
            ServerError: something runs already, or does not come up.
            RepositoryError: it is not what was packed, or signed; nothing was started.
        """
        with self.held():
            whole = marks.is_up(self.engine, self.name)
            there = self.pods()
            if whole and there:
                raise ServerError(
                    f"can't bring {self.name} up",
                    why="it runs already",
                    mend="python -m deploy.containers roll REPOSITORY; or down, then up",
                )
            workload_of(repository)
            check_images(self.engine, PLAYED)
            trusted = trusted_key(public_key)
            check_repository(repository, trusted, public_key, self.folder)
            if whole or there:
                say(f"what an earlier command left unfinished of {self.name} is taken away")
                self._clear(grace_s=0)
            check_names(self.engine, self.name)
            for port, flag in ((self.gateway_port, "--gateway-port"), (self.prometheus_port, "--prometheus-port")):
                _check_free(port, flag)
            try:
                make_networks(self.engine, self.name)
                self._secrets()
                marks.keep_signer(self.engine, self.name, trusted)
                pod = self._add(repository, trusted)
                both = [f"{self.name}-models:alias={self.name}-gateway", f"{self.name}-front"]
                self._play("gateway", f"{self.name}-gateway", both)
                self._until(lambda: answers(f"{self.url}/readyz"), "the gateway", f"{self.name}-gateway-gateway")
                self._play("prometheus", f"{self.name}-prometheus", [f"{self.name}-front", f"{self.name}-models"])
                container = f"{self.name}-prometheus-prometheus"
                self._until(lambda: answers(f"{self.prometheus}/-/ready"), "Prometheus", container)
                marks.mark_up(self.engine, self.name)
            except BaseException:
                with contextlib.suppress(ServerError):  # what is told is why it failed; the next `up` clears the rest
                    self._clear(grace_s=0)
                raise
            return pod

    def add(self, repository: Path, public_key: Path | None = None) -> str:
        """Another Triton beside those that serve, with a volume of its own; returns its pod's name once it is ready.

        Raises:
            ServerError: it is not what was packed, or Triton does not come up; then nothing of it is left.
        """
        with self.held():
            trusted = kept_key(self.engine, self.name, self.tritons(), public_key)
            check_repository(repository, trusted, public_key, self.folder)
            return self._add(repository, trusted)

    def roll(self, repository: Path, public_key: Path | None = None) -> str:
        """A second version beside the first, then the first away: no moment without one.

        One that is there already, as an earlier roll that was interrupted left it, is taken.

        Args:
            repository: what is to be served.
            public_key: of whoever has to have signed it; by default as `up` was told.

        Raises:
            ServerError: nothing is served whose place it could take, or it does not come up: the first serves on.
            RepositoryError: it is not what was packed, or signed; nothing was started.
        """
        with self.held():
            self._check_served(repository)
            trusted = kept_key(self.engine, self.name, self.tritons(), public_key)
            check_repository(repository, trusted, public_key, self.folder)
            before = self.tritons()
            pod = self._add(repository, trusted)
            try:
                self._until_gateway_is_ready()
                others = [each for each in self.tritons() if each != pod]
                if others:
                    self._until_asked(repository, pod)
            except BaseException:
                if pod not in before:
                    self._forget(pod)
                raise
            for each in others:
                self._take_away(each)
            marks.keep_signer(self.engine, self.name, trusted)
            self._sweep()
            _check_gone([each for each in self.tritons() if each != pod])
            if others:
                self._until_gateway_is_ready()
            return pod

    def take_away(self, pod: str) -> None:
        """End a Triton that another one stands in for, and remove what it alone had.

        Once the gateway asks it no more: Podman knows no preStop, and a Triton that is told to end while it is asked
        takes requests that it never answers, until its time is up. Sequences that it held are lost.
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
            _check_gone(self.pods())

    def pods(self) -> list[str]:
        """Names of its pods."""
        words = ["pod", "ps", "--filter", f"label={PART_OF}={self.name}", "--format", "{{.Name}}"]
        return self.engine.run(*words).stdout.split()

    def tritons(self) -> list[str]:
        """Names of the pods that serve."""
        return [pod for pod in self.pods() if pod.startswith(f"{self.name}-triton-")]

    def _check_served(self, repository: Path) -> None:
        """A gateway is there and answers, of an `up` that came to its end: only that can be rolled out to.

        Raises:
            ServerError: it is not so.
        """
        what, why = f"can't roll {repository} out", ""
        mend = f"python -m deploy.containers up {repository}"
        if not (there := self.pods()):
            why = "nothing is served whose place it could take"
        elif not marks.is_up(self.engine, self.name):
            why = "the `up` or `down` of what is there was not finished"
        elif f"{self.name}-gateway" not in there or not within(ALIVE_S, lambda: self._gateway_says("healthz")):
            why = "the gateway does not answer"
            mend = (
                f"see podman logs {self.name}-gateway-gateway; python -m deploy.containers down, then up {repository}"
            )
        if why:
            raise ServerError(what, why=why, mend=mend)

    def _add(self, repository: Path, trusted: str) -> str:
        """What is packed is what the name is of, whatever happens to the repository meanwhile."""
        with packed(repository, ".", self.folder / f"{self.name}-models.tar") as archive:
            claim = f"{self.name}-models-{digest(archive, trusted)}"
            pod = f"{self.name}-triton-{claim.removeprefix(f'{self.name}-')}"
            if self._serves(pod):
                self._fence("triton", pod)  # a roll that was to take it away may have closed it
            else:
                self._forget(pod)
                try:
                    self._begin(repository, archive, claim, pod, trusted)
                except BaseException:
                    self._forget(pod)
                    raise
            return pod

    def _begin(self, repository: Path, archive: Path, claim: str, pod: str, trusted: str) -> None:
        options = RenderOptions(
            gateway_image=tag_of("gateway"), image=tag_of("triton-cpu"), prometheus_image=tag_of("prometheus"),
            name=self.name, storage=f"pvc:{claim}", signed_by=key_of(self.name, pod) if trusted else "",
            gateway_port=self.gateway_port, prometheus_port=self.prometheus_port,
        )  # fmt: skip
        render(repository, self.folder / "kubernetes", options)
        same(repository, archive)
        self._fill(claim, archive)
        try:
            self._play("triton", pod, [f"{self.name}-models:alias={self.name}-triton"], trusted)
        except ServerError as err:
            said = self.engine.run("logs", "--tail", "3", f"{pod}-check", check=False)
            if not (said.stdout + said.stderr).strip():
                raise
            say(f"the repository's check: {said.stdout}{said.stderr}".rstrip(), error=True)
            mend = "see what it said above; the repository has to be as `serve pack` wrote it"
            mend += ", and signed by that key" if trusted else ""
            raise ServerError(f"can't serve {repository}", why="its check failed", mend=mend) from err
        self._until(lambda: self._serves(pod), "Triton", f"{pod}-triton", PACKAGES)

    def _serves(self, pod: str) -> bool:
        ready = ["exec", f"{pod}-triton", "http-ok", "http://127.0.0.1:8000/v2/health/ready"]
        return self.engine.run(*ready, check=False).returncode == 0

    def _take_away(self, pod: str) -> None:
        if pod not in self.pods():
            return
        self._leave(pod)
        self.engine.run("kill", "--signal", "KILL", f"{pod}-triton", check=False)
        self._remove(pod)  # at once: until then it stands under the name by which the gateway looks
        self._sweep()

    def _leave(self, pod: str) -> None:
        """The gateway asks it no more, and has its answers; it goes all the same where that takes too long."""

        def is_left() -> bool:
            told = asked(self.engine, self.name, pod)
            return told is Silent.REFUSES or (isinstance(told, Asked) and not (told.up or told.in_flight))

        with contextlib.suppress(ServerError, ValueError):  # its network may be gone with its first process
            self._fence("triton", pod, closed=True)
            within(LEAVE_S, is_left)

    def _until_asked(self, repository: Path, pod: str) -> None:
        told: Asked | Silent = Silent.NOW

        def is_asked() -> bool:
            nonlocal told
            told = asked(self.engine, self.name, pod)
            return told is Silent.REFUSES or (isinstance(told, Asked) and told.up)

        if not within(READY_S, is_asked):
            does = "does not say what it asks" if told is Silent.NOW else "does not ask it"
            raise ServerError(
                f"can't roll {repository} out",
                why=f"it is ready, and the gateway {does} after {READY_S:g} s",
                mend=f"see podman logs {self.name}-gateway-gateway",
            )
        if told is Silent.REFUSES:
            time.sleep(NOTICE_S)
            self._until_gateway_is_ready()

    def _clear(self, *, grace_s: int) -> None:
        """Everything that is not kept; one thing that refuses keeps none of the others."""
        marks.unmark(self.engine, self.name)
        order = (f"{self.name}-prometheus", f"{self.name}-gateway")
        there = self.pods()
        for pod in (*(each for each in order if each in there), *(each for each in there if each not in order)):
            begun = time.perf_counter()
            self.engine.run("pod", "stop", "--time", str(grace_s), pod, check=False)
            self._forget(pod)
            say(f"{pod} is stopped: {time.perf_counter() - begun:.1f} s")
        self._sweep()
        remove_networks(self.engine, self.name)

    def _forget(self, pod: str) -> None:
        """The pod, if it is the application's, and the volumes that it alone had."""
        with contextlib.suppress(ServerError):  # Podman does not tell its pods just now: another command will sweep
            if pod in self.pods():
                self._remove(pod)
        self._sweep()

    def _remove(self, pod: str) -> None:
        self.engine.run("pod", "rm", "--force", "--time", "0", pod, check=False)

    def _sweep(self) -> None:
        with contextlib.suppress(ServerError):
            sweep(self.engine, self.name, self.pods())

    def _secrets(self) -> None:
        """Keys as volumes."""
        make_keys(self.folder)
        for volume, entry, path in (
            ("keys", "keys.json", self.folder / "keys.json"),
            ("metrics-key", "key", self.folder / "metrics-key"),
        ):
            name = f"{self.name}-{volume}"
            marks.remove_volume(self.engine, self.name, name)
            marks.make_volume(self.engine, self.name, name, **{marks.FOLDER: str(self.folder.resolve())})
            with packed(path, entry, self.folder / f"{name}.tar") as archive:
                self._fill(name, archive)

    def _fill(self, name: str, archive: Path) -> None:
        marks.make_volume(self.engine, self.name, name)
        self.engine.run("volume", "import", name, str(archive.absolute()))

    def _play(self, part: str, pod: str, networks: Sequence[str], trusted: str = "") -> None:
        """The pod, whose rules stand before its first container starts."""
        words = ["--start=false", "--log-driver=k8s-file", f"--log-opt=max-size={LOG_SIZE}"]
        words += [word for each in networks for word in ("--network", each)]
        # Podman makes a volume of each ConfigMap, without a label; one that is there it fills anew.
        own = [] if part == "triton" else [pod]
        if trusted:
            config = self.folder / "signer.json"  # JSON is YAML, too
            key = key_of(self.name, pod)
            told = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": key}}
            replace_file(config, json.dumps(told | {"data": {"public.pem": trusted}}))
            words += ["--configmap", str(config.absolute())]
            own += [key, f"{pod}-models"]
        for volume in own:
            marks.make_volume(self.engine, self.name, volume)
        self.engine.run("kube", "play", *words, str(self.folder.absolute() / f"kubernetes/podman/{part}.yaml"))
        self.engine.run("start", self._first(pod))
        limit(part, self.engine.run("pod", "inspect", "--format", "{{.Id}}", pod).stdout.strip(), self._pid(pod))
        self._fence(part, pod)
        self.engine.run("pod", "start", pod)

    def _first(self, pod: str) -> str:
        """The container that a pod's network is of."""
        return self.engine.run("pod", "inspect", "--format", "{{.InfraContainerID}}", pod).stdout.strip()

    def _pid(self, pod: str) -> int:
        return int(self.engine.run("inspect", "--format", "{{.State.Pid}}", self._first(pod)).stdout)

    def _fence(self, part: str, pod: str, *, closed: bool = False) -> None:
        fence = replace(fence_of(self.engine, self.name, part), closed=closed)
        put_up(self.engine, self._pid(pod), fence)

    def _gateway_says(self, path: str) -> bool:
        url = f"http://127.0.0.1:{GATEWAY_PORT}/{path}"
        return self.engine.run("exec", f"{self.name}-gateway-gateway", "http-ok", url, check=False).returncode == 0

    def _until_gateway_is_ready(self) -> None:
        self._until(lambda: self._gateway_says("readyz"), "the gateway", f"{self.name}-gateway-gateway")

    def _until(self, ready: Callable[[], bool], what: str, container: str, mend: str = "") -> None:
        until_ready(self.engine, ready, what, container, mend)


def _check_gone(left: Sequence[str]) -> None:
    if left:
        raise ServerError(
            f"can't take {' and '.join(left)} away",
            why="Podman keeps it",
            mend=f"podman pod rm --force {' '.join(left)}",
        )


def _check_free(port: int, flag: str) -> None:
    with contextlib.closing(socket.socket()) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as err:
            raise ServerError(
                f"can't listen at 127.0.0.1:{port}", why=str(err), mend=f"stop what does, or name another: {flag}"
            ) from None
