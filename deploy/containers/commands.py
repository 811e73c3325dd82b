"""The commands of `python -m deploy.containers`, and how they end."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from cyclopts import App

from compress.errors import ServerError, ToolkitError
from deploy.containers.build import IMAGES, PLAYED, build_all, check_machine
from deploy.containers.composed import Composed
from deploy.containers.engine import find_engine
from deploy.containers.keys import is_known
from deploy.containers.renewed import renew_keys
from deploy.containers.say import say
from deploy.containers.stack import Stack

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/containers"
NAME = "serving"
MODELS = ROOT / "model_repository"
__all__ = ["app", "run"]

app = App(
    name="python -m deploy.containers", help="Images, and what Podman or Docker plays from them, on this machine.",
    suppress_keyboard_interrupt=False,
)  # fmt: skip


def _serving(gateway_port: int = 8080, prometheus_port: int = 9090, name: str = NAME) -> Stack | Composed:
    engine = find_engine()
    folder = FOLDER if name == NAME else FOLDER.with_name(f"{FOLDER.name}-{name}")
    if engine.podman:
        return Stack(engine, folder, gateway_port=gateway_port, prometheus_port=prometheus_port, name=name)
    if name != NAME:
        raise ServerError(f"can't use --name {name}", why="Docker Compose has one application", mend="use Podman")
    return Composed(engine, folder, gateway_port=gateway_port, prometheus_port=prometheus_port)


@app.command
def build(*names: str, repository: Path = MODELS) -> None:
    """Build images: all, or those that are named (gateway, triton-cpu, prometheus, compress, models).

    Parameters
    ----------
    names
        Of images.
    repository
        Whose hooks the Triton shall be able to run.
    """
    engine = find_engine()
    chosen = names or tuple(image.name for image in IMAGES)
    check_machine(engine, chosen, play=False)
    build_all(engine, chosen, repository, FOLDER)


@app.command
def up(
    repository: Path = MODELS, *, public_key: Path | None = None, gateway_port: int = 8080,
    prometheus_port: int = 9090, name: str = NAME,
) -> None:  # fmt: skip
    """Triton, gateway and Prometheus for a model repository; build the images before.

    Parameters
    ----------
    repository
        What `serve pack` wrote.
    public_key
        Of whoever has to have signed it (PEM), and what is rolled out later; by Podman only.
    gateway_port
        On 127.0.0.1.
    prometheus_port
        On 127.0.0.1.
    name
        Of the application, by Podman only: a second one beside the first has another, and other ports.
    """
    serving = _serving(gateway_port, prometheus_port, name)
    check_machine(serving.engine, (), play=True)
    serving.up(repository, public_key)
    say(f"gateway {serving.url}, Prometheus {serving.prometheus}")
    if is_known(serving.folder, "client"):
        say(f"clients' key: SERVE_API_KEY=$(cat {serving.folder}/client-key)")
    else:
        say(f"clients have the keys of {serving.folder}/keys.json: 'client' is revoked")


@app.command
def roll(repository: Path, *, public_key: Path | None = None, name: str = NAME) -> None:
    """Put another repository in the place of the one that is served, without a pause.

    One that was interrupted is finished by the same command.

    Parameters
    ----------
    repository
        What `serve pack` wrote.
    public_key
        Of whoever has to have signed it (PEM); by default as `up` was told.
    name
        Of the application.
    """
    serving = _serving(name=name)
    if not isinstance(serving, Stack):
        raise ServerError(
            "can't put another repository in place without a pause",
            why="Docker Compose has one Triton",
            mend="up OTHER_REPOSITORY, with a pause; or Podman",
        )
    say(f"{serving.roll(repository, public_key)} serves now")


@app.command
def keys(*, name: str = NAME) -> None:
    """Give the gateway that runs its keys as they are now: after `serve keys add` or `serve keys revoke`.

    Parameters
    ----------
    name
        Of the application.
    """
    say(f"the gateway has {renew_keys(_serving(name=name))} keys now")


@app.command
def down(*, name: str = NAME) -> None:
    """Stop gateway, Prometheus and Triton, in this order; keys and releases stay.

    Parameters
    ----------
    name
        Of the application.
    """
    _serving(name=name).down()


@app.command
def check(
    *, gateway_port: int = 8080, prometheus_port: int = 9090, twice: bool = True, build_first: bool = True
) -> None:
    """Build all, and prove it: see deploy/README.md.

    Parameters
    ----------
    gateway_port
        On 127.0.0.1.
    prometheus_port
        On 127.0.0.1.
    twice
        Build the images that serve once more, and compare them.
    build_first
        With Docker, build what is run; not, where `docker load` brought it.
    """
    from deploy.containers.check import run, run_composed

    serving = _serving(gateway_port, prometheus_port)
    if isinstance(serving, Stack):
        check_machine(serving.engine, [image.name for image in IMAGES], play=True)
        say(json.dumps(run(serving, twice=twice)))
    else:
        check_machine(serving.engine, PLAYED if build_first else (), play=True)
        if build_first:
            build_all(serving.engine, PLAYED, MODELS, FOLDER)
        say(json.dumps(run_composed(serving)))


def run() -> None:
    """Parse, call, and tell how it ended."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) != signal.SIG_IGN:  # as under nohup
            signal.signal(each, _interrupted)
    try:
        app()
    except KeyboardInterrupt:
        say("interrupted: the same command again finishes it, and `down` takes all away", error=True)
        sys.exit(130)
    except ToolkitError as err:
        say(str(err), error=True)
        sys.exit(2)


def _interrupted(number: int, _: object) -> None:
    """A terminal that is closed says so by the kernel and by the shell: once is enough, and what cleans up goes on."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise KeyboardInterrupt(number)
